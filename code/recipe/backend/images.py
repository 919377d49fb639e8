"""Images of requests: bytes, or base64 in JSON. URLs and paths are refused."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any

from recipe.backend import bounds
from recipe.backend.bounds import Bound
from recipe.backend.requests.payloads import BadRequest
from recipe.data.files.image_files import Unreadable, read_image
from recipe.errors import describe_error

EXAMPLE = 'Send the file\'s bytes as image/png, or {"inputs": "the image in base64"}.'
_NAMED = re.compile(r"\s*([a-z][a-z0-9+.-]*://|/|\.{1,2}/|[A-Za-z]:\\)", re.IGNORECASE)
_DATA = re.compile(r"data:[\w/+.;=-]*;base64,", re.IGNORECASE)


def data_of(value: str) -> bytes:
    """Return the bytes of base64, with or without the prefix `data:...;base64,`, line breaks and
    padding, in the alphabet of URLs or the usual one. Raise BadRequest for others, such as URLs."""
    head = _DATA.match(value)
    # A JPEG's base64 begins with a slash, as a path does.
    is_base64 = len(value) > 64 and re.fullmatch(r"[A-Za-z0-9+/=\s_-]+", value) is not None
    if head is None and _NAMED.match(value) and not is_base64:
        raise BadRequest(
            f"An input is {value[:60]!r}: URLs and paths are not followed. Send the image "
            "itself, as the body or as base64."
        )
    text = re.sub(r"[\r\n]", "", value[head.end() if head else 0 :]).strip().rstrip("=")
    text = text.translate(str.maketrans("-_", "+/")) + "=" * (-len(text) % 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(
            f"An input is {value[:40]!r}, which is not a valid image in base64."
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
            raise BadRequest(f"An image cannot be read: {describe_error(error)}") from error
        self._count += width * height
        bounds.hold(Bound.PIXELS, self._count, f"the last image has {width:,} x {height:,}")


def read(value: Any, pixels: Pixels) -> Any:
    """Return an image in RGB from a file's bytes or base64. Raise BadRequest if it is not an image,
    and TooCostly if the request's images have too many pixels."""
    data = data_of(value) if isinstance(value, str) else value
    if not isinstance(data, bytes):
        raise BadRequest(f"An input is {str(value)[:60]!r}, not an image. {EXAMPLE}")
    pixels.take(data)
    try:
        return read_image(data, Bound.PIXELS.most)
    except Unreadable as error:
        raise BadRequest(str(error)) from error
