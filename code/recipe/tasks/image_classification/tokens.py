"""Convert data sets of images to pixels by the model's image processor, cached on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from recipe.console import say
from recipe.data.column_names import LABEL
from recipe.data.files.image_files import Unreadable, picture
from recipe.errors import DataError, ModelError, Problems
from recipe.storage import claims
from recipe.tasks.image_classification.batches import PictureSamples
from recipe.tasks.image_classification.data import BYTES, FILE, LOCATION

_SPARE = 1 << 28  # bytes


def read(
    name: str, split: datasets.Dataset, processor: Any, augmentation: frozenset[str]
) -> PictureSamples:
    """Return the images of a split of `data.Pictures`, and log how many there are.

    Each is decoded once into a file in the cache of data sets (HF_DATASETS_CACHE), which all
    processes of the host and a restarted job read.

    Args:
        name: Of the split.
        processor: transformers' image processor.
        augmentation: What is drawn anew in each epoch of a training.

    Raises:
        DataError: images cannot be read (each is named), or the disk has no room for them.
    """
    height, width = shape_of(processor)
    # Equal only for the same contents and processor.
    sha = hashlib.sha256(json.dumps(processor.to_dict(), sort_keys=True, default=str).encode())
    for sample in split:
        content = sample[BYTES] if sample[BYTES] is not None else Path(sample[FILE]).read_bytes()
        sha.update(hashlib.sha256(content).digest())
    digest = sha.hexdigest()[:32]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.u8"
    shape = (len(split), 3, height, width)
    if not path.is_file():
        needed = int(np.prod(shape))
        if shutil.disk_usage(folder).free < needed + _SPARE:
            raise DataError(
                f"The {name} data's {len(split)} images take {needed / 1e9:.1f} GB at {width} "
                f"x {height} pixels, more than {folder} has free.",
                "Give the job a larger volume, or set HF_DATASETS_CACHE to a folder on one.",
            )
        with claims.claimed(folder, digest) as claimed:
            aside = claimed / path.name
            filled = np.memmap(aside, np.uint8, "w+", shape=shape)
            problems = Problems()
            for row, sample in enumerate(split):
                with problems.noted():
                    source = sample[BYTES] if sample[BYTES] is not None else Path(sample[FILE])
                    try:
                        opened = picture(source)
                    except Unreadable as error:
                        raise DataError(
                            f"{sample[LOCATION]}: {error}", "Remove it, or save it again."
                        ) from error
                    filled[row] = _pixels(processor, opened)
            problems.check()
            filled.flush()
            aside.replace(path)
    pixels = np.memmap(path, np.uint8, "r", shape=shape)
    say(f"{name}: {len(split)} images of {width} x {height} pixels")
    count = len(split)
    return PictureSamples(
        np.zeros(count, dtype=np.int32),
        np.arange(count + 1),
        np.asarray(split[LABEL][:], dtype=np.int64),
        pixels,
        digest,
        augmentation,
    )


def shape_of(processor: Any) -> tuple[int, int]:
    """Return the height and width of an image processor's output.

    Raises:
        ModelError: they are not the same for all images.
    """
    from PIL import Image

    sizes = {
        _pixels(processor, Image.new("RGB", size)).shape[1:]
        for size in ((64, 48), (31, 97), (200, 200))
    }
    if len(sizes) > 1:
        raise ModelError(
            f"The model's image processor ({type(processor).__name__}) does not give all images "
            "the same size.",
            "Set do_resize and a size with height and width in its preprocessor_config.json.",
        )
    ((height, width),) = sizes
    return int(height), int(width)


def _pixels(processor: Any, opened: Any) -> Any:
    """Return the pixels [3, height, width], uint8."""
    processed = processor(opened, do_rescale=False, do_normalize=False, return_tensors="np")
    return np.asarray(processed["pixel_values"][0]).round().clip(0, 255).astype(np.uint8)
