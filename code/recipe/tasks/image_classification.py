"""Image classification: one label for each picture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel, Trainer

from recipe.batching.batches import Layout, Samples
from recipe.batching.picture_batches import CROP, FLIP, FixedPictures
from recipe.data.column_names import LABEL
from recipe.data.kinds import pictures
from recipe.data.kinds.pictures import PLACE
from recipe.data.labels import SINGLE, balanced_weights
from recipe.hyperparameters import Hyperparameters
from recipe.metrics import SCORES
from recipe.models import losses
from recipe.models import pictures as models
from recipe.models.loading import Source
from recipe.reports import model_card
from recipe.reports.model_card import About
from recipe.reports.predictions import Predictions
from recipe.reports.section import Section
from recipe.tasks import evaluation, judging
from recipe.tasks.base import OK, WARNING, Batches, Finding, Objective, check_best, named
from recipe.tasks.evaluation import Scores
from recipe.tokenization import pictures as pixels

_RAREST_SHARE = 0.01
AUGMENTATIONS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    CROP: frozenset({CROP}),
    FLIP: frozenset({CROP, FLIP}),
}
"""What the hyperparameter `augmentation` may be, and what is drawn then."""


class _Classes(Objective):
    packable: Collection[str] = ()

    def __init__(self) -> None:
        self.processor: Any = None

    def packs(self, model: PreTrainedModel) -> bool:
        return False

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

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        pass

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return losses.of_samples(logits, labels, smoothing)

    def class_weights(
        self, hyperparameters: Hyperparameters, samples: Samples, model: PreTrainedModel
    ) -> Sequence[float] | None:
        if hyperparameters.class_weight is None:
            return None
        count: Any = model.config.num_labels
        return balanced_weights(samples.labels.tolist(), count)

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        return evaluation.Scores()


class ImageClassification:
    """One label for each picture."""

    def __init__(self, channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> None:
        check_best(hyperparameters, SCORES)
        self._hyperparameters = hyperparameters
        self._objective = _Classes()
        self.objective = self._objective
        channels = judging.channels(channels, hyperparameters)
        self.splits = pictures.load(channels, hyperparameters)
        self.train, self.found = self.splits.train, self.splits.found

    def load(self, source: Source) -> Any:
        """With a head for the labels, and its image processor."""
        if not self._hyperparameters.trains:
            splits: Any = self.splits
            self.splits = judging.with_labels_of(source, splits, self._hyperparameters)  # type: ignore[assignment]
            self.train = self.splits.train
        model, processor = models.load(source, self.splits.labels, self._hyperparameters)
        self._objective.processor = processor
        return model, processor

    def longest(self, model: PreTrainedModel, tokenizer: Any) -> int:
        """0: pictures are not cut."""
        return 0

    def samples(
        self, tokenizer: Any, max_length: int, rows: Sequence[int] | None = None
    ) -> dict[str, Samples]:
        """A sample for each picture."""
        drawn = AUGMENTATIONS[self._hyperparameters.augmentation]
        return {
            name: pixels.read(name, split, tokenizer, drawn)
            for name, split in named(self.splits, rows)
        }

    def lengths(self, tokenizer: Any, rows: Sequence[int]) -> list[int]:
        """None: pictures have one size."""
        return []

    def pieces(self, length: int, longest: int) -> int:
        """One."""
        return 1

    def about(self) -> About:
        """A classifier of these labels."""
        names = ", ".join(f"`{name}`" for name in self.splits.labels.names)
        return About(
            title="Classifier of pictures",
            pipeline="image-classification",
            purpose=f"tell {len(self.splits.labels.names)} labels of pictures apart: {names}",
            metrics=model_card.of_labels(self.splits.labels, (PLACE,)).metrics,
            headline=("accuracy", "f1_macro", "loss"),
        )

    def findings(self) -> Iterator[Finding]:
        """How often each label occurs."""
        counts = np.bincount(self.train[LABEL][:], minlength=len(self.splits.labels.names))
        shares = dict(zip(self.splits.labels.names, counts / len(self.train), strict=True))
        detail = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        level = WARNING if min(shares.values()) < _RAREST_SHARE else OK
        yield Finding(level=level, what="balance", detail=detail)

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """The last answers to the data that the model is judged by."""
        answers = self.answers(trainer)
        return () if answers is None else answers.sections()

    def answers(self, trainer: Trainer) -> Predictions | None:
        """Those last answers themselves."""
        scores = trainer.compute_metrics
        if not isinstance(scores, Scores) or scores.last is None:
            return None
        name, split = "evaluation", self.splits.evaluation
        if self.splits.test is not None:
            name, split = "test", self.splits.test
        outputs, true = scores.last
        assert self.splits.labels.problem == SINGLE
        places = cast("list[str]", split[PLACE][:])
        return Predictions(
            split=name, labels=self.splits.labels, outputs=outputs, true=true, texts=places
        )


TASK = ImageClassification
