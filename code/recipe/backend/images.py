"""Files of requests: bytes, or base64 in JSON. URLs and paths are refused. Images of these."""

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


def refuse_location(value: str) -> None:
    """Raise BadRequest for a text that names a file: a URL, or a path as it is usually written."""
    # A JPEG's base64 begins with a slash, as a path does.
    is_base64 = len(value) > 64 and re.fullmatch(r"[A-Za-z0-9+/=\s_-]+", value) is not None
    if _NAMED.match(value) and not is_base64:
        raise BadRequest(
            f"An input is {value[:60]!r}: URLs and paths are not followed. Send the file "
            "itself, as the body or as base64."
        )


def data_of(value: Any, kind: str = "image", example: str = EXAMPLE) -> bytes:
    """Return bytes unchanged, and those of base64, with or without the prefix `data:...;base64,`,
    line breaks and padding, in the alphabet of URLs or the usual one. Raise BadRequest for others,
    such as URLs."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise BadRequest(f"An input is {str(value)[:60]!r}, not an {kind}. {example}")
    if (head := _DATA.match(value)) is None:
        refuse_location(value)
    text = re.sub(r"[\r\n]", "", value[head.end() if head else 0 :]).strip().rstrip("=")
    text = text.translate(str.maketrans("-_", "+/")) + "=" * (-len(text) % 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(
            f"An input is {value[:40]!r}, which is not a valid {kind} in base64."
        ) from error


class Pixels:
    """Counts the pixels of a request's images."""

    def __init__(self) -> None:
        self._count = 0
        self.largest = 1
        """The pixels of the largest image."""

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
        self.largest = max(self.largest, width * height)
        bounds.hold(Bound.PIXELS, self._count, f"the last image has {width:,} x {height:,}")


def read(value: Any, pixels: Pixels) -> Any:
    """Return an image in RGB from a file's bytes or base64. Raise BadRequest if it is not an image,
    and TooCostly if the request's images have too many pixels."""
    data = data_of(value)
    pixels.take(data)
    try:
        return read_image(data, Bound.PIXELS.most)
    except Unreadable as error:
        raise BadRequest(str(error)) from error
