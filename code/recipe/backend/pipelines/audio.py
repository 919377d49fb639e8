"""Audio of requests: WAV, FLAC, OGG or MP3 of any rate and number of channels, without ffmpeg."""

from __future__ import annotations

import io
import math
from typing import Any

from recipe.backend import bounds
from recipe.backend.bounds import Bound
from recipe.backend.images import data_of
from recipe.backend.requests.payloads import BadRequest
from recipe.errors import describe_error

EXAMPLE = 'Send the file\'s bytes as audio/wav, or {"inputs": "the file in base64"}.'
_RATES = range(1_000, 384_001)
"""Samples a second. Resampling takes a filter as long as the rate."""
_LOUDEST = 2.0**31
"""What integers of 32 bits reach, if a file has them as floats. Squares of more would overflow."""
_BLOCK = 1 << 20
"""Numbers that are decoded at once."""


class Seconds:
    """Counts the seconds of a request's audio."""

    def __init__(self) -> None:
        self._count = 0.0

    def take(self, seconds: float) -> None:
        """Count more seconds. Raise TooCostly if the request has too many."""
        self._count += seconds
        bounds.hold(Bound.SECONDS, math.ceil(self._count))


def read(value: Any, rate: int, seconds: Seconds) -> Any:
    """Return the samples of a file's bytes or base64 as a float32 array [samples] at `rate`, the
    mean of its channels. Raise BadRequest if it is not audio, and TooCostly if the request has too
    much of it."""
    import numpy as np
    import soundfile
    from scipy.signal import resample_poly  # type: ignore[import-untyped]

    data, blocks = data_of(value, "audio file", EXAMPLE), []
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            native = file.samplerate
            if native not in _RATES:
                raise BadRequest(
                    f"The audio has {native:,} samples a second. Resample it to {rate:,}."
                )
            # Headers may lack the length or lie, and silence is compressed a thousandfold.
            frames = max(1, _BLOCK // file.channels)
            while len(block := file.read(frames, dtype="float32", always_2d=True)):
                seconds.take(len(block) / native)
                blocks.append(block.mean(axis=1))
    except soundfile.LibsndfileError as error:
        why = describe_error(error).rstrip(".")
        why = f"The audio cannot be read: {why}. Send WAV, FLAC, OGG or MP3."
        raise BadRequest(why) from error
    if not blocks:
        raise BadRequest("The audio has no samples.")
    samples = np.concatenate(blocks)
    if not (np.abs(samples) <= _LOUDEST).all():  # nor of NaN
        raise BadRequest("The audio has samples that are NaN, or not from -2^31 to 2^31.")
    if native == rate:
        return samples
    common = math.gcd(native, rate)
    return resample_poly(samples, rate // common, native // common).astype(np.float32)
