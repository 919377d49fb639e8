"""Images and audio of requests: bytes, or base64 in JSON. URLs and paths are refused."""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import re
import shutil
import struct
import subprocess
import warnings
from typing import Any

import numpy as np

from recipe.backend import bounds
from recipe.backend.bounds import Bound
from recipe.backend.requests.payloads import BadRequest, NotTakenHere
from recipe.data.files.image_files import Unreadable, picture

_NAMED = re.compile(r"\s*([a-z][a-z0-9+.-]*://|/|\.{1,2}/|[A-Za-z]:\\)", re.IGNORECASE)
_LEAST_RATE, _MOST_RATE = 1_000, 384_000
_DATA = re.compile(r"data:[\w/+.;=-]*;base64,", re.IGNORECASE)


def data_of(value: str, what: str) -> bytes:
    """Return the bytes of base64, with or without the prefix `data:...;base64,`, line breaks and
    padding, in the alphabet of URLs or the usual one. Raise BadRequest for others, such as URLs."""
    head = _DATA.match(value)
    # A JPEG's base64 begins with a slash, as a path does.
    is_base64 = len(value) > 64 and re.fullmatch(r"[A-Za-z0-9+/=\s_-]+", value) is not None
    if head is None and _NAMED.match(value) and not is_base64:
        raise BadRequest(
            f"An input is {value[:60]!r}: URLs and paths are not followed. Send the {what} "
            "itself, as the body or as base64."
        )
    text = re.sub(r"[\r\n]", "", value[head.end() if head else 0 :]).strip().rstrip("=")
    text = text.translate(str.maketrans("-_", "+/")) + "=" * (-len(text) % 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(
            f"An input is {value[:40]!r}, which is not a valid {what} in base64."
        ) from error


class Pixels:
    """Counts the pixels of a request's images."""

    def __init__(self) -> None:
        self._count = 0

    def take(self, data: bytes) -> None:
        """Count an image before it is decoded. Raise BadRequest if it is not an image, and
        TooCostly if the request's images have too many pixels."""
        from PIL import Image

        try:
            width, height = Image.open(io.BytesIO(data)).size
        except Exception as error:
            # Decoders of damaged images raise exceptions of many types.
            raise BadRequest(f"An image cannot be read: {error}") from error
        self._count += width * height
        bounds.hold(Bound.PIXELS, self._count, f"the last image has {width:,} x {height:,}")


def image(value: Any, pixels: Pixels) -> Any:
    """Return an image in RGB from a file's bytes or base64. Raise BadRequest if it is not an image,
    and TooCostly if the request's images have too many pixels."""
    data = data_of(value, "image") if isinstance(value, str) else value
    if not isinstance(data, bytes):
        raise BadRequest(f"An input is {str(value)[:60]!r}, not an image. Send it as base64.")
    pixels.take(data)
    try:
        return picture(data, Bound.PIXELS.most)
    except Unreadable as error:
        raise BadRequest(str(error)) from error


def sound(value: Any, rate: int) -> Any:
    """Return audio in the form of transformers' pipelines, at the model's sampling rate.

    Args:
        value: A file's bytes, or base64 of them, or `{"raw" or "array": numbers,
            "sampling_rate": hertz}`.
        rate: The model's sampling rate in hertz.

    Raises:
        BadRequest: The value is not audio.
        NotTakenHere: The format needs ffmpeg, which is not installed.
    """
    if isinstance(value, dict):
        numbers, hertz = value.get("raw", value.get("array")), value.get("sampling_rate")
        extra = set(value) - {"raw", "array", "sampling_rate"}
        if extra or not isinstance(numbers, list) or type(hertz) is not int or hertz < 1:
            raise BadRequest('Send audio as {"raw": [0.0, ...], "sampling_rate": 16000}.')
        bounds.hold(Bound.SAMPLES, len(numbers))
        try:
            array = np.asarray(numbers, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise BadRequest(f"'raw' has values other than numbers: {error}.") from error
        return _resampled(array, hertz, rate)
    data = data_of(value, "sound") if isinstance(value, str) else value
    if not isinstance(data, bytes):
        raise BadRequest(f"An input is {str(value)[:60]!r}, not audio. Send it as base64.")
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        try:
            samples, hertz = wave_samples(data)
        except (ValueError, struct.error) as error:
            if shutil.which("ffmpeg") is None:
                raise BadRequest(f"The WAV file cannot be read: {error}.") from error
        else:
            return _resampled(samples, hertz, rate)
    if shutil.which("ffmpeg") is None:
        raise NotTakenHere(
            "Only WAV (PCM or float) is read, since ffmpeg is not installed. Send audio/wav, or "
            '{"inputs": {"raw": [...], "sampling_rate": 16000}}.'
        )
    # ffmpeg reads only the body, not what it refers to, and no more of it than the bound.
    command = ["ffmpeg", "-nostdin", "-protocol_whitelist", "pipe", "-i", "pipe:0"]
    command += ["-t", str(Bound.SAMPLES.most / rate + 1), "-ac", "1", "-ar", str(rate)]
    command += ["-f", "f32le", "-hide_banner", "-loglevel", "error", "pipe:1"]
    done = subprocess.run(command, input=data, capture_output=True)
    samples = np.frombuffer(done.stdout[: len(done.stdout) // 4 * 4], np.float32)
    if not len(samples):
        why = done.stderr.decode(errors="replace").strip()[:200]
        raise BadRequest(f"The audio cannot be read: {why or 'it has no samples'}.")
    bounds.hold(Bound.SAMPLES, len(samples), "decoded up to the bound")
    return {"raw": samples.copy(), "sampling_rate": rate}


def wave_samples(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """Return the samples of a WAV file from -1 to 1, the mean of its channels, and its sampling
    rate. Raise ValueError or struct.error if it is damaged, or neither PCM nor floats."""
    wavfile = importlib.import_module("scipy.io.wavfile")
    with warnings.catch_warnings():
        # Chunks of titles and the like, and of files that were written as a stream.
        warnings.simplefilter("ignore")
        rate, samples = wavfile.read(io.BytesIO(data))
    if samples.dtype.kind != "f":
        least = 128 if samples.dtype == np.uint8 else 0
        most = least or -int(np.iinfo(samples.dtype).min)
        samples = (samples.astype(np.float32) - least) / most
    return samples.reshape(len(samples), -1).mean(1).astype(np.float32), rate


def _resampled(samples: np.ndarray[Any, Any], hertz: int, rate: int) -> dict[str, Any]:
    if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
        raise BadRequest("The audio must be one list of finite numbers that is not empty.")
    if not _LEAST_RATE <= hertz <= _MOST_RATE:
        raise BadRequest(
            f"The audio's sampling rate is {str(hertz)[:20]} hertz: give {_LEAST_RATE:,} to"
            f" {_MOST_RATE:,}."
        )
    count = len(samples) * rate // hertz
    bounds.hold(Bound.SAMPLES, max(len(samples), count), f"{len(samples):,} at {hertz:,} hertz")
    if hertz != rate:
        resample = importlib.import_module("scipy.signal").resample_poly
        divisor = int(np.gcd(hertz, rate))
        samples = resample(samples, rate // divisor, hertz // divisor).astype(np.float32)
    return {"raw": samples, "sampling_rate": rate}
