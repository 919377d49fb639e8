"""Decode image files to RGB, the same way in training and in serving."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from recipe.errors import describe_error

MOST_PIXELS = 64_000_000
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
)
"""Suffixes of image files, in lower case."""


class Unreadable(ValueError):
    """The bytes are not an image, or one that is not supported."""


def read_image(source: bytes | Path, most: int = MOST_PIXELS) -> Any:
    """Return a PIL image in RGB, rotated as its EXIF data says.

    Transparent pixels keep their colour, as in PIL's `convert` and transformers' pipelines. Of
    16-bit grey images, the upper eight bits are used.

    Raises:
        Unreadable: it is not an image, is truncated, or has too many pixels.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        opened: Any = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if opened.width * opened.height > most:
            raise Unreadable(
                f"The image has {opened.width} x {opened.height} pixels; {most} are allowed."
            )
        upright = ImageOps.exif_transpose(opened)
        if upright.mode.startswith("I"):
            # PIL would turn all values above 255 into white.
            values = np.asarray(upright).astype(np.int64)
            values = values >> 8 if upright.mode != "I" or values.max(initial=0) > 255 else values
            upright = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        return upright.convert("RGB")
    except Unreadable:
        raise
    except Exception as error:
        # Decoders raise any type of exception on damaged images.
        raise Unreadable(f"An image cannot be read: {describe_error(error)}") from error
