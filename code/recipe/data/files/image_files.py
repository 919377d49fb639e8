"""Files of pictures to pictures in RGB, the same way in training and in serving."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

MOST_PIXELS = 64_000_000
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
)
"""What files of pictures end with, in lower case."""


class Unreadable(ValueError):
    """Bytes that are no picture, or one that is not read."""


def picture(source: bytes | Path, most: int = MOST_PIXELS) -> Any:
    """A PIL picture in RGB, upright as its camera says.

    Transparent places show the colour that lies below them, as `convert` of PIL has it and
    transformers' pipelines, too. Of a grey picture of 16 bits the upper eight are taken.

    Args:
        source: The file.
        most: Pixels that it may have.

    Raises:
        Unreadable: it is none, is cut off, or has more pixels than anybody's camera.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        opened: Any = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if opened.width * opened.height > most:
            raise Unreadable(
                f"The image has {opened.width} x {opened.height} pixels; {most} are taken."
            )
        upright = ImageOps.exif_transpose(opened)
        if upright.mode.startswith("I"):
            # PIL would make white of all that is above 255.
            values = np.asarray(upright).astype(np.int64)
            values = values >> 8 if upright.mode != "I" or values.max(initial=0) > 255 else values
            upright = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        return upright.convert("RGB")
    except Unreadable:
        raise
    except Exception as error:
        # Decoders of damaged pictures raise what they like.
        raise Unreadable(f"An image cannot be read: {error}") from error
