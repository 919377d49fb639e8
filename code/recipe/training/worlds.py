"""The samples of an optimizer step, cut for the processes that there are.

A step is a pure function of the data, the seed, the epoch and its number. How many processes share
it, and in how many batches one after the other, changes no more than the order of its sums. So a
job that had 2 processes may go on with 1 or 3: the samples of a step stay as many as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from recipe.runtime.device import everyones
from recipe.storage import checkpoints


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
    """How steps are cut in this training; the arguments are set to it. Processes call it together.

    A checkpoint of a job with other hyperparameters is left for `checkpoints.check_same` to refuse.
    """
    saved = None
    if args.save_strategy != SaveStrategy.NO and args.process_index == 0:
        requested = str(args.resume_from_checkpoint or "True")
        if requested.lower() not in ("false", "0"):
            is_path = requested.lower() not in ("true", "1")
            folder = Path(requested) if is_path else Path(str(args.output_dir))
            saved = checkpoints.newest_job(folder, is_path).get(checkpoints.CUT)
    cut = kept(of_arguments(args), everyones(saved)[0])
    args.per_device_train_batch_size = cut.size
    args.gradient_accumulation_steps = cut.accumulation
    return cut


def shown(cut: Mapping[str, Any]) -> str:
    """In words, for the log and for errors."""
    if not cut:
        return "parts that are not known"
    sharded = ", sharded" if cut["sharded"] else ""
    return (
        f"{cut['processes']} process(es) x {cut['size']} texts x {cut['accumulation']} "
        f"batch(es){sharded}"
    )
