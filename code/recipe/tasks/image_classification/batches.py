"""Convert images to pixels by the model's image processor, cached on disk, and make batches of one
shape, which are cropped and mirrored at random in training.

The random numbers are a pure function of (seed, epoch, row): they do not depend on how images are
divided among steps and processes, or where a job was resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import numpy.typing as npt
import torch

from recipe.batching.batches import Batch, Samples
from recipe.batching.packing import Rows
from recipe.console import say
from recipe.data.column_names import LABEL
from recipe.data.files.image_files import Unreadable, read_image
from recipe.errors import DataError, ModelError, Problems
from recipe.runtime import memory
from recipe.storage import number_files
from recipe.tasks.image_classification.data import BYTES, FILE, LOCATION

_LEAST_SHARE = 0.75
"""The smallest share of an image's height and width that a crop keeps."""
_LEVELS = 0.01
"""The most that values may differ from those of 8 bit pixels, in steps of these."""
Pixels = npt.NDArray[np.uint8]
CROP, FLIP = "crop", "flip"
_SPARE = 1 << 28  # bytes


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
class Preprocessing:
    """An image processor, which computes `pixels * scale + offset` from the 8 bit pixels that it
    resizes and crops: these are stored and augmented. Measured, since processors have steps of
    their own, such as EfficientNet's `include_top`."""

    processor: Any
    height: int
    width: int
    scale: npt.NDArray[np.float64]
    """[3, 1, 1]"""
    offset: npt.NDArray[np.float64]
    """[3, 1, 1]"""

    @classmethod
    def measure(cls, processor: Any) -> Preprocessing:
        """Measure a processor on a black and a white image. Raise ModelError if images of three
        sizes do not get the same one, or both colours the same values."""
        from PIL import Image

        black, white, *others = (
            _values(processor, Image.new("RGB", size, colour))
            for size, colour in (
                ((64, 48), "black"), ((64, 48), "white"), ((31, 97), "black"), ((200, 200), "black")
            )
        )  # fmt: skip
        _, height, width = black.shape
        if any(other.shape != black.shape for other in others):
            raise ModelError(
                f"The model's image processor ({type(processor).__name__}) does not give all "
                "images the same size.",
                "Set do_resize and a size with height and width in its preprocessor_config.json.",
            )
        middle = np.s_[:, height // 2, width // 2, None, None]  # a crop may add margins
        offset = black[middle]
        return cls(processor, height, width, (white[middle] - offset) / 255, offset)

    def pixels(self, image: Any) -> Pixels:
        """Return the pixels [3, height, width] of an image. Raise ModelError if the processor's
        values are not those that the job would compute from them."""
        values = _values(self.processor, image)
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = (values - self.offset) / self.scale
        pixels = exact.round().clip(0, 255)
        # NaN if the scale is 0: a processor may normalize each image by its own mean.
        if not np.abs(exact - pixels).max() < _LEVELS:
            raise ModelError(
                f"The model's image processor ({type(self.processor).__name__}) computes values "
                "that are not a scale and an offset of 8 bit pixels: training would see other "
                "images than the endpoint.",
                "Set do_pad to false in its preprocessor_config.json if it is true, else use the "
                "processor of another model of this kind, such as ViTImageProcessor.",
            )
        levels: Pixels = pixels.astype(np.uint8)
        return levels


@dataclass(frozen=True)
class FixedPictures:
    """Images of one shape, normalized as the model expects."""

    size: int
    preprocessing: Preprocessing
    fills: bool
    """Whether unused slots are filled; batch normalization would count their pixels."""
    balanced: ClassVar[bool] = False

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return pixel_values [size, 3, height, width] in float32; [rows, ...] if unused slots are
        not filled, with a single image twice: batch normalization cannot train on one value."""
        assert isinstance(samples, PictureSamples)
        images = [samples.picture(row) for row in rows.tolist() or [0]]
        if not self.fills and len(images) == 1:
            images *= 2
        count, made = self.size if self.fills else len(images), self.preprocessing
        pixels = np.zeros((count, 3, made.height, made.width), dtype=np.uint8)
        pixels[: len(images)] = images
        scale, offset = (
            torch.from_numpy(one.astype(np.float32)) for one in (made.scale, made.offset)
        )
        return {"pixel_values": torch.from_numpy(pixels).float().mul_(scale).add_(offset)}

    def describe(self) -> str:
        """Return the size of the images."""
        return f"of {self.preprocessing.width} x {self.preprocessing.height} pixels"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the number of rows: each image counts as one token."""
        return self.size


def read(
    name: str, split: datasets.Dataset, processor: Any, augmentation: frozenset[str]
) -> PictureSamples:
    """Return the images of a split of `data.load`, and log how many there are.

    Each is decoded once into a file in the cache of data sets (HF_DATASETS_CACHE), which all
    processes of the host and a restarted job read.

    Args:
        name: Of the split.
        processor: transformers' image processor.
        augmentation: What is drawn anew in each epoch of a training.

    Raises:
        DataError: images cannot be read (each is named), or the disk has no room for them.
    """
    preprocessing = Preprocessing.measure(processor)
    height, width = preprocessing.height, preprocessing.width
    # Equal only for the same contents and processor.
    sha = hashlib.sha256(json.dumps(processor.to_dict(), sort_keys=True, default=str).encode())
    for sample in split:
        content = sample[BYTES] if sample[BYTES] is not None else Path(sample[FILE]).read_bytes()
        sha.update(hashlib.sha256(content).digest())
    digest, count = sha.hexdigest()[:32], len(split)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "images"
    folder.mkdir(parents=True, exist_ok=True)

    def decoded() -> Iterator[dict[str, Pixels]]:
        problems = Problems()
        for sample in split:
            with problems.noted():
                source = sample[BYTES] if sample[BYTES] is not None else Path(sample[FILE])
                try:
                    opened = read_image(source)
                except Unreadable as error:
                    raise DataError(
                        f"{sample[LOCATION]}: {error}", "Remove it, or save it again."
                    ) from error
                yield {"pixels": preprocessing.pixels(opened)[None]}
        problems.check()

    if not (folder / digest).is_dir():
        needed = math.prod((count, 3, height, width))
        if shutil.disk_usage(folder).free < needed + _SPARE:
            raise DataError(
                f"The {name} data's {count} images take {memory.size(needed)} at {width} "
                f"x {height} pixels, more than {folder} has free.",
                "Give the job a larger volume, or set HF_DATASETS_CACHE to a folder on one.",
            )
        number_files.write(folder / digest, decoded())
    pixels = number_files.read(folder / digest)["pixels"]
    say(f"{name}: {count} images of {width} x {height} pixels")
    labels = np.asarray(split[LABEL][:], dtype=np.int64)
    starts = np.arange(count + 1)
    return PictureSamples(np.zeros(count, np.int32), starts, labels, pixels, digest, augmentation)


def _values(processor: Any, image: Any) -> npt.NDArray[np.float64]:
    """Return the values [3, height, width] that the model gets for an image. Raise ModelError if
    they have another form, such as the patches of SigLIP2's NaFlex."""
    try:
        values = processor(image, return_tensors="pt")["pixel_values"].numpy().astype(np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"The model's image processor ({type(processor).__name__}) gives no pixel_values for "
            f"an image: {type(error).__name__}: {error}",
            "Use a model whose processor makes images of one size, such as ViT.",
        ) from error
    if values.ndim != 4 or values.shape[:2] != (1, 3):
        raise ModelError(
            f"The model's image processor ({type(processor).__name__}) makes values of the shape "
            f"{list(values.shape)} from an image, and training needs [1, 3, height, width].",
            "Use a model whose processor makes images of one size, such as ViT, or SigLIP for "
            "SigLIP2's NaFlex.",
        )
    return np.asarray(values[0])
