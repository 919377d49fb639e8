"""Decide how a step is split over processes and batches, and how the samples of a batch share a
tensor.

The samples of a step are a pure function of the data, the seed, the epoch and the step's number.
The number of processes and batches changes only the order in which their gradients are summed. So
a job that had 2 processes can resume with 1 or 3: each step keeps its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from recipe.batching import packing
from recipe.batching.batches import Layout, Samples, Training, World
from recipe.errors import HyperparameterError
from recipe.models import cpu_kernels, flat_attention
from recipe.plan import trainer_arguments
from recipe.plan.table import Table
from recipe.runtime import compiled_layers, step_graphs, xla
from recipe.runtime.device import gather_objects
from recipe.storage import checkpoints
from recipe.tasks.base import Objective

_PARTS = (1, 2, 4)
_STEPS = 200
_BATCH_TOKENS = 160
"""Fixed cost of a batch on a CPU, in tokens (docs/LAB.md)."""
_BATCH_TOKENS_ELSEWHERE = 8192
"""The same on a GPU, dominated by kernel launches. This is an assumption, not measured."""


@dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """The model to start from, and how its steps are computed."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: TrainingArguments
    objective: Objective
    packing: bool | None = None
    """The hyperparameter; None packs if the model can be packed."""
    max_length: int = 0
    """Most tokens of a sample; 0 if samples are not cut."""
    bf16_weights: bool = False
    """Whether training computes with bfloat16 copies of the weights."""
    cuda_graphs: bool = False
    """The hyperparameter."""

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
    size = -(-samples // (requested.processes * accumulation))
    return replace(requested, size=size, accumulation=accumulation, samples=samples)


def settle(args: TrainingArguments) -> Cut:
    """Choose how steps are split, with regard to the checkpoint. A collective of all processes.

    A checkpoint with other hyperparameters is ignored here; `checkpoints.check_same` refuses it.
    """
    saved = None
    if args.save_strategy != SaveStrategy.NO and args.process_index == 0:
        folder = Path(str(args.output_dir))
        job = checkpoints.requested_job(folder, args.resume_from_checkpoint)
        saved = job.get(checkpoints.CUT)
    return kept(requested_cut(args), gather_objects(saved)[0])


def cut_by_length(loaded: TrainableModel, training: Training, cut: Cut) -> tuple[Training, Cut]:
    """Split steps into smaller batches by length, if that saves more padding than batches cost.

    A step keeps its randomly drawn samples, and its loss is the mean over them, so the result does
    not change. A collective of all processes.
    """
    objective, args = loaded.objective, loaded.arguments
    # Packed samples have no padding to save.
    is_packed = loaded.packing is not False and objective.packs(loaded.model)
    # If each shape is compiled, or each batch gathers sharded weights, another batch costs more
    # than padding.
    is_dear = args.torch_compile or xla.is_used() or bool(args.fsdp)
    if is_packed or objective.couples_samples or is_dear:
        return training, cut
    costs, ways = {}, {}
    batch_cost = _BATCH_TOKENS if args.device.type == "cpu" else _BATCH_TOKENS_ELSEWHERE
    for parts in (count for count in _PARTS if cut.size % count == 0):
        size, accumulation = cut.size // parts, cut.accumulation * parts
        finer = replace(training, size=size, accumulation=accumulation)
        drawn = finer.epoch(0, False)
        seen = range(min(len(drawn), _STEPS * finer.accumulation))
        batches = [(training.samples, rows) for step in seen for rows, _ in drawn[step]]
        layout = objective.layout(loaded.model, False, finer.size, loaded.pad_id, batches)
        costs[parts] = sum(layout.computed_tokens(*batch) + batch_cost for batch in batches)
        ways[parts] = finer, replace(cut, size=size, accumulation=accumulation)
    return ways[gather_objects(min(costs, key=costs.__getitem__))[0]]


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


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How samples make steps and batches."""

    training: Training
    cut: Cut
    train_layout: Layout
    eval_layout: Layout
    has_graphs: bool = False
    """Whether forward and backward passes are recorded as graphs."""
    compiles_layers: bool = False
    """Whether torch.compile gets the layers instead of the model."""


def decide(
    loaded: TrainableModel, cut: Cut, samples: Mapping[str, Samples], table: Table
) -> BatchPlan:
    """Decide how samples make batches, and prepare the model for these. A collective.

    The model gets the attention that is fastest on its device.

    Args:
        samples: Those of `train`, and of evaluations.

    Raises:
        HyperparameterError: packing=True, and the model cannot be packed.
    """
    model, args, objective, whole = loaded.model, loaded.arguments, loaded.objective, cut.size
    evaluations = {name: split for name, split in samples.items() if name != "train"}
    training = Training(
        samples=samples["train"],
        size=cut.size,
        accumulation=cut.accumulation,
        step_samples=cut.samples,
        seed=args.seed if args.data_seed is None else args.data_seed,
        world=World(processes=args.world_size, rank=args.process_index),
    )
    training, cut = cut_by_length(loaded, training, cut)
    if loaded.packing is not False and objective.packs(model):
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
        why_not = flat_attention.why_not(model.config, args.device, dtype)
        if why_not is None:
            flat_attention.use(model)
        elif args.device.type == "cuda":
            table.add("attention", "a mask separates the samples of a block", why_not)
    # do_train=False computes no training batch, but needs a layout.
    training_table = table if args.do_train else Table()
    train_layout, eval_layout = layouts(loaded, training, evaluations, training_table)
    if args.do_eval or args.do_predict:
        rows = max(map(len, evaluations.values()), default=0)
        few = "; too few for a meaningful score" if rows < 10 else ""
        count = min(rows, args.eval_batch_size)
        batch_size = f"{count} sample{'s' * (count != 1)}"
        table.add("evaluation", f"{batch_size} {eval_layout.describe()}{few}")
    is_flat = train_layout.balanced and flat_attention.is_used(model.config)
    if args.device.type == "cpu" and not args.torch_compile:
        blocks = train_layout.balanced and objective.lightens_attention and not is_flat
        rows = args.bf16 and not train_layout.balanced
        cpu_kernels.lighten(model, packed_attention=blocks, padded_attention=rows)
    compiles_layers = bool(args.torch_compile and args.do_train)
    if compiles_layers:
        why_not = compiled_layers.why_not(model, args, train_layout.balanced)
        compiles_layers = why_not is None
        detail = "each layer whole, layers alike once" if compiles_layers else "the whole model"
        table.add("torch.compile", detail, why_not or "compile=True is set")
    has_graphs = loaded.cuda_graphs and args.do_train
    if has_graphs:
        why_not = step_graphs.why_not(model, args, is_flat, compiles_layers)
        has_graphs = why_not is None
        detail = "forward and backward by a CUDA graph of each shape" if has_graphs else "none"
        table.add("graphs", detail, why_not or "cuda_graphs=True is set")
    steps = training.steps()
    split = f"split by length into batches of {cut.size} instead of {whole}"
    detail = trainer_arguments.describe_steps(args, steps, cut.samples)
    training_table.add("steps", detail, split if cut.size != whole else "")
    return BatchPlan(
        training=training,
        cut=cut,
        train_layout=train_layout,
        eval_layout=eval_layout,
        has_graphs=has_graphs,
        compiles_layers=compiles_layers,
    )


def layouts(
    loaded: TrainableModel, training: Training, evaluations: Mapping[str, Samples], table: Table
) -> tuple[Layout, Layout]:
    """Return the layouts of training and of evaluations, which stay the same for the whole run.

    The training layout fits the batches of the first epoch, of which one has the longest sample.
    Other batches have similar sums of tokens.
    """
    model, objective, size = loaded.model, loaded.objective, loaded.arguments.eval_batch_size
    can_pack, kind = objective.packs(model), model.config.model_type
    if loaded.packing and not can_pack:
        raise HyperparameterError(
            f"Hyperparameter packing has value True, but a model of type {kind} cannot be packed.",
            f"Leave it out. This task packs: {', '.join(objective.packable) or 'no model'}.",
        )
    packs = can_pack and loaded.packing is not False
    drawn = [(training.samples, rows) for rows in training.typical(packs)]
    layout = objective.layout(model, packs, training.size, loaded.pad_id, drawn)
    evaluated = [
        (samples, rows)
        for samples in evaluations.values()
        for rows in packing.ordered_batches(samples.lengths, size, packs)
    ]
    evaluation = objective.layout(model, packs, size, loaded.pad_id, evaluated)
    objective.prepare(model, packs)
    computed = sum(layout.computed_tokens(samples, rows) for samples, rows in drawn if len(rows))
    real = sum(int(samples.lengths[rows].sum()) for samples, rows in drawn) / computed
    is_refused = bool(objective.packable) and loaded.packing is None and not layout.balanced
    table.add(
        "batch",
        f"{training.size} samples {layout.describe()}, {1 - real:.1%} padding",
        f"{kind} cannot be packed" if is_refused else "",
    )
    return layout, evaluation
