"""What tasks of labelled texts and images share: losses, scores, and the class ids of a model that
has the labels of the data already."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.nn import functional
from transformers import EvalPrediction, PreTrainedModel

from recipe.batching.batches import Samples
from recipe.data.classification import Splits, rows_of_classes
from recipe.data.column_names import LABEL
from recipe.data.labels import (
    BALANCED,
    NUMBER,
    SINGLE,
    Labels,
    balanced_weights,
    given_weights,
)
from recipe.errors import ModelError
from recipe.models.pretrained import known_labels
from recipe.models.sources.origin import Origin
from recipe.reports.predictions import Predictions
from recipe.tasks import evaluation
from recipe.tasks.base import OK, WARNING, Finding, Objective, Task, judged_split
from recipe.tasks.evaluation import Floats

_RAREST_SHARE = 0.01


class LabelLosses(Objective):
    """Base of objectives of labels or numbers; the loss is the mean over samples."""

    def __init__(self) -> None:
        self.thresholds: Floats | None = None
        """Probability [classes] from which each of several labels is predicted; None: 0.5."""
        self.last: tuple[Floats, Floats] | None = None
        """Outputs and labels of the last evaluation."""
        self.are_numbers = False
        """Whether the floats of a sample are numbers, not 0 or 1 for each class."""

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return sample_losses(logits, labels, smoothing, self.are_numbers)

    def class_weights(
        self, requested: str | None, samples: Samples, model: PreTrainedModel
    ) -> Sequence[float] | None:
        if requested is None or samples.labels.dtype.kind != "i":
            return None
        config: Any = model.config
        if requested == BALANCED:
            return balanced_weights(samples.labels.tolist(), config.num_labels)
        names = [config.id2label[number] for number in range(config.num_labels)]
        return given_weights(requested, names)

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the scores of logits [N, classes] and class ids [N] or, with several labels for
        each text, floats 0 or 1 [N, classes]; or of outputs [N, 1] and numbers [N], or both
        [N, numbers]."""
        outputs = prediction.predictions
        # Some models return hidden states in addition to the logits.
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        true = np.asarray(prediction.label_ids)
        self.last = outputs, true
        if np.issubdtype(true.dtype, np.integer):
            return evaluation.score_classes(outputs.argmax(axis=-1), true)
        if true.ndim == 1:
            return evaluation.score_numbers(outputs[:, 0], true)
        if self.are_numbers:
            return evaluation.mean_scores(outputs, true)
        return evaluation.score_sets(outputs, true, self.thresholds)


class Classification(Task):
    """Base of tasks whose samples have labels, or numbers."""

    samples_are_rows = True
    data: Splits
    objective: LabelLosses
    shown_columns: ClassVar[Sequence[str]]
    """The columns of a text, maybe with a second one, by which the report shows a sample."""

    def match_labels(self, source: Origin) -> None:
        """Give the classes of the data the ids that they have in the model, if it has the same ones
        or is not trained.

        Raises:
            ModelError: the model is not trained, and does not know the labels of the data.
        """
        splits, trains = self.data, self.model_settings.trains
        known, names = splits.labels, known_labels(source, self.model_settings)
        is_regression = source.read_settings().get("problem_type") == NUMBER
        if not trains and len(names) > 1 and is_regression and known.problem != NUMBER:
            raise ModelError(
                f"The model {source.location} answers with numbers, {', '.join(names)}, and the "
                "data has classes.",
                "Give problem_type=regression.",
            )
        has_same = sorted(names) == sorted(known.names)
        if names in ((), known.names) or (trains and not has_same):
            return
        if not (has_same or (known.problem != NUMBER and set(known.names) <= set(names))):
            raise ModelError(
                f"The model {source.location} answers with the labels {', '.join(names)}, and the "
                f"data has {', '.join(known.names)}: do_train=False cannot compare them.",
                "Give data with the model's labels (problem_type=regression if they are numbers), "
                "or train.",
            )
        model_ids = [names.index(name) for name in known.names]
        data_ids = [known.ids.get(name) for name in names]

        def renumbered(split: datasets.Dataset) -> datasets.Dataset:
            is_id = known.problem == SINGLE
            numbers = [
                model_ids[label]
                if is_id
                else [0.0 if data_id is None else label[data_id] for data_id in data_ids]
                for label in split[LABEL]
            ]
            column: Any = pa.array(numbers, split.data.schema.field(LABEL).type)
            return split.remove_columns(LABEL).add_column(LABEL, column)

        self.data = dataclasses.replace(
            splits,
            labels=Labels(names, known.problem),
            train=renumbered(splits.train),
            evaluation=renumbered(splits.evaluation),
            test=None if splits.test is None else renumbered(splits.test),
        )

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        if self.data.labels.problem == NUMBER:
            return
        rows = rows_of_classes(self.data.labels, self.data.train[LABEL][:])
        shares = {name: count / len(self.data.train) for name, count in rows.items()}
        yield Finding(
            level=WARNING if min(shares.values()) < _RAREST_SHARE else OK,
            what="balance",
            detail=", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
        )

    def answers(self) -> Predictions | None:
        if self.objective.last is None:
            return None
        name, split = judged_split(self.data)
        outputs, true = self.objective.last
        # If texts are sharded, no host has all of them.
        known = split.column_names if len(split) == len(true) else ()
        return Predictions(
            split=name,
            labels=self.data.labels,
            outputs=outputs,
            true=true,
            rows=split,
            columns=[column for column in self.shown_columns if column in known],
            thresholds=self.objective.thresholds,
        )


def sample_losses(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, are_numbers: bool = False
) -> Tensor:
    """Return the losses [samples] in float32.

    Args:
        logits: [samples, labels].
        labels: Class ids [samples]; or floats: one target [samples] for each sample (mean squared
            error), or several [samples, labels] between 0 and 1 (binary cross-entropy).
        smoothing: Share of the target spread evenly over all classes; for class ids only.
        are_numbers: Whether floats [samples, labels] are numbers (mean squared error).
    """
    logits = logits.float()
    if not torch.is_floating_point(labels):
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    if labels.dim() == 1:
        return (logits.squeeze(-1) - labels).square()
    if are_numbers:
        return (logits - labels).square().mean(dim=-1)
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.mean(dim=-1)
