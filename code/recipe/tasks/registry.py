"""What a run trains for: a row of this table for each value of the hyperparameter `task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from recipe import metrics
from recipe.batching.batches import Samples
from recipe.batching.document_batches import Documents
from recipe.data import classification, language_modeling
from recipe.data.column_names import PAIR, TEXT, TOKEN_IDS
from recipe.data.labels import NUMBER, SEVERAL, SINGLE
from recipe.errors import HyperparameterError
from recipe.hyperparameters import CAUSAL_LM, CLASSIFICATION, Hyperparameters
from recipe.models import loading
from recipe.models.loading import Source
from recipe.reports import generations, model_card
from recipe.reports.model_card import About
from recipe.reports.report import Predictions, Shown
from recipe.runtime import xla
from recipe.tasks.evaluation import Scores
from recipe.tasks.objective import CLASSES, NEXT_TOKENS, Objective
from recipe.tokenization import documents as causal_tokens
from recipe.tokenization import encoding
from recipe.tokenization import texts as tokens

Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]
SCORES_OF: Mapping[str, Sequence[str]] = {
    SINGLE: metrics.SCORES,
    SEVERAL: ("accuracy", "f1_micro", "f1_macro"),
    NUMBER: ("mse", "pearson", "spearman"),
}
"""What an evaluation gives beside the loss, by the kind of labels."""
_UNCUT = 10**6
_SHOWN_LABELS = 20
_LONGEST_DOCUMENT = 1024


class Goal(Protocol):
    """A task with the data of a job."""

    objective: Objective
    """What the engine does."""
    train: datasets.Dataset
    """The training data, before it is tokenised."""
    found: list[str]
    """What was detected in the data, one line each."""

    def load(self, source: Source) -> Model:
        """The model to start from, and its tokenizer."""

    def longest(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens in a sample at most."""

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, Samples]:
        """`train`, `evaluation` and maybe `test`."""

    def lengths(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]) -> list[int]:
        """Tokens of some rows of the training data, uncut."""

    def pieces(self, length: int, longest: int) -> int:
        """Samples that a text of `length` tokens becomes."""

    def about(self) -> About:
        """What the model is for."""

    def shown(self, trainer: Trainer, samples: Mapping[str, Any]) -> Shown:
        """What a report on the finished run shows of the model's answers."""


class Classification:
    """Labels of texts."""

    objective: Objective = CLASSES

    def __init__(self, channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> None:
        self._hyperparameters = hyperparameters
        self.splits = classification.load(channels, hyperparameters)
        self.train, self.found = self.splits.train, self.splits.found
        _check_best(hyperparameters, SCORES_OF[self.splits.labels.problem])
        asked, names = hyperparameters.num_labels, self.splits.labels.names
        if asked is not None and asked != len(names):
            listed = ", ".join(names[:_SHOWN_LABELS]) + ", ..." * (len(names) > _SHOWN_LABELS)
            raise HyperparameterError(
                f"Hyperparameter num_labels has value {asked}, but the data has {len(names)} "
                f"label(s): {listed}.",
                "Leave it out, or see why the data has others (label_column names their column).",
            )

    def load(self, source: Source) -> Model:
        """With a head for the labels; its configuration says which columns it was trained on."""
        model, tokenizer = loading.load(source, self.splits.labels, self._hyperparameters)
        is_text = TEXT in self.train.column_names
        model.config.text_columns = list(self.splits.text_columns) if is_text else None
        return model, tokenizer

    def longest(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
        """Where longer texts are cut, by what serves the model, too."""
        length = loading.longest_input(model, tokenizer, self._hyperparameters.max_length)
        special = tokenizer.num_special_tokens_to_add(pair=True)
        if PAIR in self.train.column_names and length < special + 2:
            raise HyperparameterError(
                f"Hyperparameter max_length has value {length}: of a pair of texts, {special} "
                "tokens are the tokenizer's own.",
                f"Give {special + 2} or more.",
            )
        tokenizer.model_max_length = length
        return length

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, Samples]:
        """A sample for each text."""
        return {
            name: Samples.of(tokens.tokenise(split, tokenizer, max_length))
            for name, split in _named(self.splits)
        }

    def lengths(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]) -> list[int]:
        """With special tokens."""
        some = self.train.select(rows)
        if TEXT not in some.column_names:
            return [len(ids) for ids in some[TOKEN_IDS]]
        texts = list(some[TEXT])
        if PAIR in some.column_names:
            ids, _ = encoding.encode_pairs(tokenizer, texts, list(some[PAIR]), _UNCUT)
        else:
            ids = encoding.encode(tokenizer, texts, _UNCUT)
        return [len(each) for each in ids]

    def pieces(self, length: int, longest: int) -> int:
        """One: a long text is cut."""
        return 1

    def about(self) -> About:
        """A classifier of these labels."""
        return model_card.of_labels(self.splits.labels, self.splits.text_columns)

    def shown(self, trainer: Trainer, samples: Mapping[str, Any]) -> Shown:
        """The last answers to the data that the model is judged by."""
        scores = trainer.compute_metrics
        if not isinstance(scores, Scores) or scores.last is None:
            return Shown()
        name, split = "evaluation", self.splits.evaluation
        if self.splits.test is not None:
            name, split = "test", self.splits.test
        outputs, true = scores.last
        texts, pairs = (
            list(split[each]) if each in split.column_names else None for each in (TEXT, PAIR)
        )
        labels = self.splits.labels
        return Shown(
            Predictions(
                split=name, labels=labels, outputs=outputs, true=true, texts=texts, pairs=pairs
            )
        )


def _check_best(hyperparameters: Hyperparameters, scores: Sequence[str]) -> None:
    """See that the metric that the best weights are chosen by is one that evaluation gives."""
    asked = hyperparameters.passed.get("metric_for_best_model")
    names = ("loss", *scores)
    if asked is not None and asked.removeprefix("eval_") not in names:
        raise HyperparameterError(
            f"Hyperparameter metric_for_best_model has value {asked!r}, which evaluation does not "
            "give for this data.",
            f"Give one of: {', '.join(names)}.",
        )


class CausalLm:
    """How texts, prompts and conversations go on."""

    objective: Objective = NEXT_TOKENS

    def __init__(self, channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> None:
        self._hyperparameters = hyperparameters
        _check_best(hyperparameters, ("perplexity", "token_accuracy"))
        self._texts = language_modeling.load(channels, hyperparameters)
        self.train, self.found = self._texts.train, self._texts.found

    def load(self, source: Source) -> Model:
        """As it is."""
        return loading.load_causal(source, self._hyperparameters)

    def longest(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
        """Where longer documents are split or truncated; what serves the model reads more."""
        asked = self._hyperparameters.max_length
        return loading.longest_input(model, tokenizer, asked, _LONGEST_DOCUMENT)

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, Samples]:
        """Pieces of documents."""
        long_texts = self._hyperparameters.long_texts
        return {
            name: causal_tokens.tokenise(name, split, tokenizer, max_length, long_texts)
            for name, split in _named(self._texts)
        }

    def lengths(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]) -> list[int]:
        """With the end token."""
        return causal_tokens.lengths(self.train.select(rows), tokenizer)

    def pieces(self, length: int, longest: int) -> int:
        """Several, where a long document is split."""
        is_split = causal_tokens.splits(self.train, self._hyperparameters.long_texts)
        return sum(1 for _ in causal_tokens.pieces(length, longest, is_split))

    def about(self) -> About:
        """A language model."""
        return About(
            title="Language model",
            pipeline="text-generation",
            purpose="go on with texts like those of its data",
            metrics="Losses are means over the learned tokens; the perplexity is e to that power.",
        )

    def shown(self, trainer: Trainer, samples: Mapping[str, Any]) -> Shown:
        """How the model goes on with some documents, where one process has all of it."""
        documents = samples["evaluation"]
        if trainer.is_fsdp_enabled or xla.in_use() or not isinstance(documents, Documents):
            return Shown()
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        tokenizer: Any = trainer.processing_class
        return Shown(continuations=generations.continuations(model, tokenizer, documents))


def _named(
    splits: classification.Splits | language_modeling.Texts,
) -> list[tuple[str, datasets.Dataset]]:
    given = {"train": splits.train, "evaluation": splits.evaluation, "test": splits.test}
    return [(name, split) for name, split in given.items() if split is not None]


GOALS: Mapping[str, Callable[[Mapping[str, Path], Hyperparameters], Goal]] = {
    CLASSIFICATION: Classification,
    CAUSAL_LM: CausalLm,
}
