"""Text classification: one label, several or numbers for each text, or pair of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import Trainer

from recipe import metrics
from recipe.batching.batches import Samples
from recipe.console import say
from recipe.data import classification
from recipe.data.column_names import LABEL, PAIR, TEXT
from recipe.data.labels import BALANCED, NUMBER, SEVERAL, SINGLE, given_weights
from recipe.errors import HyperparameterError
from recipe.models import pretrained
from recipe.models.sources.origin import Origin
from recipe.reports import model_card
from recipe.reports.model_card import About
from recipe.tasks import evaluation
from recipe.tasks.base import (
    SHOWN_CHARS,
    EncoderObjective,
    Model,
    Tokenizer,
)
from recipe.tasks.classifiers import Classification, LabelLosses
from recipe.tasks.text_classification.spec import Options
from recipe.tokenization import texts as text_tokens

_SHOWN_LABELS = 20
SCORES_OF: Mapping[str, Sequence[str]] = {
    SINGLE: metrics.SCORES,
    SEVERAL: ("accuracy", "f1_micro", "f1_macro"),
    NUMBER: ("mse", "pearson", "spearman"),
}
"""The scores of an evaluation besides the loss, by kind of labels."""


class _Labels(EncoderObjective, LabelLosses):
    pass


CLASSES = _Labels()
"""Labels of each sample; its loss is the mean over samples."""


class TextClassification(Classification):
    """Labels of texts: classes, several for each text, or numbers."""

    options: Options
    takes_shards = True
    shown_columns = (TEXT, PAIR)
    objective: LabelLosses = CLASSES

    def read(self, channels: Mapping[str, Path]) -> None:
        settings = self.data_settings
        self.data = classification.load(channels, settings)
        if PAIR in self.train.column_names:
            self.sample_kind = pretrained.PAIR_OF_TEXTS
        self._tuned: Mapping[str, float] = {}
        problem = self.data.labels.problem
        self.check_best(SCORES_OF[problem])
        smoothing = "label_smoothing_factor"
        values = {"class_weight": settings.class_weight, smoothing: settings.passed.get(smoothing)}
        for name, value in values.items():
            if problem != SINGLE and value:
                what = "rows have several labels" if problem == SEVERAL else "labels are numbers"
                raise HyperparameterError(
                    f"Hyperparameter {name} has value {value}, but {what}: it requires one class "
                    "for each row.",
                    "Leave it out, or give problem_type=single_label_classification.",
                )
        if settings.class_weight is not None and settings.class_weight != BALANCED:
            given_weights(settings.class_weight, self.data.labels.names)  # before the model is read
        tuning = {
            "rows have only one label: the most probable label is predicted, without a threshold": (
                problem != SEVERAL,
                "Leave it out; if rows have several labels, give lists, or label_separator.",
            ),
            "nothing is evaluated: thresholds are found on evaluation data": (
                not settings.evaluates,
                "Leave do_eval and eval_strategy out, or tune_thresholds.",
            ),
            "do_train=False writes no model that could keep them": (
                not settings.trains,
                "Leave one of the two out.",
            ),
        }
        for reason, (is_wrong, remedy) in tuning.items():
            if self.options.tune_thresholds and is_wrong:
                raise HyperparameterError(
                    f"Hyperparameter tune_thresholds has value True, but {reason}.", remedy
                )
        num_labels, names = settings.num_labels, self.data.labels.names
        if settings.trains and num_labels is not None and num_labels != len(names):
            listed = ", ".join(names[:_SHOWN_LABELS]) + ", ..." * (len(names) > _SHOWN_LABELS)
            raise HyperparameterError(
                f"Hyperparameter num_labels has value {num_labels}, but the data has {len(names)} "
                f"label(s): {listed}.",
                "Leave it out, or check the labels of the data (label_column names their column).",
            )

    def load(self, source: Origin) -> Model:
        """Return the model with a head for the labels."""
        self.match_labels(source)
        model, tokenizer = pretrained.load(source, self.data.labels, self.model_settings)
        kept: Any = getattr(model.config, "label_thresholds", None)
        self.objective = _Labels()
        self.objective.are_numbers = self.data.labels.problem == NUMBER
        if kept is not None and self.data_settings.trains:
            del model.config.label_thresholds  # they belong to former weights
        elif isinstance(kept, dict) and self.data.labels.problem == SEVERAL:
            names = self.data.labels.names
            self.objective.thresholds = np.array([kept.get(name, 0.5) for name in names])
            say(f"thresholds of the model: {_listed(kept)}")
        return model, tokenizer

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        return text_tokens.samples(split, tokenizer, max_length)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return text_tokens.lengths(self.train.select(rows), tokenizer)

    def about(self) -> About:
        columns = [names[0] for names in self.data.inputs.values()]
        about = model_card.describe_classifier(self.data.labels, columns)
        if not self._tuned:
            return about
        return dataclasses.replace(
            about,
            metrics=f"A label is predicted from its own threshold ({_listed(self._tuned)}; "
            "label_thresholds in config.json), found on the evaluation data; `eval_` "
            "scores are by 0.5, `eval_tuned_` and `test_` ones by these. Accuracy is of "
            "the whole set.",
        )

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
        objective = self.objective
        if objective.last is None:  # the run was resumed after its last evaluation
            trainer.evaluate()
        assert objective.last is not None
        logits, true = objective.last
        tuned = objective.thresholds = evaluation.best_thresholds(logits, true)
        kept = dict(zip(self.data.labels.names, tuned.tolist(), strict=True))
        bare: Any = trainer.accelerator.unwrap_model(trainer.model)
        bare.config.label_thresholds = self._tuned = kept
        before, after = (
            evaluation.score_sets(logits, true, thresholds) for thresholds in (None, tuned)
        )
        say(
            f"thresholds: {_listed(kept)}; F1 (macro) of the {len(true)} evaluation rows that they "
            f"were found on: {after['f1_macro']:.4f}, with 0.5 {before['f1_macro']:.4f}"
        )
        return {f"eval_tuned_{name}": score for name, score in after.items()}


def _listed(thresholds: Mapping[str, float]) -> str:
    """Return the first labels with their thresholds."""
    shown = [f"{name} {value:.3g}" for name, value in thresholds.items()]
    return ", ".join(shown[:_SHOWN_LABELS]) + ", ..." * (len(shown) > _SHOWN_LABELS)


TASK = TextClassification
