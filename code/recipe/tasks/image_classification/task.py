"""Image classification: one label for each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

from recipe.batching.batches import Layout, Samples
from recipe.data.labels import Labels
from recipe.errors import ModelError
from recipe.metrics import SCORES
from recipe.models import pretrained
from recipe.models.sources.origin import Origin
from recipe.reports import model_card
from recipe.reports.model_card import About
from recipe.runtime import distribution
from recipe.settings import ModelSettings
from recipe.tasks.base import Batches, Tokenizer
from recipe.tasks.classifiers import Classification, LabelLosses
from recipe.tasks.image_classification import batches as pixels
from recipe.tasks.image_classification import data as pictures
from recipe.tasks.image_classification.batches import CROP, FLIP, FixedPictures, Preprocessing
from recipe.tasks.image_classification.data import LOCATION
from recipe.tasks.image_classification.spec import Options

AUGMENTATIONS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    CROP: frozenset({CROP}),
    FLIP: frozenset({CROP, FLIP}),
}
"""The values of the hyperparameter `augmentation`, and the random changes of each."""
_FIXED_SIZE = {"vit", "deit", "beit", "vit_msn", "data2vec-vision", "dinov2", "vit_mae"}


class _ImageLabels(LabelLosses):
    processor: Any = None

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        preprocessing = Preprocessing.measure(self.processor)
        check_size(model, preprocessing.height, preprocessing.width)
        fills = not distribution.has_changing_buffers(model)
        return FixedPictures(size, preprocessing, fills)


class ImageClassification(Classification):
    """One label for each image."""

    options: Options
    objective: _ImageLabels
    shown_columns = (LOCATION, "")

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(SCORES)
        self.objective = _ImageLabels()
        self.data = pictures.load(channels, self.data_settings)

    def load(self, source: Origin) -> Any:
        self.match_labels(source)
        model, processor = load_model(source, self.data.labels, self.model_settings)
        self.objective.processor = processor
        return model, processor

    def longest(self, model: PreTrainedModel, tokenizer: Any) -> int:
        """Return 0: images are not cut."""
        return 0

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        return pixels.read(name, split, tokenizer, AUGMENTATIONS[self.options.augmentation])

    def lengths(self, tokenizer: Any, rows: Sequence[int]) -> list[int]:
        return []

    def about(self) -> About:
        names = ", ".join(f"`{name}`" for name in self.data.labels.names)
        return About(
            title="Image classifier",
            pipeline="image-classification",
            purpose=f"classify images by {len(self.data.labels.names)} labels: {names}",
            metrics=model_card.describe_classifier(self.data.labels, (LOCATION,)).metrics,
            headline=("accuracy", "f1_macro", "loss"),
        )


def load_model(
    source: Origin, labels: Labels, settings: ModelSettings
) -> tuple[PreTrainedModel, Any]:
    """Return the model in float32 with a head for `labels`, and its image processor.

    A head for another number of labels is replaced by a new one.

    Raises:
        ModelError: it cannot be reached or loaded, or does not read images with three channels.
    """
    architecture, what = AutoModelForImageClassification, "a classifier of these labels"
    model, processor = pretrained.load_head(
        architecture, source, settings, what, labels.names, reader=AutoImageProcessor
    )
    channels = getattr(model.config, "num_channels", 3)
    if channels != 3:
        raise ModelError(
            f"The model {source.location} reads images of {channels} channels, and images are read "
            "in RGB here.",
            "Give a model of three channels.",
        )
    return model, processor


def check_size(model: PreTrainedModel, height: int, width: int) -> None:
    """Check that `model` has positions for images of this size.

    Raises:
        ModelError: It does not.
    """
    config: Any = model.config
    size = getattr(config, "image_size", None)
    if config.model_type not in _FIXED_SIZE or size is None:
        return
    model_size = (size, size) if isinstance(size, int) else tuple(size)
    if model_size != (height, width):
        raise ModelError(
            f"The model reads images of {model_size[1]} x {model_size[0]} pixels, and its image "
            f"processor makes them {width} x {height}.",
            "Correct size (or crop_size) in its preprocessor_config.json.",
        )


TASK = ImageClassification
