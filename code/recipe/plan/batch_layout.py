"""Decide how a step is split into batches, and how the samples of a batch share a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from recipe.batching import packing
from recipe.batching.batches import Layout, Samples, Training, World
from recipe.errors import HyperparameterError
from recipe.models import cpu_kernels, flat_attention
from recipe.plan import worlds
from recipe.plan.table import Table
from recipe.plan.worlds import Computation, Cut
from recipe.tasks.base import Objective


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How samples make steps and batches."""

    training: Training
    cut: Cut
    train_layout: Layout
    eval_layout: Layout


def decide(
    computation: Computation, cut: Cut, samples: Mapping[str, Samples], table: Table
) -> BatchPlan:
    """Decide how samples make batches, and prepare the model for these. A collective.

    The model gets the attention that is fastest on its device.

    Args:
        samples: Those of `train`, and of evaluations.

    Raises:
        HyperparameterError: packing=True, and the model cannot be packed.
    """
    model, args, objective = computation.model, computation.arguments, computation.objective
    requested, whole = computation.packing, cut.size
    evaluations = {name: split for name, split in samples.items() if name != "train"}
    training = Training(
        samples=samples["train"],
        size=cut.size,
        accumulation=cut.accumulation,
        at_once=cut.samples,
        seed=args.seed if args.data_seed is None else args.data_seed,
        world=World(processes=args.world_size, rank=args.process_index),
    )
    training, cut = worlds.cut_by_length(computation, training, cut)
    if requested is not False and objective.packs(model):
        dtype = torch.float16 if args.fp16 else model.dtype
        why_not = flat_attention.why_not(
            model.config, args.device, torch.bfloat16 if args.bf16 else dtype
        )
        if why_not is None:
            flat_attention.use(model)
        elif args.device.type == "cuda":
            table.add("attention", "a mask separates the samples of a block", why_not)
    # do_train=False computes no training batch, but needs a layout.
    of_training = table if args.do_train else Table()
    size = args.eval_batch_size
    train_layout, eval_layout = layouts(
        model, computation.pad_id, requested, training, evaluations, size, objective, of_training
    )
    if args.do_eval or args.do_predict:
        rows = max(map(len, evaluations.values()), default=0)
        few = "; too few for a meaningful score" if rows < 10 else ""
        count = f"{min(rows, size)} sample{'s' * (min(rows, size) != 1)}"
        table.add("evaluation", f"{count} {eval_layout.describe()}{few}")
    if args.device.type == "cpu" and not args.torch_compile:
        is_flat = flat_attention.is_used(model.config)
        blocks = train_layout.balanced and objective.lightens_attention and not is_flat
        rows = args.bf16 and not train_layout.balanced
        cpu_kernels.lighten(model, packed_attention=blocks, padded_attention=rows)
    steps = training.steps()
    total = args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs)
    split = f"split by length into batches of {cut.size} instead of {whole}"
    detail = f"{steps} an epoch, {total} in all, {cut.samples} samples a step"
    of_training.add("steps", detail, split if cut.size != whole else "")
    return BatchPlan(training=training, cut=cut, train_layout=train_layout, eval_layout=eval_layout)


def layouts(
    model: PreTrainedModel,
    pad_id: int,
    requested: bool | None,
    training: Training,
    evaluations: Mapping[str, Samples],
    evaluation_size: int,
    objective: Objective,
    table: Table,
) -> tuple[Layout, Layout]:
    """Return the layouts of training and of evaluations, which stay the same for the whole run.

    The training layout fits the batches of the first epoch, of which one has the longest sample.
    Other batches have similar sums of tokens.
    """
    can_pack = objective.packs(model)
    kind = model.config.model_type
    if requested and not can_pack:
        raise HyperparameterError(
            f"Hyperparameter packing has value True, but a model of type {kind} cannot be packed.",
            f"Leave it out. This task packs: {', '.join(objective.packable) or 'no model'}.",
        )
    packs = can_pack and requested is not False
    drawn = [(training.samples, rows) for rows in training.typical(packs)]
    layout = objective.layout(model, packs, training.size, pad_id, drawn)
    evaluated = [
        (samples, rows)
        for samples in evaluations.values()
        for rows in packing.ordered_batches(samples.lengths, evaluation_size, packs)
    ]
    evaluation = objective.layout(model, packs, evaluation_size, pad_id, evaluated)
    objective.prepare(model, packs)
    computed = sum(layout.computed_tokens(samples, rows) for samples, rows in drawn if len(rows))
    real = sum(int(samples.lengths[rows].sum()) for samples, rows in drawn) / computed
    is_refused = requested is None and not layout.balanced
    table.add(
        "batch",
        f"{training.size} samples {layout.describe()}, {1 - real:.1%} padding",
        f"{kind} cannot be packed" if is_refused else "",
    )
    return layout, evaluation
