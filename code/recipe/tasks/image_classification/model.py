"""Load a model that classifies images, with its image processor."""

from __future__ import annotations

from typing import Any

from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

from recipe.compat import new_weights
from recipe.data.labels import Labels
from recipe.errors import ModelError
from recipe.models import lora, pretrained
from recipe.models.pretrained import Source
from recipe.settings import ModelSettings

_OF_ONE_SIZE = {"vit", "deit", "beit", "vit_msn", "data2vec-vision", "dinov2", "vit_mae"}


def load(source: Source, labels: Labels, settings: ModelSettings) -> tuple[PreTrainedModel, Any]:
    """Return the model in float32 with a head for `labels`, and its image processor.

    A head for another number of labels is replaced by a new one.

    Raises:
        ModelError: it cannot be reached or loaded, or does not read images with three channels.
    """
    model, processor, new = pretrained.read(
        AutoModelForImageClassification,
        source,
        settings,
        reader=AutoImageProcessor,
        num_labels=len(labels.names),
        id2label=labels.names_by_id,
        label2id=labels.ids,
        ignore_mismatched_sizes=True,
    )
    config: Any = model.config
    if getattr(config, "num_channels", 3) != 3:
        raise ModelError(
            f"The model {source.name} reads images of {config.num_channels} channels, and "
            "images are read in RGB here.",
            "Give a model of three channels.",
        )
    new_weights.log(new)
    if new and not settings.trains:
        raise ModelError(
            f"The model {source.name} lacks {len(new)} weights of a classifier of these labels "
            f"({new[0]} ...), which only training would create: do_train=False has nothing to "
            "evaluate.",
            "Give a trained classifier, or leave do_train out.",
        )
    return lora.wrap(model, settings, new, None, trains_head=True), processor


def check_size(model: PreTrainedModel, height: int, width: int) -> None:
    """Check that `model` has positions for images of this size.

    Raises:
        ModelError: It does not.
    """
    config: Any = model.config
    size = getattr(config, "image_size", None)
    if config.model_type not in _OF_ONE_SIZE or size is None:
        return
    model_size = (size, size) if isinstance(size, int) else tuple(size)
    if model_size != (height, width):
        raise ModelError(
            f"The model reads images of {model_size[1]} x {model_size[0]} pixels, and its image "
            f"processor makes them {width} x {height}.",
            "Correct size (or crop_size) in its preprocessor_config.json.",
        )
