"""What a task is: all that training, inspection and reports ask of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import datasets
import torch
from torch import Tensor
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from recipe.batching import batches, flat, packing
from recipe.batching.batches import Layout, Samples
from recipe.batching.flat import Row
from recipe.batching.packing import Rows, Shape
from recipe.console import say
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.models import cpu_kernels, flat_attention
from recipe.models.loading import Source
from recipe.reports.answers import PredictedAnswers
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.tasks import evaluation

Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]
Batches = Sequence[tuple[Samples, Rows]]
"""The samples of each of some batches."""
OK, WARNING, ERROR = "ok", "warning", "error"
_FEW = 8


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at before training."""

    level: str
    """OK, WARNING or ERROR."""
    what: str
    detail: str


class Objective(Protocol):
    """What the engine asks of a task: the layout of a batch, its losses, its scores."""

    packable: Collection[str]
    """Types of models that can be packed."""
    lightens_attention: bool = False
    """Whether packed batches may use `cpu_kernels`' attention, which takes blocks of samples."""
    couples_samples: bool = False
    """Whether the loss of a sample rests on the others of its batch, as with in-batch negatives."""

    def packs(self, model: PreTrainedModel) -> bool:
        """Whether `model` can be packed."""

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        """A layout of at most `size` samples, of a shape that `batches` fit into.

        Other batches of the same samples can be laid out too, the few that lack room in a larger
        shape.
        """

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        """Let `model` take such batches."""

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """[samples]: each sample's loss, times its weight."""

    def class_weights(
        self, hyperparameters: Hyperparameters, samples: Samples, model: PreTrainedModel
    ) -> Sequence[float] | None:
        """What the loss of a sample of each class is multiplied by in training; None for one."""
        return None

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        """What the Trainer takes as its compute_metrics."""


class SummedBeside(Objective, Protocol):
    """Of tasks whose losses are those of tokens, summed beside the model's head."""

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """The first of the two sums."""
        return logits[:, 0]

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        """Perplexity and accuracy of tokens."""
        return evaluation.score_tokens


class Task(Protocol):
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

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, rows: Sequence[int] | None = None
    ) -> dict[str, Samples]:
        """`train`, `evaluation` and maybe `test`.

        Args:
            rows: Of the training data, if not all are wanted; of the others then a few.
        """

    def findings(self) -> Iterator[Finding]:
        """What can be said of the data before the model is loaded."""

    def lengths(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]) -> list[int]:
        """Tokens of some rows of the training data, uncut."""

    def pieces(self, length: int, longest: int) -> int:
        """Samples that a text of `length` tokens becomes."""

    def about(self) -> About:
        """What the model is for."""

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """What a report on the finished run shows of the model's answers."""


@runtime_checkable
class Answering(Protocol):
    """A task whose answers can be written, a line for each row (do_predict)."""

    def answers(self, trainer: Trainer) -> PredictedAnswers | None:
        """The last answers to the data that the model is judged by; None before there are any."""


@runtime_checkable
class Tuning(Protocol):
    """A task that decides something on the evaluation data once the weights are final."""

    def tune(self, trainer: Trainer) -> dict[str, float]:
        """Decide it by the trainer's last evaluation; more metrics of this. By every process."""


@runtime_checkable
class Writing(Protocol):
    """An objective with scores beyond those of logits: of what the model writes."""

    def written_scores(self, trainer: Any, samples: Samples) -> dict[str, float]:
        """The scores, by all processes together; none where the model cannot write."""


@runtime_checkable
class Referring(Protocol):
    """An objective whose losses look at what the model said before it was trained.

    The engine asks for it before the first step of a training that starts anew, and keeps it in
    each checkpoint, from which a resumed training takes it: its weights would say something else.
    """

    def refer(self, ask: Callable[[Samples], Any]) -> None:
        """Note what the model says; `ask` gives its logits of all of some samples."""

    def references(self) -> bytes:
        """What was noted, as a checkpoint keeps it."""

    def restore(self, content: bytes) -> None:
        """Take back what `references` gave.

        Raises:
            CheckpointError: it is of other data.
        """


@runtime_checkable
class Saving(Protocol):
    """A task whose model is more than its weights and its tokenizer."""

    def save(self, model: Any, weights: Mapping[str, Any] | None, folder: Path) -> None:
        """Write all of the trained `model` to `folder`; `weights` are those of a sharded one."""


@runtime_checkable
class Sharding(Protocol):
    """A task that takes sharded channels: what it decides by its data (columns, classes), it
    decides by those of all hosts (`recipe.data.shards`), and what else its samples have beside
    tokens and labels it looks up by `Samples.places` and `span`."""

    @property
    def sharded(self) -> frozenset[str]:
        """Which of its samples (`train`, `evaluation`, `test`) are of this host only."""


TaskClass = Callable[[Mapping[str, Path], Hyperparameters], Task]
"""What a task's module calls `TASK`: called with the job's channels and hyperparameters."""


class NamedSplits(Protocol):
    """The data of a job, by its use."""

    @property
    def train(self) -> datasets.Dataset: ...

    @property
    def evaluation(self) -> datasets.Dataset: ...

    @property
    def test(self) -> datasets.Dataset | None: ...


def check_best(hyperparameters: Hyperparameters, scores: Sequence[str]) -> None:
    """See that the metric that the best weights are chosen by is one that evaluation gives."""
    metric = hyperparameters.passed.get("metric_for_best_model")
    names = ("loss", *scores)
    if metric is not None and metric.removeprefix("eval_") not in names:
        raise HyperparameterError(
            f"Hyperparameter metric_for_best_model has value {metric!r}, which evaluation does not "
            "give for this data.",
            f"Give one of: {', '.join(names)}.",
        )


def named(
    splits: NamedSplits, rows: Sequence[int] | None = None
) -> list[tuple[str, datasets.Dataset]]:
    """The splits that there are, with their names.

    Args:
        rows: Of the training data, if not all are wanted; of the evaluation's then a few.
    """
    named_splits = {"train": splits.train, "evaluation": splits.evaluation, "test": splits.test}
    if rows is not None:
        few = range(min(_FEW, len(splits.evaluation)))
        named_splits = {
            "train": splits.train.select(rows),
            "evaluation": splits.evaluation.select(few),
        }
    return [(name, split) for name, split in named_splits.items() if split is not None]


def shape_for(model: PreTrainedModel, batches: Batches) -> Shape | Row:
    """What some batches are packed into: blocks, or a row if the model's attention takes one."""
    lengths = lengths_of(batches)
    return flat.row(lengths) if flat_attention.is_used(model.config) else packing.shape(lengths)


def lengths_of(batches: Batches) -> list[Rows]:
    """Tokens of each sample of each batch."""
    return [samples.lengths[rows] for samples, rows in batches]


def layouts(
    model: PreTrainedModel,
    pad_id: int,
    asked: bool | None,
    training: batches.Training,
    evaluations: Mapping[str, Samples],
    evaluation_size: int,
    objective: Objective,
) -> tuple[Layout, Layout]:
    """How training and evaluation lay out their samples, each in one way for the whole run.

    That of training is made for batches of its first epoch, with the longest sample among them:
    all others have like sums of tokens.

    Args:
        asked: The hyperparameter packing; None packs where the model can be packed.

    Returns:
        That of training, and that of evaluation.

    Raises:
        HyperparameterError: packing was asked for, but the model cannot be packed.
    """
    can_pack = objective.packs(model)
    if asked and not can_pack:
        raise HyperparameterError(
            f"Hyperparameter packing has value True, but a model of type "
            f"{model.config.model_type} cannot be packed.",
            f"Leave it out. What can be packed: {', '.join(objective.packable)}.",
        )
    packs = can_pack and asked is not False
    drawn = [(training.samples, rows) for rows in training.typical(packs)]
    layout = objective.layout(model, packs, training.size, pad_id, drawn)
    evaluated = [
        (samples, rows)
        for samples in evaluations.values()
        for rows in packing.in_order(samples.lengths, evaluation_size, packs)
    ]
    evaluation = objective.layout(model, packs, evaluation_size, pad_id, evaluated)
    objective.prepare(model, packs)
    places = sum(layout.places(samples, rows) for samples, rows in drawn if len(rows))
    real = sum(int(samples.lengths[rows].sum()) for samples, rows in drawn) / places
    why = f" ({model.config.model_type} cannot be packed)" if asked is None else ""
    together = training.samples_of_a_step
    of_a_step = f"{together} texts a step; " if together != training.size else ""
    say(
        f"batches: {of_a_step}{training.size} texts {layout.describe()}"
        f"{'' if layout.balanced else why}, {real:.1%} of them real; "
        f"evaluation {evaluation.describe()}"
    )
    return layout, evaluation


def lay_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: TrainingArguments,
    hyperparameters: Hyperparameters,
    training: batches.Training,
    evaluations: Mapping[str, Samples],
    objective: Objective,
) -> tuple[Layout, Layout]:
    """See `layouts`; the model gets the attention that its device is fastest with.

    Raises:
        HyperparameterError: packing was asked for, but the model cannot be packed.
    """
    pad_id: Any = getattr(tokenizer, "pad_token_id", None)
    if hyperparameters.packing is not False and objective.packs(model):
        dtype = torch.float16 if args.fp16 else model.dtype
        why_not = flat_attention.why_not(
            model.config, args.device, torch.bfloat16 if args.bf16 else dtype
        )
        if why_not is None:
            flat_attention.use(model)
        elif args.device.type == "cuda":
            say(f"attention: among samples in blocks, by a mask: {why_not}")
    size, asked = args.eval_batch_size, hyperparameters.packing
    chosen = layouts(model, pad_id, asked, training, evaluations, size, objective)
    if args.device.type == "cpu" and not args.torch_compile:
        is_flat = flat_attention.is_used(model.config)
        blocks = chosen[0].balanced and objective.lightens_attention and not is_flat
        rows = args.bf16 and not chosen[0].balanced
        cpu_kernels.lighten(model, packed_attention=blocks, padded_attention=rows)
    return chosen
