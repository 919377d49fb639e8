"""Image classification: a class for each image."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipe.option_fields import option
from recipe.spec import LABEL, CellKind, Column, Form, Model, TaskSpec

_IMAGE_NAMES = ("image", "img", "picture", "photo", "pixels", "jpg", "jpeg", "png", "image_bytes")
_IMAGE = Column(
    role="image",
    names=(*_IMAGE_NAMES, *(f"{name}.bytes" for name in _IMAGE_NAMES)),
    kind=CellKind.IMAGE,
    setting="image_column",
)
_FILE = Column(
    role="image",
    names=("file_name", "image.path"),
    names_of_task=("filename", "file", "image_path", "path", "image_file"),
    kind=CellKind.IMAGE,
    setting="image_column",
    is_content=False,
)
_LABEL = replace(LABEL, is_list=False)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    augmentation: str = option(
        "crop",
        "image-classification: none (off), crop (at least three quarters of height and width), or "
        "flip (crop, and mirror half of the images).",
        choices=("none", "crop", "flip"),
    )


SPECS = (
    TaskSpec(
        name="image-classification",
        folder="image_classification",
        forms=(
            Form((_IMAGE, _LABEL), extras=tuple(f"{name}.path" for name in _IMAGE_NAMES)),
            Form((_FILE, _LABEL)),
        ),
        models=frozenset({Model.VISION}),
        mixes_forms=True,
        recognises_files="tasks.image_classification.data:folders_of_images",
        served_as="image-classification",
        options=Options,
        shared_options=("class_weight", "label_smoothing_factor", "do_predict", "missing_labels"),
    ),
)
