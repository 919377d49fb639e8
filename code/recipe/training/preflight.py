"""Check a job without training: data, model, lengths, steps, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from recipe import arguments, task_table
from recipe.batching import batches
from recipe.batching.batches import Training
from recipe.compat import quieten
from recipe.errors import RecipeError
from recipe.hyperparameters import Hyperparameters
from recipe.models import flat_attention, loading, packed_decoders, quantized
from recipe.paths import Places
from recipe.runtime import device, distribution, memory, memory_estimate
from recipe.runtime.distribution import Distribution
from recipe.storage import atomic
from recipe.tasks import base, detection
from recipe.tasks.base import ERROR, OK, WARNING, Finding, Task
from recipe.training import run, worlds

_SAMPLE_ROWS = 2000
_TRUNCATED_SHARE = 0.05
_DOUBT = 1.5
"""Factor by which the estimate from a sample of rows may be too high."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The settings of a job that determine its memory."""

    hyperparameters: Hyperparameters
    args: TrainingArguments
    processes: int
    is_sharded: bool


def inspect(argv: Sequence[str], places: Places, processes: int) -> Iterator[Finding]:
    """Yield findings about the job; an error is the last one."""
    quieten()
    what = "hyperparameters"
    try:
        hyperparameters = arguments.parse(argv, places)
        passed = hyperparameters.passed
        # As one process: several would need a process group, and the result does not depend on it.
        named = ("SM_NUM_GPUS", "CUDA_VISIBLE_DEVICES")
        environ = {name: os.environ[name] for name in named if name in os.environ}
        precision = (hyperparameters.bf16, passed.get("use_cpu", False), passed.get("fp16", False))
        chosen = device.choose(environ, *precision)
        # Raises if the Trainer refuses the combination.
        args = run.training_arguments(hyperparameters, places, chosen, Distribution())
        several = dataclasses.replace(chosen, processes=processes)
        shared = distribution.choose(hyperparameters, several, os.environ).arguments
        quantized.check(hyperparameters, chosen, shared)
        yield Finding(level=OK, what=what, detail="every name and value is known")
        for line in hyperparameters.notes:
            yield Finding(level=OK, what=what, detail=line)
        what = "task"
        hyperparameters, why = detection.find(hyperparameters, places.channels)
        yield Finding(level=OK, what=what, detail=why)
        what = "data"
        # Memory is estimated from the unquantized model: 4 bits need a GPU.
        whole = dataclasses.replace(hyperparameters, load_in_4bit=False)
        kind = task_table.load(hyperparameters.task)
        task = kind(places.channels, whole)
        for line in task.found:
            yield Finding(level=OK, what=what, detail=line)
        yield from task.findings()
        what = "model"
        source = loading.find(hyperparameters.model_name_or_path, places.channels)
        where = "from a folder" if source.is_local else "needs the network: the Hugging Face hub"
        model, tokenizer = task.load(source)
        loading.check_precision(model, args.bf16, args.fp16)
        size = model.num_parameters()
        detail = f"{source.name} can be loaded ({where}), {size / 1e6:.1f} M parameters"
        yield Finding(level=OK, what=what, detail=detail)
        what = "lengths"
        longest = task.longest(model, tokenizer)
        rows = len(task.train)
        drawn = random.Random(hyperparameters.seed).sample(range(rows), min(_SAMPLE_ROWS, rows))
        lengths = sorted(task.lengths(tokenizer, sorted(drawn)))
        if lengths:
            is_split = task.pieces(longest + 1, longest) > 1
            yield from _length_findings(lengths, longest, is_split, hyperparameters)
    except RecipeError as error:
        yield Finding(level=ERROR, what=what, detail=str(error))
        return
    pieces = sum(task.pieces(length, longest) for length in lengths) / len(lengths or [1]) or 1
    yield _steps(round(rows * pieces), hyperparameters, processes)
    cut = [min(length, longest * max(1, task.pieces(length, longest))) for length in lengths]
    yield from _room(sum(cut) / len(cut or [1]) * rows, rows)
    job = _Job(
        hyperparameters=hyperparameters,
        args=args,
        processes=processes,
        is_sharded=processes > 1 and bool(passed.get("fsdp") or shared.get("fsdp")),
    )
    # Enough rows for a few batches, so that packing fills them as with all the data.
    wanted = max(len(drawn) if lengths else 0, 4 * args.per_device_train_batch_size)
    count = len(task.data.train)
    chosen_rows = random.Random(hyperparameters.seed).sample(range(count), min(wanted, count))
    yield _memory(task, model, tokenizer, longest, sorted(chosen_rows), job)


def _length_findings(
    lengths: list[int], longest: int, is_split: bool, hyperparameters: Hyperparameters
) -> Iterator[Finding]:
    """Yield percentiles, truncation and padding for the sorted, untruncated lengths of a sample."""
    at = {
        share: lengths[min(len(lengths) - 1, int(share * len(lengths)))]
        for share in (0.5, 0.9, 0.99)
    }
    detail = f"half {at[0.5]}, 90 % {at[0.9]}, 99 % {at[0.99]}, longest {lengths[-1]} tokens"
    yield Finding(level=OK, what="lengths", detail=f"{detail} (of {len(lengths)} texts)")
    cut = sum(length > longest for length in lengths) / len(lengths)
    is_lossy = cut > _TRUNCATED_SHARE and not is_split
    detail = f"{cut:.1%} of the texts are longer than {longest} tokens"
    detail += " and are split" if is_split else " (raise max_length)" if is_lossy else ""
    yield Finding(level=WARNING if is_lossy else OK, what="truncation", detail=detail)
    kept = [min(length, longest) for length in lengths]
    size = hyperparameters.per_device_train_batch_size
    to_longest = 1 - sum(kept) / (len(kept) * longest)
    shuffled = random.Random(hyperparameters.seed).sample(kept, len(kept))
    batches = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
    to_batch = 1 - sum(kept) / sum(len(batch) * max(batch) for batch in batches)
    detail = (
        f"{to_longest:.0%} if all texts were padded to {longest} tokens, {to_batch:.0%} in batches"
    )
    detail += f" of {size} padded to their longest text"
    yield Finding(level=OK, what="padding", detail=detail)


def _steps(rows: int, hyperparameters: Hyperparameters, processes: int) -> Finding:
    accumulation = int(hyperparameters.passed.get("gradient_accumulation_steps", 1))
    at_once = hyperparameters.per_device_train_batch_size * processes * accumulation
    per_epoch = math.ceil(rows / at_once)
    total = hyperparameters.max_train_steps
    if total in (None, -1):
        total = math.ceil(per_epoch * hyperparameters.num_train_epochs)
    of_processes = "1 process" if processes == 1 else f"{processes} processes"
    detail = f"{per_epoch} an epoch, {total} in all ({at_once} texts a step, {of_processes})"
    return Finding(level=OK, what="steps", detail=detail)


def _room(tokens: float, rows: int) -> Iterator[Finding]:
    """Yield a finding if the tokens may not fit on the disk."""
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    needed, free = 4 * tokens + 8 * rows, atomic.free_bytes(folder)
    if needed > free:
        level = ERROR if needed > _DOUBT * free else WARNING
        detail = (
            f"the tokens of {rows} rows take about {needed / 1e9:.2f} GB in {folder}, and "
            f"{free / 1e9:.2f} GB are free: use a larger volume"
        )
        yield Finding(level=level, what="disk", detail=detail)


def _memory(
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    rows: Sequence[int],
    job: _Job,
) -> Finding:
    """Estimate the peak memory of training, and compare it with what the device has free."""
    args, size = job.args, job.args.per_device_train_batch_size
    try:
        samples = task.some_samples(tokenizer, longest, rows)
        cut = worlds.of_arguments(args)
        training = Training(
            samples=samples["train"], size=size, accumulation=cut.accumulation, seed=args.seed
        )
        packing = job.hyperparameters.packing
        training, _ = worlds.by_length(
            training, cut, args, model, tokenizer, packing, task.objective
        )
        evaluations = {"evaluation": samples["evaluation"]}
        layout, _ = base.lay_out(
            model, tokenizer, args, job.hyperparameters, training, evaluations, task.objective
        )
        drawn = training.typical(layout.balanced)
        fullest = max(drawn, key=lambda rows: layout.places(training.samples, rows))
        batch = batches.finish(training.samples, layout, fullest, training.size, 1)
        setting = memory_estimate.Setting(
            on_gpu=args.device.type == "cuda",
            dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            optimizer=str(args.optim.value if hasattr(args.optim, "value") else args.optim),
            processes=job.processes,
            is_sharded=job.is_sharded,
            accumulation=training.accumulation,
            checkpoints=_recomputes(args),
            smoothing=args.label_smoothing_factor,
            in_4_bits=quantized.layers(model) if job.hyperparameters.load_in_4bit else (),
            bytes_of_4_bits=quantized.BYTES,
        )
        with contextlib.ExitStack() as stack:
            if setting.on_gpu:
                stack.enter_context(flat_attention.by_flash())
                stack.enter_context(packed_decoders.parts_as_on(args.device))
            estimate = memory_estimate.of_step(model, batch, task.objective.losses, setting)
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
        there = (memory.available() or 0) // job.processes
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
    remedies = "; or ".join(_remedies(estimate, there, job))
    return Finding(level=WARNING, what="memory", detail=f"{detail}. Set {remedies}")


def _recomputes(args: TrainingArguments) -> bool:
    """Return whether activations are recomputed; transformers 4 and 5 name it differently."""
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def _remedies(estimate: memory_estimate.Estimate, there: int, job: _Job) -> Iterator[str]:
    """Yield hyperparameters that reduce the memory."""
    size, accumulation = (
        job.args.per_device_train_batch_size, job.args.gradient_accumulation_steps
    )  # fmt: skip
    left = there - (estimate.total - estimate.step)
    smaller = size * left // max(1, estimate.step)
    if 1 <= smaller < size:
        more = -(-size * accumulation // smaller)
        yield (
            f"per_device_train_batch_size={smaller} (with gradient_accumulation_steps={more}, a "
            "step has as many texts)"
        )
    if not _recomputes(job.args) and left > 0:
        yield "gradient_checkpointing=True"
    if job.hyperparameters.lora_r is None and estimate.total - estimate.step > there // 2:
        yield "lora_r=16"
    if job.processes > 1 and not job.is_sharded:
        yield "fsdp=full_shard"
    yield "a smaller max_length"
