"""Check a job without training: data, model, lengths, steps, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PrinterCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from recipe import arguments
from recipe.batching import batches
from recipe.compat import quieten
from recipe.errors import RecipeError
from recipe.models import flat_attention, packed_decoders, quantized
from recipe.paths import Folders
from recipe.plan import batch_layout, data_report, resolution, trainer_arguments
from recipe.plan.batch_layout import Loaded
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.runtime import memory, memory_estimate
from recipe.storage import atomic
from recipe.tasks.base import ERROR, OK, WARNING, Finding, named_splits
from recipe.training import engine
from recipe.training import forecast as forecasting

_DOUBT = 1.5
"""The factor by which the estimate from a sample of rows may be too high."""


def inspect(
    argv: Sequence[str], folders: Folders, processes: int, steps: int = 0
) -> Iterator[Finding]:
    """Yield the job's plan, then findings that cost time; an error is the last one. Time and memory
    are measured by training some `steps`; with 0, memory is estimated."""
    started = time.monotonic()
    quieten()
    new: list[Finding] = []
    table = Table(new.append)
    try:
        hyperparameters = arguments.parse(argv, folders)
        # Without RANK and WORLD_SIZE: the job's processes are not there.
        named = ("SM_NUM_GPUS", "SM_HOSTS", "CUDA_VISIBLE_DEVICES", "SM_FRAMEWORK_PARAMS", "CXX",
                 "OMP_NUM_THREADS")  # fmt: skip
        environ = {name: os.environ[name] for name in named if name in os.environ}
        plan = resolution.resolve(hyperparameters, folders, environ, table, processes)
        yield from (*new, *plan.task.findings())
        new.clear()
        loaded = resolution.load(plan, table)
        yield from new
        new.clear()
        yield from _measures(plan, loaded, steps, started)
    except RecipeError as error:
        yield from new
        what = type(error).__name__.removesuffix("Error").lower()
        yield Finding(level=ERROR, what=what, detail=str(error))


def _measures(plan: Plan, loaded: Loaded, tried: int, started: float) -> Iterator[Finding]:
    """Yield findings from a sample of the data: lengths, steps, disk and memory."""
    task, longest, args = plan.task, loaded.max_length, plan.arguments
    rows, drawn = len(task.train), data_report.sampled_rows(task)
    lengths = task.lengths(loaded.tokenizer, drawn)
    yield from data_report.inspect(task, lengths, longest)[0]
    if not plan.hyperparameters.trains:
        return
    count = len(drawn) if task.lengths_are_of_samples else len(lengths or [1])
    pieces = sum(task.pieces(length, longest) for length in lengths) / count or 1
    size = args.per_device_train_batch_size
    at_once = size * plan.device.processes * args.gradient_accumulation_steps
    per_epoch = math.ceil(round(rows * pieces) / at_once)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(per_epoch * args.num_train_epochs)
    detail = f"{per_epoch} an epoch, {steps} in all, {at_once} samples a step"
    yield Finding(level=OK, what="steps", detail=detail)
    cut = [min(length, longest * max(1, task.pieces(length, longest))) for length in lengths]
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    needed, free = 4 * sum(cut) / count * rows + 8 * rows, atomic.free_bytes(folder)
    if needed > free:
        level = ERROR if needed > _DOUBT * free else WARNING
        detail = (
            f"the tokens of {rows} rows take about {needed / 1e9:.2f} GB in {folder}, and "
            f"{free / 1e9:.2f} GB are free: use a larger volume"
        )
        yield Finding(level=level, what="disk", detail=detail)
    # Enough rows for a few batches, so that packing fills them as with all the data.
    wanted = max(len(drawn) if lengths else 0, 4 * size, tried * at_once)
    every = range(len(task.data.train))
    drawn = random.Random(plan.hyperparameters.seed).sample(every, min(wanted, len(every)))
    chosen, table = sorted(drawn), Table()
    if tried:
        finding = _trial(plan, loaded, chosen, table, tried, started, per_epoch, steps)
    else:
        finding = _memory(plan, loaded, chosen, table)
    # Steps are those of the sample.
    yield from (decision for decision in table.rows if decision.what != "steps")
    yield finding


def _trial(
    plan: Plan,
    loaded: Loaded,
    rows: Sequence[int],
    table: Table,
    tried: int,
    started: float,
    steps_of_epoch: int,
    steps: int,
) -> Finding:
    """Train some steps, and forecast the job. Only a temporary folder is written to."""
    task, given = plan.task, plan.hyperparameters
    if given.load_in_4bit:
        detail = "not measured for a model in 4 bits; a job with max_train_steps=20 measures it"
        return Finding(level=WARNING, what="trial", detail=detail)
    whole = {name: len(split) for name, split in named_splits(task.data).items()}
    began = time.monotonic()
    samples = task.some_samples(loaded.tokenizer, loaded.max_length, rows)
    setup = began - started + (time.monotonic() - began) * whole["train"] / max(1, len(rows))
    on_gpu = plan.arguments.device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="amphora-") as folder:
        args = trainer_arguments.changed(
            plan.arguments,
            output_dir=folder,
            save_strategy=SaveStrategy.NO,
            eval_strategy=IntervalStrategy.NO,
            load_best_model_at_end=False,
            report_to=[],
            disable_tqdm=True,
            max_steps=tried,
        )
        trial = dataclasses.replace(loaded, arguments=args)
        trainer = engine.build(trial, samples, class_weight=given.class_weight, table=table)
        trainer.remove_callback(PrinterCallback)
        forecast = forecasting.forecast_job(
            plan,
            loaded.model,
            rows=whole,
            steps_of_epoch=steps_of_epoch,
            started=time.monotonic(),
            bytes_per_second=lambda: trainer.bytes_per_second,
        )
        trainer.add_callback(forecast)
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            detail = (
                "the GPU's memory is too small for a step. Set a smaller "
                "per_device_train_batch_size (with gradient_accumulation_steps), "
                "gradient_checkpointing=True or a smaller max_length"
            )
            return Finding(level=ERROR, what="trial", detail=detail)
    state: Any = TrainerState()
    state.compute_steps(plan.arguments, steps)
    seconds = setup + forecast.seconds_left(plan.arguments, state, steps)
    peak = (
        torch.cuda.max_memory_allocated()
        if on_gpu
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    what = "of the GPU" if on_gpu else "of the process"
    processes = plan.device.processes
    alone = f" (of one process; {processes} also exchange gradients)" * (processes > 1)
    detail = (
        f"{tried} steps trained{alone}; {forecast.describe(seconds)}; memory {what}: "
        f"{memory.size(peak)} at most"
    )
    return Finding(level=OK, what="trial", detail=detail)


def _memory(plan: Plan, loaded: Loaded, rows: Sequence[int], table: Table) -> Finding:
    """Estimate the peak memory of training, and compare it with what the device has free."""
    task, model, tokenizer, args = plan.task, loaded.model, loaded.tokenizer, plan.arguments
    try:
        samples = task.some_samples(tokenizer, loaded.max_length, rows)
        stops = task.stop_tokens(tokenizer, samples, loaded.max_length)
        resolution.add_stop_tokens(stops, loaded, table)
        cut = batch_layout.requested_cut(args)
        decided = batch_layout.decide(loaded, cut, samples, table)
        training, layout = decided.training, decided.train_layout
        drawn = training.typical(layout.balanced)
        fullest = max(drawn, key=lambda rows: layout.computed_tokens(training.samples, rows))
        batch = batches.finish(training.samples, layout, fullest, training.size, 1)
        setting = memory_estimate.Setting(
            on_gpu=args.device.type == "cuda",
            dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            optimizer=trainer_arguments.name_of(args.optim),
            processes=plan.device.processes,
            is_sharded=plan.is_sharded,
            accumulation=training.accumulation,
            checkpoints=_recomputes(args),
            smoothing=args.label_smoothing_factor,
            in_4_bits=quantized.layers(model) if plan.hyperparameters.load_in_4bit else (),
            bytes_of_4_bits=quantized.BYTES,
        )
        with contextlib.ExitStack() as stack:
            if setting.on_gpu:
                stack.enter_context(flat_attention.force_flash_attention())
                stack.enter_context(packed_decoders.parts_as_on(args.device))
            estimate = memory_estimate.estimate_step(model, batch, task.objective.losses, setting)
        if setting.on_gpu:
            step = estimate.step + memory_estimate.LIBRARIES
            estimate = dataclasses.replace(estimate, step=step)
    except Exception as error:
        # Data-dependent shapes or operators without a meta kernel: the job itself may be fine.
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Finding(
            level=OK, what="memory", detail=f"cannot be estimated for this model ({why})"
        )
    if args.device.type == "cuda":
        # This process's CUDA context is not free either; each training process needs one.
        there, whole = torch.cuda.mem_get_info(args.device)
        name = f"the GPU has {memory.size(there)} free of {memory.size(whole)}"
    else:
        there = (memory.available() or 0) // plan.device.processes
        name = f"this host or its container, shared by its processes, has {memory.size(there)}"
    parts = {
        "weights": estimate.weights,
        "the optimizer's state": estimate.optimizer,
        f"gradients and a batch of {training.size}": estimate.gradients + estimate.step,
    }
    shown = ", ".join(f"{what} {memory.size(count)}" for what, count in parts.items())
    detail = f"about {memory.size(estimate.total)} for each process ({shown}); {name}"
    if estimate.total <= there:
        return Finding(level=OK, what="memory", detail=detail)
    remedies = "; or ".join(_remedies(estimate, there, plan))
    return Finding(level=WARNING, what="memory", detail=f"{detail}. Set {remedies}")


def _recomputes(args: TrainingArguments) -> bool:
    """Return whether activations are recomputed; transformers 4 and 5 name it differently."""
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def _remedies(estimate: memory_estimate.Estimate, there: int, plan: Plan) -> Iterator[str]:
    size, accumulation = (
        plan.arguments.per_device_train_batch_size, plan.arguments.gradient_accumulation_steps
    )  # fmt: skip
    left = there - (estimate.total - estimate.step)
    smaller = size * left // max(1, estimate.step)
    if 1 <= smaller < size:
        more = -(-size * accumulation // smaller)
        yield (
            f"per_device_train_batch_size={smaller} (with gradient_accumulation_steps={more}, a "
            "step has as many texts)"
        )
    if not _recomputes(plan.arguments) and left > 0:
        yield "gradient_checkpointing=True"
    if plan.hyperparameters.lora_r is None and estimate.total - estimate.step > there // 2:
        yield "lora_r=16"
    if plan.device.processes > 1 and not plan.is_sharded:
        yield "fsdp=full_shard"
    yield "a smaller max_length"
