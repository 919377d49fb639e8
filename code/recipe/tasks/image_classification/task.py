"""Image classification: one label for each image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel, Trainer

from recipe.batching.batches import Layout, Samples
from recipe.data.column_names import LABEL
from recipe.data.labels import SINGLE, balanced_weights
from recipe.metrics import SCORES
from recipe.models import losses
from recipe.models.pretrained import Source
from recipe.reports import model_card
from recipe.reports.model_card import About
from recipe.reports.predictions import Predictions
from recipe.tasks import evaluation, judging
from recipe.tasks.base import (
    Batches,
    Finding,
    Objective,
    Task,
    Tokenizer,
    balance,
    judged_split,
)
from recipe.tasks.evaluation import Scores
from recipe.tasks.image_classification import data as pictures
from recipe.tasks.image_classification import model as models
from recipe.tasks.image_classification import tokens as pixels
from recipe.tasks.image_classification.batches import CROP, FLIP, FixedPictures
from recipe.tasks.image_classification.data import LOCATION
from recipe.tasks.image_classification.spec import Options

AUGMENTATIONS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    CROP: frozenset({CROP}),
    FLIP: frozenset({CROP, FLIP}),
}
"""The values of the hyperparameter `augmentation`, and the random changes of each."""


class _Classes(Objective):
    def __init__(self) -> None:
        self.processor: Any = None

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        processor = self.processor
        height, width = pixels.shape_of(processor)
        models.check_size(model, height, width)
        scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        mean, std = (0.0,) * 3, (1.0,) * 3
        if processor.do_normalize:
            mean, std = tuple(processor.image_mean), tuple(processor.image_std)
        return FixedPictures(size, height, width, scale, mean, std)

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return losses.sample_losses(logits, labels, smoothing)

    def class_weights(
        self, requested: str | None, samples: Samples, model: PreTrainedModel
    ) -> Sequence[float] | None:
        if requested is None:
            return None
        count: Any = model.config.num_labels
        return balanced_weights(samples.labels.tolist(), count)

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        return evaluation.Scores()


class ImageClassification(Task):
    """One label for each image."""

    options: Options
    objective: _Classes
    data: pictures.Pictures

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(SCORES)
        self.objective = _Classes()
        self.data = pictures.load(channels, self.hyperparameters)
        self.train, self.notes = self.data.train, self.data.notes

    def load(self, source: Source) -> Any:
        if not self.hyperparameters.trains:
            splits: Any = self.data
            self.data = judging.with_labels_of(source, splits, self.hyperparameters)  # type: ignore[assignment]
            self.train = self.data.train
        model, processor = models.load(source, self.data.labels, self.hyperparameters)
        self.objective.processor = processor
        return model, processor

    def longest(self, model: PreTrainedModel, tokenizer: Any) -> int:
        """Return 0: images are not cut."""
        return 0

    def tokenise(self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int) -> Samples:
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

    def findings(self) -> Iterator[Finding]:
        counts = np.bincount(self.train[LABEL][:], minlength=len(self.data.labels.names))
        shares = dict(zip(self.data.labels.names, counts / len(self.train), strict=True))
        yield balance(shares)

    def answers(self, trainer: Trainer) -> Predictions | None:
        scores = trainer.compute_metrics
        if not isinstance(scores, Scores) or scores.last is None:
            return None
        name, split = judged_split(self.data)
        outputs, true = scores.last
        assert self.data.labels.problem == SINGLE
        locations = cast("list[str]", split[LOCATION][:])
        return Predictions(
            split=name, labels=self.data.labels, outputs=outputs, true=true, texts=locations
        )


TASK = ImageClassification
