"""Check a job without training: data, model, lengths, steps, memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from recipe import arguments
from recipe.compat import quieten
from recipe.console import Progress
from recipe.errors import RecipeError
from recipe.models import lora
from recipe.paths import Folders
from recipe.plan import data_report, resolution, trainer_arguments
from recipe.plan.batch_layout import TrainableModel
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.runtime import memory
from recipe.runtime.stopwatch import Stopwatch
from recipe.storage import atomic
from recipe.tasks.base import ERROR, OK, WARNING, Finding, named_splits
from recipe.training import engine, step_memory
from recipe.training.forecast import forecast_job
from recipe.training.preparation import PreparedTraining, prepare
from recipe.training.step_memory import StepMemory

_DOUBT = 1.5
"""The factor by which the estimate from a sample of rows may be too high."""


@dataclass(frozen=True, kw_only=True)
class JobNeeds:
    """What one process of a training needs, and how much there is to compute."""

    memory: Mapping[str, StepMemory]
    """The peak of a step by `cuda` or `cpu`, and `bfloat16` or `float32`: `cuda bfloat16`."""
    host: int
    """Bytes of main memory that this check had used, with the model's weights in float32."""
    weights: int
    """Bytes of the model's weights."""
    bf16: bool | None
    """The hyperparameter; None lets the device decide."""
    needs_gpu: bool
    """Whether only a GPU can train it (load_in_4bit)."""
    use_cpu: bool
    is_sharded: bool
    """Whether the processes share weights, gradients and optimizer (FSDP)."""
    processes: int
    """Processes of the plan."""
    steps: int
    """Optimizer steps of the plan."""
    samples: int
    """Samples of a step of the plan, over all its processes."""
    has_max_steps: bool
    """Whether the steps are given, so that more processes train more samples."""
    tokens: float | None
    """Mean tokens of a sample; None for samples that are not texts."""
    matrix_weights: int
    """Weights without embeddings."""
    trained_matrix_weights: int
    generates: bool
    """Whether the served model generates text, whose cost depends on its length."""


def inspect(
    argv: Sequence[str],
    folders: Folders,
    processes: int,
    steps: int = 0,
    report: Callable[[Finding], None] = lambda finding: None,
    report_needs: Callable[[JobNeeds], None] | None = None,
) -> list[Finding]:
    """Return the job's plan, then findings that cost time; an error is the last one.

    Args:
        processes: The processes of the job.
        steps: Train so many steps to measure time and memory; with 0, memory is predicted.
        report: Called with each finding at once.
        report_needs: Called with what the job needs of an instance, if it trains and `steps` is 0.
    """
    started = time.monotonic()
    quieten()
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        report(finding)

    try:
        hyperparameters = arguments.parse(argv, folders)
        # Without RANK and WORLD_SIZE: the job's processes are not there.
        named = ("SM_NUM_GPUS", "SM_HOSTS", "CUDA_VISIBLE_DEVICES",
                 "OMP_NUM_THREADS")  # fmt: skip
        environ = {name: os.environ[name] for name in named if name in os.environ}
        with Progress("reading the data"):
            plan = resolution.resolve(hyperparameters, folders, environ, Table(add), processes)
        for finding in plan.task.findings():
            add(finding)
        measured = _measure(plan, steps, started, add)
        if report_needs is not None and measured is not None:
            report_needs(_find_needs(plan, measured[0], hyperparameters.bf16, *measured[1:]))
    except RecipeError as error:
        what = type(error).__name__.removesuffix("Error").lower()
        add(Finding(level=ERROR, what=what, detail=str(error)))
    return findings


def _measure(
    plan: Plan, tried: int, started: float, add: Callable[[Finding], None]
) -> tuple[PreparedTraining, int, int] | None:
    """Add findings from a sample of the data: lengths, steps, disk and memory. Return the training,
    its steps and the samples of a step, if it is to be trained but was not tried."""
    task, given, args = plan.task, plan.hyperparameters, plan.arguments
    size = args.per_device_train_batch_size
    step_samples = size * plan.device.processes * args.gradient_accumulation_steps
    rows: list[int] = []
    steps = [0, 0]
    """Of an epoch, and in all."""

    def choose_rows(loaded: TrainableModel, lengths: Sequence[int]) -> Sequence[int]:
        if given.trains:
            steps[:] = _count_steps(plan, loaded.max_length, lengths, step_samples, add)
        # Enough rows for a few batches, so that packing fills them as with all the data.
        measured = len(data_report.sampled_rows(task)) if lengths else 0
        every = range(len(task.data.train))
        wanted = min(max(measured, 4 * size, tried * step_samples), len(every))
        rows.extend(sorted(random.Random(given.seed).sample(every, wanted)))
        return rows

    def add_decision(decision: Finding) -> None:
        if decision.what != "steps":  # those of the sample
            add(decision)

    with tempfile.TemporaryDirectory(prefix="amphora-") as folder:
        tries = tried > 0 and given.trains and not given.load_in_4bit
        watch = Stopwatch()
        tried_plan = _trial_plan(plan, folder, tried) if tries else plan
        prepared = prepare(tried_plan, Table(add_decision), watch, choose_rows=choose_rows)
        share = len(task.train) / max(1, len(rows))
        setup = time.monotonic() - started + watch.seconds["tokens"] * (share - 1)
        if tries:
            add(_try(plan, prepared, setup, *steps))
        elif given.trains and tried:
            detail = "not measured for a model in 4 bits; a job with max_train_steps=20 measures it"
            add(Finding(level=WARNING, what="trial", detail=detail))
        elif given.trains:
            add(_estimate_memory(plan, prepared))
            return prepared, steps[1], step_samples
    return None


def _trial_plan(plan: Plan, folder: str, steps: int) -> Plan:
    """Return the plan of a training of some steps, which writes only to `folder`."""
    arguments = trainer_arguments.changed(
        plan.arguments,
        output_dir=folder,
        save_strategy=SaveStrategy.NO,
        eval_strategy=IntervalStrategy.NO,
        load_best_model_at_end=False,
        report_to=[],
        disable_tqdm=True,
        max_steps=steps,
    )
    return dataclasses.replace(plan, arguments=arguments)


def _count_steps(
    plan: Plan,
    longest: int,
    lengths: Sequence[int],
    step_samples: int,
    add: Callable[[Finding], None],
) -> tuple[int, int]:
    """Return the optimizer steps of an epoch and of the job, and add findings on them and on the
    disk's room for the tokens. `lengths` are those of some rows."""
    task, args, rows = plan.task, plan.arguments, len(plan.task.train)
    drawn = data_report.sampled_rows(task)
    count = len(drawn) if task.lengths_are_of_samples else len(lengths or [1])
    pieces = sum(task.pieces(length, longest) for length in lengths) / count or 1
    per_epoch = math.ceil(round(rows * pieces) / step_samples)
    detail = trainer_arguments.describe_steps(args, per_epoch, step_samples)
    add(Finding(level=OK, what="steps", detail=detail))
    cut = [min(length, longest * max(1, task.pieces(length, longest))) for length in lengths]
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    needed, free = 4 * sum(cut) / count * rows + 8 * rows, atomic.free_bytes(folder)
    if needed > free:
        level = ERROR if needed > _DOUBT * free else WARNING
        detail = (
            f"the tokens of {rows} rows take about {memory.size(needed)} in {folder}, and "
            f"{memory.size(free)} are free: use a larger volume"
        )
        add(Finding(level=level, what="disk", detail=detail))
    return per_epoch, trainer_arguments.count_steps(args, per_epoch)


def _try(
    plan: Plan, prepared: PreparedTraining, setup: float, steps_of_epoch: int, steps: int
) -> Finding:
    """Train the prepared steps, and forecast the job. `setup` are its seconds before them."""
    on_gpu = plan.arguments.device.type == "cuda"
    whole = {name: len(split) for name, split in named_splits(plan.task.data).items()}
    forecast = forecast_job(plan, prepared, time.monotonic(), whole, steps_of_epoch)
    weights = plan.hyperparameters.class_weight
    trainer = engine.build(prepared, weights, forecast=forecast)
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
    tried = trainer.state.max_steps
    detail = (
        f"{tried} steps trained{alone}; {forecast.describe(seconds)}; memory {what}: "
        f"{memory.size(peak)} at most"
    )
    return Finding(level=OK, what="trial", detail=detail)


def _estimate_memory(plan: Plan, prepared: PreparedTraining) -> Finding:
    """Compare the peak of a process with what the device has free, and add that of a GPU."""
    given, processes = plan.hyperparameters, plan.device.processes
    device = prepared.loaded.arguments.device
    kind, bf16 = device.type, plan.device.bf16
    # A check loads whole weights, which the job keeps in 4 bits.
    predict = functools.partial(
        step_memory.predict, prepared,
        in_4_bits=given.load_in_4bit, shards=processes if plan.is_sharded else 1,
    )  # fmt: skip
    needed = predict(kind, bf16)
    if kind == "cuda":
        there, whole = torch.cuda.mem_get_info(device)
        name = f"the GPU has {memory.size(there)} free of {memory.size(whole)}"
    else:
        there = (memory.available() or 0) // processes
        name = f"this host or its container, shared by its processes, has {memory.size(there)}"
        on_gpu = predict("cuda", True)
        name += f". A GPU with bfloat16 needs {memory.size(on_gpu.total)} ({on_gpu.describe()})"
    detail = f"{memory.size(needed.total)} for each process ({needed.describe()}); {name}"
    if needed.total <= there:
        measured = "" if given.load_in_4bit else ". --steps 4 measures it"
        return Finding(level=OK, what="memory", detail=f"{detail}{measured}")
    remedies = ["an instance with more memory"]
    if processes > 1 and not plan.is_sharded:
        remedies.insert(0, "fsdp=full_shard")
    if given.lora_r is None:
        remedies.insert(0, "lora_r=16")
    if (recomputed := predict(kind, bf16, checkpoints=True)).total < needed.total:
        remedies.insert(0, f"gradient_checkpointing=True ({memory.size(recomputed.total)})")
    return Finding(level=WARNING, what="memory", detail=f"{detail}. Give {' or '.join(remedies)}")


def _find_needs(
    plan: Plan, prepared: PreparedTraining, bf16: bool | None, steps: int, samples: int
) -> JobNeeds:
    """Find the needs of a prepared training.

    Args:
        bf16: The hyperparameter.
        steps: Optimizer steps of the job.
        samples: Samples of a step, over all processes.
    """
    given, loaded = plan.hyperparameters, prepared.loaded
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before the predictions
    in_4_bits = given.load_in_4bit
    memory = {
        f"{kind} {'bfloat16' if half else 'float32'}": step_memory.predict(
            prepared, kind, half, in_4_bits=in_4_bits
        )
        for kind in ("cuda", *(() if in_4_bits else ("cpu",)))
        for half in (True, False)
    }
    bare: Any = lora.bare(loaded.model)
    lengths = prepared.samples["train"].lengths
    return JobNeeds(
        memory=memory,
        host=host,
        weights=sum(weight.nbytes for weight in loaded.model.parameters()),
        bf16=bf16,
        needs_gpu=in_4_bits,
        use_cpu=bool(given.passed.get("use_cpu", False)),
        is_sharded=plan.is_sharded,
        processes=plan.device.processes,
        steps=steps,
        samples=samples,
        has_max_steps=plan.arguments.max_steps > 0,
        tokens=float(lengths.mean()) if loaded.max_length and len(lengths) else None,
        matrix_weights=bare.num_parameters(exclude_embeddings=True),
        trained_matrix_weights=bare.num_parameters(only_trainable=True, exclude_embeddings=True),
        generates=bool(bare.can_generate()),
    )
