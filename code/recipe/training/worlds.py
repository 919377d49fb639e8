"""The samples of an optimizer step, cut for the processes that there are.

A step is a pure function of the data, the seed, the epoch and its number. How many processes share
it, and in how many batches one after the other, changes no more than the order of its sums. So a
job that had 2 processes may go on with 1 or 3: the samples of a step stay as many as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from recipe.batching.batches import Training
from recipe.console import say
from recipe.runtime import xla
from recipe.runtime.device import everyones
from recipe.storage import checkpoints
from recipe.tasks.base import Objective

_PARTS = (1, 2, 4)
_STEPS = 200
_OF_A_BATCH = 160
"""Tokens that a CPU computes in the time that a batch takes whatever is in it (docs/LAB.md)."""
_OF_A_BATCH_ELSEWHERE = 8192
"""Of a GPU, where launching takes longer than most batches: not measured."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the samples of a step are cut."""

    processes: int
    size: int
    """Samples in a batch of one process, at most."""
    accumulation: int
    """Batches of a process in a step."""
    asked: tuple[int, int]
    """The hyperparameters: samples in a batch of one process, and batches in a step."""
    sharded: bool
    samples: int
    """In a step, over all processes."""

    def as_job(self) -> dict[str, Any]:
        """What a checkpoint says of it, as JSON gives it back."""
        return {**asdict(self), "asked": list(self.asked)}


def of_arguments(args: TrainingArguments) -> Cut:
    """As the hyperparameters say, for the processes that there are."""
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return Cut(
        processes=args.world_size,
        size=size,
        accumulation=accumulation,
        asked=(size, accumulation),
        sharded=bool(args.fsdp),
        samples=args.world_size * size * accumulation,
    )


def kept(requested: Cut, saved: Mapping[str, Any] | None) -> Cut:
    """`asked` or, if only the number of processes has changed, what keeps the samples of a step.

    A batch has no more samples than was asked for, so that a device has room for it.

    Args:
        saved: What the checkpoint says (`Cut.as_job`); None if there is none.
    """
    if (
        not saved
        or saved["samples"] == requested.samples
        or saved["asked"] != list(requested.asked)
    ):
        return requested
    samples = int(saved["samples"])
    accumulation = -(-samples // (requested.processes * requested.asked[0]))
    return Cut(
        processes=requested.processes,
        size=-(-samples // (requested.processes * accumulation)),
        accumulation=accumulation,
        asked=requested.asked,
        sharded=requested.sharded,
        samples=samples,
    )


def settle(args: TrainingArguments) -> Cut:
    """How steps are cut for the processes of this training, which call it together.

    A checkpoint of a job with other hyperparameters is left for `checkpoints.check_same` to refuse.
    """
    saved = None
    if args.save_strategy != SaveStrategy.NO and args.process_index == 0:
        requested = str(args.resume_from_checkpoint or "True")
        if requested.lower() not in ("false", "0"):
            is_path = requested.lower() not in ("true", "1")
            folder = Path(requested) if is_path else Path(str(args.output_dir))
            saved = checkpoints.newest_job(folder, is_path).get(checkpoints.CUT)
    return kept(of_arguments(args), everyones(saved)[0])


def tell(args: TrainingArguments, cut: Cut) -> None:
    """Set the arguments to how steps are cut."""
    args.per_device_train_batch_size = cut.size
    args.gradient_accumulation_steps = cut.accumulation


def by_length(
    training: Training,
    cut: Cut,
    args: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    packing: bool | None,
    objective: Objective,
) -> tuple[Training, Cut]:
    """The same steps in smaller batches, where so many fewer tokens are padding that it pays.

    A step's samples lie in its batches by length, and a step's loss is the mean over its samples,
    however it is cut: what is learned is that of steps drawn at random. Processes call it together.

    Args:
        packing: The hyperparameter; where samples are packed there is no padding to save.
    """
    is_packed = packing is not False and objective.packs(model)
    # Where a program is compiled for each shape, or each batch gathers sharded weights, a batch
    # more costs more than its padding.
    is_dear = args.torch_compile or xla.in_use() or bool(args.fsdp)
    if is_packed or objective.couples_samples or is_dear:
        return training, cut
    pad_id: Any = getattr(tokenizer, "pad_token_id", None)
    costs = {}
    of_a_batch = _OF_A_BATCH if args.device.type == "cpu" else _OF_A_BATCH_ELSEWHERE
    for parts in (each for each in _PARTS if cut.size % each == 0):
        finer = _finer(training, parts)
        drawn = finer.epoch(0, False)
        seen = range(min(len(drawn), _STEPS * finer.accumulation))
        batches = [(training.samples, rows) for at in seen for rows, _ in drawn[at]]
        layout = objective.layout(model, False, finer.size, pad_id, batches)
        costs[parts] = sum(layout.places(*each) + of_a_batch for each in batches)
    best = everyones(min(costs, key=lambda parts: costs[parts]))[0]
    if best == 1:
        return training, cut
    say(f"steps: {cut.samples} texts drawn at random, cut by length into batches of "
        f"{cut.size // best} where {cut.size} were asked for")  # fmt: skip
    cut = replace(cut, size=cut.size // best, accumulation=cut.accumulation * best)
    return _finer(training, best), cut


def _finer(training: Training, parts: int) -> Training:
    return replace(
        training, size=training.size // parts, accumulation=training.accumulation * parts
    )


def shown(cut: Mapping[str, Any]) -> str:
    """In words, for the log and for errors."""
    if not cut:
        return "parts that are not known"
    sharded = ", sharded" if cut["sharded"] else ""
    return (
        f"{cut['processes']} process(es) x {cut['size']} texts x {cut['accumulation']} "
        f"batch(es){sharded}"
    )
