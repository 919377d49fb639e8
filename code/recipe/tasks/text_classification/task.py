"""Text classification: one label, several or a number for each text, or pair of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel, Trainer

from recipe import metrics
from recipe.batching.batches import Samples
from recipe.console import say
from recipe.data import classification
from recipe.data.column_names import LABEL, PAIR, TEXT
from recipe.data.labels import NUMBER, SEVERAL, SINGLE, balanced_weights
from recipe.errors import HyperparameterError
from recipe.models import losses, pretrained
from recipe.models.pretrained import Source
from recipe.reports import model_card
from recipe.reports.model_card import About
from recipe.reports.predictions import Predictions
from recipe.tasks import evaluation, judging
from recipe.tasks.base import (
    SHOWN_CHARS,
    EncoderObjective,
    Finding,
    Model,
    Objective,
    Task,
    Tokenizer,
    balance,
    judged_split,
)
from recipe.tasks.evaluation import Floats, Scores
from recipe.tasks.text_classification.spec import Options
from recipe.tokenization import texts as text_tokens

_SHOWN_LABELS = 20
SCORES_OF: Mapping[str, Sequence[str]] = {
    SINGLE: metrics.SCORES,
    SEVERAL: ("accuracy", "f1_micro", "f1_macro"),
    NUMBER: ("mse", "pearson", "spearman"),
}
"""The scores of an evaluation besides the loss, by kind of labels."""


class _Classes(EncoderObjective):
    def __init__(self, thresholds: Floats | None = None) -> None:
        self._thresholds = thresholds

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return losses.sample_losses(logits, labels, smoothing)

    def class_weights(
        self, requested: str | None, samples: Samples, model: PreTrainedModel
    ) -> Sequence[float] | None:
        if requested is None or samples.labels.dtype.kind != "i":
            return None
        count: Any = model.config.num_labels
        return balanced_weights(samples.labels.tolist(), count)

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        return Scores(self._thresholds)


CLASSES: Objective = _Classes()
"""Labels of each sample; its loss is the mean over samples."""


class TextClassification(Task):
    """Labels of texts: classes, several for each text, or a number."""

    options: Options
    takes_shards = True
    data: classification.Splits
    objective: Objective = CLASSES

    def read(self, channels: Mapping[str, Path]) -> None:
        hyperparameters = self.hyperparameters
        self.data = classification.load(channels, hyperparameters)
        self.train, self.notes = self.data.train, self.data.notes
        self._tuned: Mapping[str, float] = {}
        self.check_best(SCORES_OF[self.data.labels.problem])
        problem = self.data.labels.problem
        smoothing = hyperparameters.passed.get("label_smoothing_factor")
        of_classes = {
            "class_weight": hyperparameters.class_weight,
            "label_smoothing_factor": smoothing,
        }
        for name, value in of_classes.items():
            if problem != SINGLE and value:
                what = "rows have several labels" if problem == SEVERAL else "labels are numbers"
                raise HyperparameterError(
                    f"Hyperparameter {name} has value {value}, but {what}: it requires one class "
                    "for each row.",
                    "Leave it out, or give problem_type=single_label_classification.",
                )
        if self.options.tune_thresholds and problem != SEVERAL:
            raise HyperparameterError(
                "Hyperparameter tune_thresholds has value True, but rows have only one label: "
                "the most probable label is predicted, without a threshold.",
                "Leave it out; if rows have several labels, give lists, or label_separator.",
            )
        if self.options.tune_thresholds and not hyperparameters.evaluates:
            raise HyperparameterError(
                "Hyperparameter tune_thresholds has value True, but nothing is evaluated: "
                "thresholds are found on evaluation data.",
                "Leave do_eval and eval_strategy out, or tune_thresholds.",
            )
        if self.options.tune_thresholds and not hyperparameters.trains:
            raise HyperparameterError(
                "Hyperparameter tune_thresholds has value True, but do_train=False writes no model "
                "that could keep them.",
                "Leave one of the two out.",
            )
        num_labels, names = hyperparameters.num_labels, self.data.labels.names
        if num_labels is not None and num_labels != len(names):
            listed = ", ".join(names[:_SHOWN_LABELS]) + ", ..." * (len(names) > _SHOWN_LABELS)
            raise HyperparameterError(
                f"Hyperparameter num_labels has value {num_labels}, but the data has {len(names)} "
                f"label(s): {listed}.",
                "Leave it out, or check the labels of the data (label_column names their column).",
            )

    def load(self, source: Source) -> Model:
        """Return the model with a head for the labels; its configuration names the columns."""
        if not self.hyperparameters.trains:
            self.data = judging.with_labels_of(source, self.data, self.hyperparameters)
            self.train = self.data.train
        model, tokenizer = pretrained.load(source, self.data.labels, self.hyperparameters)
        kept: Any = getattr(model.config, "label_thresholds", None)
        if kept is not None and self.hyperparameters.trains:
            del model.config.label_thresholds  # they belong to former weights
        elif isinstance(kept, dict) and self.data.labels.problem == SEVERAL:
            names = self.data.labels.names
            self.objective = _Classes(np.array([kept.get(name, 0.5) for name in names]))
            say(f"thresholds of the model: {_listed(kept)}")
        is_text = TEXT in self.train.column_names
        model.config.text_columns = list(self.data.text_columns) if is_text else None
        return model, tokenizer

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which texts are cut, also in serving."""
        is_pair = PAIR in self.train.column_names
        what = pretrained.PAIR_OF_TEXTS if is_pair else "a text"
        max_length = self.hyperparameters.max_length
        length = pretrained.longest_text(model, tokenizer, max_length, what)
        tokenizer.model_max_length = length
        return length

    def tokenise(self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int) -> Samples:
        return text_tokens.samples(split, tokenizer, max_length)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return text_tokens.lengths(self.train.select(rows), tokenizer)

    def about(self) -> About:
        about = model_card.describe_classifier(self.data.labels, self.data.text_columns)
        if not self._tuned:
            return about
        return dataclasses.replace(
            about,
            metrics=f"A label is predicted from its own threshold ({_listed(self._tuned)}; "
            "label_thresholds in config.json), found on the evaluation data; `eval_` "
            "scores are by 0.5, `eval_tuned_` and `test_` ones by these. Accuracy is of "
            "the whole set.",
        )

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        if self.data.labels.problem == NUMBER:
            return
        rows = classification.rows_of_classes(self.data.labels, self.data.train[LABEL][:])
        shares = {name: count / len(self.data.train) for name, count in rows.items()}
        yield balance(shares)

    def shown(self, row: Mapping[str, Any]) -> str:
        texts = [row[name] for name in (TEXT, PAIR) if name in row]
        if not texts:
            return ""
        beginnings = (
            text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..." for text in texts
        )
        return f"{self.data.labels.show(row[LABEL])}: {' + '.join(map(repr, beginnings))}"

    def tune(self, trainer: Trainer) -> dict[str, float]:
        """Tune the threshold of each label if requested, store it with the model, and return
        scores.

        The scores are of the rows that the thresholds were tuned on; those of test data are more
        reliable.
        """
        if not self.options.tune_thresholds:
            return {}
        scores = trainer.compute_metrics
        assert isinstance(scores, Scores)
        if scores.last is None:  # the run was resumed after its last evaluation
            trainer.evaluate()
        assert scores.last is not None
        logits, true = scores.last
        scores.thresholds = evaluation.best_thresholds(logits, true)
        kept = dict(zip(self.data.labels.names, scores.thresholds.tolist(), strict=True))
        bare: Any = trainer.accelerator.unwrap_model(trainer.model)
        bare.config.label_thresholds = self._tuned = kept
        before, after = (
            evaluation.score_sets(logits, true, thresholds)
            for thresholds in (None, scores.thresholds)
        )
        say(
            f"thresholds: {_listed(kept)}; F1 (macro) of the {len(true)} evaluation rows that they "
            f"were found on: {after['f1_macro']:.4f}, with 0.5 {before['f1_macro']:.4f}"
        )
        return {f"eval_tuned_{name}": score for name, score in after.items()}

    def answers(self, trainer: Trainer) -> Predictions | None:
        scores = trainer.compute_metrics
        if not isinstance(scores, Scores) or scores.last is None:
            return None
        name, split = judged_split(self.data)
        outputs, true = scores.last
        # If texts are sharded, no host has all of them.
        is_whole = len(split) == len(true)
        texts, pairs = (
            list(split[column]) if is_whole and column in split.column_names else None
            for column in (TEXT, PAIR)
        )
        return Predictions(
            split=name,
            labels=self.data.labels,
            outputs=outputs,
            true=true,
            texts=texts,
            pairs=pairs,
            thresholds=scores.thresholds,
        )


def _listed(thresholds: Mapping[str, float]) -> str:
    """Return the first labels with their thresholds."""
    shown = [f"{name} {value:.3g}" for name, value in thresholds.items()]
    return ", ".join(shown[:_SHOWN_LABELS]) + ", ..." * (len(shown) > _SHOWN_LABELS)


TASK = TextClassification
