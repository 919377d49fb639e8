"""Split the samples of an optimizer step over processes and batches.

The samples of a step are a pure function of the data, the seed, the epoch and the step's number.
The number of processes and batches changes only the order in which their gradients are summed. So
a job that had 2 processes can resume with 1 or 3: each step keeps its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from recipe.batching.batches import Training
from recipe.runtime import xla
from recipe.runtime.device import everyones
from recipe.storage import checkpoints
from recipe.tasks.base import Objective

_PARTS = (1, 2, 4)
_STEPS = 200
_OF_A_BATCH = 160
"""Fixed cost of a batch on a CPU, in tokens (docs/LAB.md)."""
_OF_A_BATCH_ELSEWHERE = 8192
"""The same on a GPU, dominated by kernel launches. This is an assumption, not measured."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """What computes the steps of a training."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: TrainingArguments
    objective: Objective
    packing: bool | None = None
    """The hyperparameter; None packs if the model can be packed."""

    @property
    def pad_id(self) -> Any:
        """Return the token that fills rows; None if the tokenizer has none."""
        return getattr(self.tokenizer, "pad_token_id", None)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the samples of a step are split."""

    processes: int
    size: int
    """Most samples in a batch of one process."""
    accumulation: int
    """Batches of a process in a step."""
    given: tuple[int, int]
    """The hyperparameters: batch size of one process, and batches in a step."""
    sharded: bool
    samples: int
    """Samples in a step, over all processes."""

    def as_job(self) -> dict[str, Any]:
        """Return the record for a checkpoint, with JSON's types."""
        return {**asdict(self), "given": list(self.given)}


def requested_cut(args: TrainingArguments) -> Cut:
    """Return the split that the hyperparameters give for this number of processes."""
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return Cut(
        processes=args.world_size,
        size=size,
        accumulation=accumulation,
        given=(size, accumulation),
        sharded=bool(args.fsdp),
        samples=args.world_size * size * accumulation,
    )


def kept(requested: Cut, saved: Mapping[str, Any] | None) -> Cut:
    """Return `requested`, or a split that keeps the samples of a step if only the number of
    processes has changed.

    No batch is larger than requested, so that it fits into the device's memory.

    Args:
        saved: The checkpoint's record (`Cut.as_job`); None without a checkpoint.
    """
    if (
        not saved
        or saved["samples"] == requested.samples
        or saved["given"] != list(requested.given)
    ):
        return requested
    samples = int(saved["samples"])
    accumulation = -(-samples // (requested.processes * requested.given[0]))
    return Cut(
        processes=requested.processes,
        size=-(-samples // (requested.processes * accumulation)),
        accumulation=accumulation,
        given=requested.given,
        sharded=requested.sharded,
        samples=samples,
    )


def settle(args: TrainingArguments) -> Cut:
    """Choose how steps are split, with regard to the checkpoint. A collective of all processes.

    A checkpoint with other hyperparameters is ignored here; `checkpoints.check_same` refuses it.
    """
    saved = None
    if args.save_strategy != SaveStrategy.NO and args.process_index == 0:
        requested = str(args.resume_from_checkpoint or "True")
        if requested.lower() not in ("false", "0"):
            is_path = requested.lower() not in ("true", "1")
            folder = Path(requested) if is_path else Path(str(args.output_dir))
            saved = checkpoints.newest_job(folder, is_path).get(checkpoints.CUT)
    return kept(requested_cut(args), everyones(saved)[0])


def cut_by_length(computation: Computation, training: Training, cut: Cut) -> tuple[Training, Cut]:
    """Split steps into smaller batches by length, if that saves more padding than batches cost.

    A step keeps its randomly drawn samples, and its loss is the mean over them, so the result does
    not change. A collective of all processes.
    """
    model, objective, args = computation.model, computation.objective, computation.arguments
    # Packed samples have no padding to save.
    is_packed = computation.packing is not False and objective.packs(model)
    # If each shape is compiled, or each batch gathers sharded weights, another batch costs more
    # than padding.
    is_dear = args.torch_compile or xla.is_used() or bool(args.fsdp)
    if is_packed or objective.couples_samples or is_dear:
        return training, cut
    costs = {}
    of_a_batch = _OF_A_BATCH if args.device.type == "cpu" else _OF_A_BATCH_ELSEWHERE
    for parts in (count for count in _PARTS if cut.size % count == 0):
        finer = _finer(training, parts)
        drawn = finer.epoch(0, False)
        seen = range(min(len(drawn), _STEPS * finer.accumulation))
        batches = [(training.samples, rows) for step in seen for rows, _ in drawn[step]]
        layout = objective.layout(model, False, finer.size, computation.pad_id, batches)
        costs[parts] = sum(layout.computed_tokens(*batch) + of_a_batch for batch in batches)
    best = everyones(min(costs, key=lambda parts: costs[parts]))[0]
    if best == 1:
        return training, cut
    cut = replace(cut, size=cut.size // best, accumulation=cut.accumulation * best)
    return _finer(training, best), cut


def _finer(training: Training, parts: int) -> Training:
    return replace(
        training, size=training.size // parts, accumulation=training.accumulation * parts
    )


def shown(cut: Mapping[str, Any]) -> str:
    """Describe a split, for the log and for errors."""
    if not cut:
        return "unknown parts"
    sharded = ", sharded" if cut["sharded"] else ""
    processes, batches = cut["processes"], cut["accumulation"]
    return (
        f"{processes} process{'es' * (processes > 1)} x {cut['size']} texts x "
        f"{batches} batch{'es' * (batches > 1)}{sharded}"
    )
