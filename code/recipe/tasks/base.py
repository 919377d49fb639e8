"""The interface of a task for training, the doctor and reports."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from torch import Tensor
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from recipe.batching import flat, groups, packing
from recipe.batching.batches import Layout, Packed, Padded, Samples
from recipe.batching.groups import Groups
from recipe.batching.packing import Rows
from recipe.data.column_names import TOKEN_IDS
from recipe.data.held_out import DataSets
from recipe.data.layout.channels import training_channels
from recipe.errors import HyperparameterError, ModelError, RowError
from recipe.hyperparameters import Hyperparameters
from recipe.models import flat_attention, lora, packed_encoders, pretrained
from recipe.models.sources.origin import Origin
from recipe.reports.last_answers import PredictedAnswers
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.runtime import xla
from recipe.settings import DataSettings, ModelSettings
from recipe.spec import CellKind, Column
from recipe.task_table import TASKS
from recipe.tasks import evaluation
from recipe.tokenization.encoding import takes_token_types

Tokenizer = PreTrainedTokenizerBase
Model = tuple[PreTrainedModel, Tokenizer]
Batches = Sequence[tuple[Samples, Rows]]
"""The rows of some batches."""
OK, WARNING, ERROR = "ok", "warning", "error"
_FEW, _SHOWN_ROWS, _COMPARED_ROWS = 10, 3, 32
SHOWN_CHARS = 70
"""How many characters of a text a finding shows."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check before training."""

    level: str
    """OK, WARNING or ERROR."""
    what: str
    detail: str
    reason: str = ""
    """The reason, if it is a decision."""
    example: str = ""
    """Rows of the data; the model card leaves it out."""

    def __str__(self) -> str:
        return f"{self.detail} ({self.reason})" if self.reason else self.detail

    @property
    def mark(self) -> str:
        """Return what precedes a warning in lists of decisions."""
        return "WARNING: " * (self.level == WARNING)

    def with_example(self) -> str:
        """Return the text with the example."""
        return f"{self}, {self.example}" if self.example else str(self)


@dataclass(frozen=True, kw_only=True)
class LibraryTraining:
    """A library's trainer, which computes its own batches and losses."""

    kind: type[Trainer]
    arguments: TrainingArguments
    options: Mapping[str, Any]
    """Further arguments of its constructor; `eval_dataset` maps names of splits to data sets."""


class Objective(ABC):
    """The part of a task that the engine uses: the layout, losses and scores of batches."""

    packable: Collection[str] = ()
    """Types of models that can be packed."""
    lightens_attention: bool = False
    """Whether packed batches may use `cpu_kernels`' attention, which takes blocks of samples."""
    couples_samples: bool = False
    """Whether the loss of a sample depends on the others of its batch (in-batch negatives)."""
    generates: bool = False
    """Whether an evaluation generates text, which takes much longer than a forward pass."""

    def packs(self, model: PreTrainedModel) -> bool:
        """Return whether `model` can be packed."""
        return False

    @abstractmethod
    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        """Return a layout of at most `size` samples, of a shape that `batches` fit into.

        Other batches of the same samples can be laid out too; the few that do not fit get a larger
        shape.
        """

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:  # noqa: B027
        """Prepare `model` for these batches."""

    @abstractmethod
    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Return [samples]: the loss of each sample, times its weight."""

    def class_weights(
        self, requested: str | None, samples: Samples, model: PreTrainedModel
    ) -> Sequence[float] | None:
        """Return the factor of each class's losses in training; None for 1.

        Args:
            requested: The hyperparameter class_weight.
        """
        return None

    @abstractmethod
    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the scores of a whole evaluation, as the Trainer's compute_metrics."""

    def library_trainer(
        self, model: Any, tokenizer: Tokenizer, arguments: TrainingArguments, max_length: int
    ) -> LibraryTraining | None:
        """Return the trainer of a library that replaces the engine; None without one."""
        return None

    def look_before(self, trainer: Any) -> None:  # noqa: B027
        """Keep what the model answers before training. All processes call it."""

    def generated_scores(self, trainer: Any, samples: Samples) -> dict[str, float]:
        """Return scores of generated text, computed by all processes together."""
        return {}


class EncoderObjective(Objective):
    """Base of objectives of encoders that can be packed: of texts, pairs or groups of these."""

    packable: Collection[str] = packed_encoders.FAMILIES
    lightens_attention = True

    def packs(self, model: PreTrainedModel) -> bool:
        """Return whether `model` is of a family that can be packed."""
        return packed_encoders.family_of(model.config) is not None

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        """Return a layout of texts, or of the texts of groups."""
        inner = text_layout(model, packed, size, pad_id, groups.text_batches(batches))
        is_grouped = any(isinstance(samples, Groups) for samples, _ in batches)
        return groups.layout(inner, size, batches) if is_grouped else inner

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        """Let `model` take packed batches, or compute padded texts as if each were alone."""
        if packed:
            packed_encoders.patch_forward_for_packing(model)
        else:
            packed_encoders.patch_forward_for_lengths(model)


class TokenLosses(Objective):
    """Base of objectives whose model sums the losses of tokens itself, with its head."""

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Return the first of the two sums: the losses."""
        return logits[:, 0]

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return perplexity and accuracy of tokens."""
        return evaluation.score_tokens(prediction)


class Task(ABC):
    """Base of tasks: an instance is created for each job, from its channels and hyperparameters."""

    lengths_are_of_samples: ClassVar[bool] = False
    """Whether a row may become several samples, each of which has an entry in `lengths`."""
    samples_are_rows: ClassVar[bool] = False
    """Whether each training sample is the row of `data.train` with its number."""
    takes_shards: ClassVar[bool] = False
    """Whether channels may be sharded over hosts. Such a task chooses columns and classes by the
    data of all hosts (`recipe.data.layout.shards`), and indexes arrays of tokens by
    `Samples.token_positions` and `span`."""
    sample_kind = "a text"
    """What a sample is, for the message about its special tokens."""
    options: Any
    """The hyperparameters that only this task takes, of the type `options` of its spec."""
    objective: Objective
    data: DataSets

    def __init__(self, channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> None:
        # One value, of which a task sees what belongs to data and models.
        self.data_settings: DataSettings = hyperparameters
        self.model_settings: ModelSettings = hyperparameters
        self.options = hyperparameters.options()
        self.read(training_channels(channels, hyperparameters.trains))

    @property
    def train(self) -> Dataset:
        """Return the training data before tokenization, with a row for each text or pair."""
        return self.data.train

    def some_texts(self) -> list[str]:
        """Return the texts of the first training rows."""
        return strings_within(self.train[:_COMPARED_ROWS])

    @abstractmethod
    def read(self, channels: Mapping[str, Path]) -> None:
        """Read the data, and set `data` and `objective`."""

    @functools.cached_property
    def targets(self) -> Collection[str]:
        """Return the columns of `data` that are learned and that requests lack, by the spec."""
        return frozenset(column.role for column in self._target_columns())

    def request_columns(self) -> dict[str, str | Sequence[str]]:
        """Return the columns of the training data by the keys of a request's input: one, or the
        several of a list. The saved model names them; empty if there are none."""
        inputs = self.data.inputs.items()
        return {role: names[0] for role, names in inputs if role != TOKEN_IDS}

    @property
    def generates(self) -> bool:
        """Return whether the targets are texts, of which several may be right."""
        return any(column.kind is CellKind.TEXT for column in self._target_columns())

    def _target_columns(self) -> Iterator[Column]:
        for form in TASKS[str(self.data_settings.task)].forms:
            yield from (column for column in form.columns if column.is_target)

    def check_best(self, scores: Sequence[str]) -> None:
        """Check that evaluation computes the metric by which the best weights are chosen."""
        metric = self.data_settings.passed.get("metric_for_best_model")
        names = ("loss", *scores)
        if metric is not None and metric.removeprefix("eval_") not in names:
            raise HyperparameterError(
                f"Hyperparameter metric_for_best_model has value {metric!r}, which evaluation does "
                "not compute for this data.",
                f"Give one of: {', '.join(names)}.",
            )

    @abstractmethod
    def load(self, source: Origin) -> Model:
        """Return the model to start from, and its tokenizer."""

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return how many tokens a sample has at most, also in serving; 0 if samples are not
        cut."""
        max_length = self.data_settings.max_length
        length = pretrained.longest_text(model, tokenizer, max_length, self.sample_kind)
        tokenizer.model_max_length = length
        return length

    @abstractmethod
    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        """Return the samples of one split; `name` is train, evaluation or test."""

    def samples(self, tokenizer: Tokenizer, max_length: int) -> dict[str, Samples]:
        """Return the samples of all splits."""
        made = {}
        for name, split in named_splits(self.data).items():
            with self.locating(name):
                made[name] = self.tokenize_split(name, split, tokenizer, max_length)
        return made

    @contextlib.contextmanager
    def locating(self, use: str, rows: Sequence[int] | None = None) -> Iterator[None]:
        """Name file and line in errors about rows of a data set, or about some of its rows."""
        try:
            yield
        except RowError as error:
            row = error.row if rows is None else rows[error.row]
            raise error.located(self.data.where(use, row)) from error

    def some_samples(
        self, tokenizer: Tokenizer, max_length: int, rows: Sequence[int], evaluated: int
    ) -> dict[str, Samples]:
        """Return the samples of some rows of `data.train`, and of the first evaluation rows, as
        many as a batch has, or more than are too few for a score."""
        few = range(min(max(_FEW, evaluated), len(self.data.evaluation)))
        splits = {
            "train": self.data.train.select(rows), "evaluation": self.data.evaluation.select(few),
        }  # fmt: skip
        made = {}
        for name, split in splits.items():
            with self.locating(name, rows if name == "train" else None):
                made[name] = self.tokenize_split(name, split, tokenizer, max_length)
        return made

    def findings(self) -> Iterator[Finding]:
        """Yield findings on the data alone, before the model is loaded."""
        for row in self.data.train.select(range(min(_SHOWN_ROWS, len(self.data.train)))):
            if detail := self.shown(row):
                yield Finding(level=OK, what="row", detail=detail)

    def shown(self, row: Mapping[str, Any]) -> str:
        """Return a row of the training data as it was read; empty if rows are not shown."""
        return ""

    @abstractmethod
    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        """Count the tokens of rows of `train` before truncation, special tokens included."""

    def pieces(self, length: int, longest: int) -> int:
        """Return how many samples a text of `length` tokens becomes; 1 if it is truncated."""
        return 1

    def stop_tokens(
        self, tokenizer: Tokenizer, samples: Mapping[str, Samples], max_length: int
    ) -> set[int] | None:
        """Return the tokens that end generated texts; None if the model generates none."""
        return None

    @abstractmethod
    def about(self) -> About:
        """Return the description of the model for its card."""

    def tune(self, trainer: Trainer) -> dict[str, float]:
        """Fit thresholds or other parameters on the last evaluation of the final weights.

        All processes call it.

        Returns:
            Additional metrics.
        """
        return {}

    def save(
        self,
        model: Any,
        weights: Mapping[str, Any] | None,
        tokenizer: Tokenizer,
        folder: Path,
    ) -> None:
        """Write the trained model and its tokenizer to `folder`.

        Args:
            weights: The gathered weights of a sharded model; None if it is not sharded.
        """
        lora.save(model, weights, folder, self.model_settings)
        tokenizer.save_pretrained(folder)

    def answers(self) -> PredictedAnswers | None:
        """Return the last answers to the test or evaluation data; None before there are any.

        do_predict writes them, a line for each row.
        """
        return None

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """Return the report's sections on the model's answers."""
        answers = self.answers()
        return () if answers is None else answers.sections()


def strings_within(value: Any) -> list[str]:
    """Return all strings within lists and dicts."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    if not isinstance(items, Iterable) or isinstance(items, bytes):
        return []
    return [text for item in items for text in strings_within(item)]


def judged_split(splits: DataSets) -> tuple[str, Dataset]:
    """Return the name and the data that the last answers belong to."""
    if splits.test is not None:
        return "test", splits.test
    return "evaluation", splits.evaluation


def whole_model(trainer: Trainer) -> tuple[Any, Any] | None:
    """Return the trained model without its wrappers, and its tokenizer; None if no process has all
    of the model."""
    if trainer.is_fsdp_enabled or xla.is_used():
        return None
    return trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class


def named_splits(splits: DataSets) -> dict[str, Dataset]:
    """Return the splits that are present: train, evaluation, test."""
    present = {"train": splits.train, "evaluation": splits.evaluation}
    return present if splits.test is None else {**present, "test": splits.test}


def has_types(model: PreTrainedModel, batches: Batches) -> bool:
    """Return whether the tokens of pairs have types that `model` takes.

    Raises:
        ModelError: It has fewer types than the tokenizer assigns.
    """
    typed = {id(samples): samples.types for samples, _ in batches if samples.types is not None}
    if not typed or not takes_token_types(model):
        return False
    most = max(int(types.max(initial=0)) for types in typed.values())
    known = getattr(model.config, "type_vocab_size", None)
    if known is not None and most >= known:
        raise ModelError(
            f"The tokenizer assigns token types up to {most}, and the model "
            f"({model.config.model_type}) has {known} (type_vocab_size).",
            "Give the tokenizer that belongs to the model.",
        )
    return True


def text_layout(
    model: PreTrainedModel,
    packed: bool,
    size: int,
    pad_id: int,
    batches: Batches,
    in_blocks: bool = False,
) -> Packed | Padded:
    """Return how texts or pairs of texts are laid out.

    Args:
        in_blocks: Whether packed texts stay in blocks even if the model's attention takes a row.
    """
    typed, lengths = has_types(model, batches), [samples.lengths[rows] for samples, rows in batches]
    if not packed:
        return Padded(packing.buckets(lengths), size, pad_id, typed=typed)
    family = packed_encoders.family_of(model.config)
    first = 0 if family is None else family.first_position(model.config)
    is_row = flat_attention.is_used(model.config) and not in_blocks
    shape = flat.row(lengths) if is_row else packing.shape(lengths)
    return Packed(shape, size, pad_id, first, typed=typed)


def longest_in(batches: Batches, judged: bool = False) -> int:
    """Return the most tokens of a sample of the data sets in `batches`, or of those that are
    judged, which is the same on every host; 0 if there are none."""
    distinct = {id(samples): samples for samples, _ in batches}.values()
    lengths = (some.lengths.max(initial=0) for some in distinct if some.judged or not judged)
    return int(max(lengths, default=0))


def learned_in(batches: Batches) -> int:
    """Return the most learned tokens of a batch."""
    return max((samples.weight(rows) for samples, rows in batches), default=1)
