"""What can be said of a job before it trains: data, model, lengths, steps, memory."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from recipe import arguments, task_table
from recipe.compat import quieten
from recipe.errors import RecipeError
from recipe.hyperparameters import Hyperparameters
from recipe.models import loading
from recipe.paths import Places
from recipe.runtime import device, memory
from recipe.runtime.distribution import Distribution
from recipe.tasks import detection
from recipe.tasks.base import ERROR, OK, WARNING, Finding, Task
from recipe.training import run

_SAMPLE_ROWS = 2000
_TRUNCATED_SHARE = 0.05
# fp32 weights; and where they are trained, gradients and AdamW's two moments.
_BYTES_PER_PARAMETER = 4
_BYTES_PER_TRAINED_PARAMETER = 12
# What a transformer layer keeps of a token for the backward pass, in units of its hidden size at
# two bytes a number: inputs, queries, keys, values, context, output, both halves of the MLP.
_KEPT_PER_TOKEN = 34


def inspect(argv: Sequence[str], places: Places, processes: int) -> Iterator[Finding]:
    """Findings about the job that `argv` and `places` describe; the first error is the last one."""
    quieten()
    what = "hyperparameters"
    try:
        hyperparameters = arguments.parse(argv, places)
        passed = hyperparameters.passed
        # Of one process: several would have to form a group, which the values do not depend on.
        chosen = device.choose(
            {}, hyperparameters.bf16, passed.get("use_cpu", False), passed.get("fp16", False)
        )
        # Raises where the Trainer would refuse them together.
        run.training_arguments(hyperparameters, places, chosen, Distribution())
        yield Finding(level=OK, what=what, detail="every name and value is known")
        for line in hyperparameters.notes:
            yield Finding(level=OK, what=what, detail=line)
        what = "task"
        hyperparameters, why = detection.find(hyperparameters, places.channels)
        yield Finding(level=OK, what=what, detail=why)
        what = "data"
        task: Task = task_table.load(hyperparameters.task)(places.channels, hyperparameters)
        for line in task.found:
            yield Finding(level=OK, what=what, detail=line)
        yield from task.findings()
        what = "model"
        source = loading.find(hyperparameters.model_name_or_path, places.channels)
        where = "from a folder" if source.is_local else "needs the network: the Hugging Face hub"
        model, tokenizer = task.load(source)
        size = model.num_parameters()
        detail = f"{source.name} can be loaded ({where}), {size / 1e6:.1f} M parameters"
        yield Finding(level=OK, what=what, detail=detail)
        what = "lengths"
        longest = task.longest(model, tokenizer)
        rows = len(task.train)
        drawn = random.Random(hyperparameters.seed).sample(range(rows), min(_SAMPLE_ROWS, rows))
        lengths = sorted(task.lengths(tokenizer, sorted(drawn)))
        texts_of_row = len(lengths) / max(1, len(drawn))
        if lengths:
            yield from _length_findings(lengths, longest, hyperparameters)
    except RecipeError as error:
        yield Finding(level=ERROR, what=what, detail=str(error))
        return
    pieces = sum(task.pieces(length, longest) for length in lengths) / len(lengths or [1]) or 1
    yield _steps(round(len(task.train) * pieces), hyperparameters, processes)
    if lengths:
        at_once = hyperparameters.per_device_train_batch_size * texts_of_row
        yield _memory(model, lengths, longest, at_once, processes)


def _length_findings(
    lengths: list[int], longest: int, hyperparameters: Hyperparameters
) -> Iterator[Finding]:
    """Of `lengths`, the tokens of each of a sample of the training texts, uncut, sorted."""
    at = {
        share: lengths[min(len(lengths) - 1, int(share * len(lengths)))]
        for share in (0.5, 0.9, 0.99)
    }
    detail = f"half {at[0.5]}, 90 % {at[0.9]}, 99 % {at[0.99]}, longest {lengths[-1]} tokens"
    yield Finding(level=OK, what="lengths", detail=f"{detail} (of {len(lengths)} texts)")
    cut = sum(length > longest for length in lengths) / len(lengths)
    yield Finding(
        level=WARNING if cut > _TRUNCATED_SHARE else OK,
        what="truncation",
        detail=f"{cut:.1%} of the texts are longer than {longest} tokens"
        + (" (raise max_length)" if cut > _TRUNCATED_SHARE else ""),
    )
    kept = [min(length, longest) for length in lengths]
    size = hyperparameters.per_device_train_batch_size
    to_longest = 1 - sum(kept) / (len(kept) * longest)
    shuffled = random.Random(hyperparameters.seed).sample(kept, len(kept))
    batches = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
    to_batch = 1 - sum(kept) / sum(len(batch) * max(batch) for batch in batches)
    detail = (
        f"{to_longest:.0%} if every text were padded to {longest} tokens, {to_batch:.0%} in batches"
    )
    detail += f" of {size} padded to their longest"
    yield Finding(level=OK, what="padding", detail=detail)


def _steps(rows: int, hyperparameters: Hyperparameters, processes: int) -> Finding:
    accumulation = int(hyperparameters.passed.get("gradient_accumulation_steps", 1))
    at_once = hyperparameters.per_device_train_batch_size * processes * accumulation
    per_epoch = math.ceil(rows / at_once)
    total = hyperparameters.max_train_steps
    if total in (None, -1):
        total = math.ceil(per_epoch * hyperparameters.num_train_epochs)
    detail = f"{per_epoch} an epoch, {total} in all ({at_once} texts a step, {processes} processes)"
    profiled = hyperparameters.profiled
    if profiled and profiled[-1] > total:
        detail += f"; profile_steps={hyperparameters.profile_steps} lies beyond them"
        return Finding(level=WARNING, what="steps", detail=detail)
    return Finding(level=OK, what="steps", detail=detail)


def _memory(
    model: PreTrainedModel,
    lengths: list[int],
    longest: int,
    at_once: float,
    processes: int,
) -> Finding:
    """An estimate of the training's peak, beside what the device has.

    Args:
        at_once: Texts in a batch; a row may have several.
    """
    config = model.config
    layers, hidden = config.num_hidden_layers, config.hidden_size
    heads = getattr(config, "num_attention_heads", 1)
    tokens = min(lengths[-1], longest)
    per_token = layers * (_KEPT_PER_TOKEN * hidden + 5 * heads * tokens)
    needed = model.num_parameters() * _BYTES_PER_PARAMETER + at_once * tokens * per_token
    needed += model.num_parameters(only_trainable=True) * _BYTES_PER_TRAINED_PARAMETER
    there, name = 0, "an unknown device"
    if torch.cuda.is_available():
        there, name = torch.cuda.get_device_properties(0).total_memory, "the GPU"
    elif (available := memory.available()) is not None:
        there = available // processes
        name = "this host or its container, shared by its processes,"
    detail = (
        f"about {needed / 1e9:.1f} GB for each process (an estimate, for a batch of the longest"
        f" texts); {name} has {there / 1e9:.1f} GB"
    )
    if needed <= there:
        return Finding(level=OK, what="memory", detail=detail)
    remedy = "; lower the batch size or max_length"
    return Finding(level=WARNING, what="memory", detail=detail + remedy)
