"""Make batches of images of one shape, which are cropped and mirrored at random in training.

The random numbers are a pure function of (seed, epoch, row): they do not depend on how images are
divided among steps and processes, or where a job was resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from recipe.batching.batches import Batch, Samples
from recipe.batching.packing import Rows

_LEAST_SHARE = 0.75
"""The smallest share of an image's height and width that a crop keeps."""
Pixels = npt.NDArray[np.uint8]
CROP, FLIP = "crop", "flip"


@dataclass(frozen=True)
class PictureSamples(Samples):
    """Samples that are images, each of which counts as one token."""

    pixels: Pixels
    """[images, 3, height, width]"""
    digest: str
    """A digest of the files, and of how they are processed."""
    augmentation: frozenset[str] = frozenset()
    drawn_with: tuple[int, int] | None = None
    """Seed and epoch; None without augmentation."""

    def draw_epoch(self, seed: int, epoch: int) -> PictureSamples:
        """Return the images as this epoch crops and mirrors them."""
        return dataclasses.replace(self, drawn_with=(seed, epoch))

    def fingerprint(self) -> str:
        """Return a digest of the labels and of the images' files, without reading the pixels."""
        labels = hashlib.sha256(np.ascontiguousarray(self.labels).data).hexdigest()[:16]
        return f"{labels}-{self.digest}"

    def picture(self, row: int) -> Pixels:
        """Return the pixels of a row [3, height, width]."""
        pixels: Pixels = self.pixels[row]
        if self.drawn_with is None or not self.augmentation:
            return pixels
        random = np.random.default_rng((2, *self.drawn_with, row))
        if CROP in self.augmentation:
            from PIL import Image

            _, height, width = pixels.shape
            tall, wide = random.uniform(_LEAST_SHARE, 1, 2) * (height, width)
            top, left = random.random(2) * (height - tall, width - wide)
            whole: Any = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
            box = (left, top, left + wide, top + tall)
            part = whole.resize((width, height), Image.Resampling.BILINEAR, box=box)
            pixels = np.asarray(part).transpose(2, 0, 1)
        if FLIP in self.augmentation and random.random() < 0.5:
            pixels = pixels[..., ::-1]
        return pixels


@dataclass(frozen=True)
class FixedPictures:
    """Images of one shape, normalized as the model expects."""

    size: int
    height: int
    width: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    balanced: ClassVar[bool] = False

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return pixel_values [size, 3, height, width] in float32."""
        assert isinstance(samples, PictureSamples)
        pixels = np.zeros((self.size, 3, self.height, self.width), dtype=np.uint8)
        for index, row in enumerate(rows.tolist()):
            pixels[index] = samples.picture(row)
        values = torch.from_numpy(pixels).float().mul_(self.scale)
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return {"pixel_values": values.sub_(mean).div_(std)}

    def describe(self) -> str:
        """Return the size of the images."""
        return f"of {self.width} x {self.height} pixels"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the number of rows: each image counts as one token."""
        return self.size
