"""Decide how a job will run: task, data, device, precision, schedule, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from recipe import task_table
from recipe.backend.engines import int8
from recipe.data.layout import channels as layout
from recipe.data.layout import shards
from recipe.data.layout.shards import Hosts
from recipe.errors import DataError, DistributedError, HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.models import bf16_weights, lora, pretrained, quantized
from recipe.models.changes import adapters
from recipe.models.sources import tokenizers
from recipe.models.sources.origin import Origin
from recipe.paths import Folders
from recipe.plan import detection, trainer_arguments
from recipe.plan.batch_layout import TrainableModel
from recipe.plan.table import Table
from recipe.runtime import device, distribution
from recipe.runtime.device import Device
from recipe.runtime.distribution import Distribution
from recipe.spec import TRAINED_TASK
from recipe.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job runs. The `Table` given to `resolve` has the reasons."""

    hyperparameters: Hyperparameters
    """With the task and the learning rate."""
    device: Device
    arguments: TrainingArguments
    is_sharded: bool
    """Whether weights are sharded over the processes (FSDP)."""
    hosts: Hosts
    host: str
    """This host's name, for errors."""
    host_count: int
    """Hosts of the job, each of which has its price."""
    task: Task
    """With the data, whose columns and labels it has chosen."""
    source: Origin
    """The model to start from."""


def resolve(
    hyperparameters: Hyperparameters,
    folders: Folders,
    environ: Mapping[str, str],
    table: Table,
    processes: int | None = None,
) -> Plan:
    """Read the hyperparameters, the host and the data once, and decide how the job runs.

    All processes of a job call it together; it makes them a process group.

    Args:
        table: Receives each decision with its reason.
        processes: Plan for this number of processes from outside the job (doctor). None means this
            job.

    Raises:
        RecipeError: The job cannot run.
    """
    chosen, arguments, shared, is_sharded = _host(hyperparameters, folders, environ, processes)
    for line in hyperparameters.notes:
        table.add("hyperparameters", line)
    by_hand = hyperparameters.passed.get("use_cpu", False)
    table.add("device", chosen.describe(), "use_cpu=True" if by_hand else "found by torch")
    table.add("precision", chosen.precision, chosen.reason)
    for line in shared.notes:
        table.add("distribution", line)
    hosts = shards.job_hosts(environ)
    source = pretrained.find(
        hyperparameters.model_name_or_path, folders.channels, hyperparameters.hf_token
    )
    hyperparameters = adapters.settle(hyperparameters, source)
    task, reason = _same_task(hyperparameters, folders.channels, hosts)
    table.add("task", task, reason)
    rate, reason = learning_rate(hyperparameters, task)
    # Making the arguments formed the process group that agrees on the task.
    arguments = trainer_arguments.changed(arguments, learning_rate=rate)
    hyperparameters = dataclasses.replace(
        hyperparameters, task=task, learning_rate=rate, bf16=chosen.bf16
    )
    if hyperparameters.trains:
        table.add("learning rate", f"{rate:g}", reason)
        table.add("schedule", trainer_arguments.schedule(arguments))
        for name in ("max_minutes", "max_price"):
            if (limit := getattr(hyperparameters, name)) is not None:
                reason = "the steps that fit are known after the first ten"
                table.add("budget", f"{name}={limit:g}", reason)
        table.add("checkpoints", trainer_arguments.checkpoint_policy(arguments, hyperparameters))
    if hyperparameters.quantize:
        _check_quantize(hyperparameters, chosen, hosts)
    kind = task_table.load(task)
    _check_shards(kind, task, hosts)
    # Doctor estimates memory from the unquantized model: 4 bits need a GPU.
    in_4_bits = hyperparameters.load_in_4bit and processes is None
    made = kind(folders.channels, dataclasses.replace(hyperparameters, load_in_4bit=in_4_bits))
    for line in made.data.notes:
        # Without training data, a job that only evaluates reads its evaluation data in its place.
        if hyperparameters.trains or not line.startswith("train"):
            table.add("data", line)
    return Plan(
        hyperparameters=hyperparameters,
        device=chosen,
        arguments=arguments,
        is_sharded=is_sharded,
        hosts=hosts,
        host=environ.get("SM_CURRENT_HOST", "this host"),
        host_count=len(json.loads(environ.get("SM_HOSTS") or "[]")) or 1,
        task=made,
        source=dataclasses.replace(source, texts=made.some_texts()),
    )


def _check_shards(kind: type[Task], task: str, hosts: Hosts) -> None:
    """Check that a task can be trained on the sharded channels of a job, if there are any."""
    if hosts.sharded and not kind.takes_shards:
        raise DistributedError(
            f"The channels {', '.join(sorted(hosts.sharded))} are sharded (ShardedByS3Key), and "
            f"task {task} needs all rows on every host.",
            "Set their S3DataDistributionType to FullyReplicated.",
        )


def _host(
    hyperparameters: Hyperparameters,
    folders: Folders,
    environ: Mapping[str, str],
    processes: int | None,
) -> tuple[Device, TrainingArguments, Distribution, bool]:
    """Choose device, precision and distribution, and whether weights are sharded; in a job, form
    the process group."""
    chosen = device.choose(
        environ,
        hyperparameters.bf16,
        use_cpu=hyperparameters.passed.get("use_cpu", False),
        fp16=hyperparameters.passed.get("fp16", False),
    )
    is_job = processes is None
    world = chosen
    if processes not in (None, chosen.processes):
        # How many of them share this host's cores is not known here.
        world = dataclasses.replace(chosen, processes=processes, threads=None)
    if is_job:
        device.join(chosen.kind, environ)
    passed = hyperparameters.passed
    shared = distribution.choose(passed, hyperparameters.compile, world)
    is_sharded = bool({**passed, **shared.arguments}.get("fsdp"))
    if hyperparameters.load_in_4bit:
        is_compiled = hyperparameters.compile or bool(passed.get("torch_compile"))
        quantized.check(chosen, is_sharded, is_compiled)
    # Outside the job there is no process group, on which only these arguments depend.
    usable = shared if is_job else Distribution(arguments={"fsdp": False})
    arguments = trainer_arguments.make(hyperparameters, folders, chosen, usable)
    if is_job:
        device.settle_on_gpu(arguments.device, os.environ)
        device.check_world(arguments.device, chosen.processes)
    return world, arguments, shared, is_sharded


def _check_quantize(hyperparameters: Hyperparameters, chosen: Device, hosts: Hosts) -> None:
    """Check that a job can quantize its model after training."""
    why_not = int8.why_unavailable()
    if chosen.kind != "cpu":
        why_not = f"this job runs on {chosen.kind}, and int8 is measured on a CPU"
    elif chosen.processes > 1 or hosts.sharded:
        why_not = "this job has several processes, and one quantizes"
    elif not hyperparameters.evaluates:
        why_not = "nothing is evaluated, and its scores are compared on evaluation data"
    elif hyperparameters.lora_r is not None and (
        hyperparameters.lora_save == "adapter" or not hyperparameters.trains
    ):
        why_not = "an adapter is saved or given alone, and a whole model is quantized"
    if why_not:
        raise HyperparameterError(
            f"Hyperparameter quantize has value 'int8', but {why_not}.",
            "Leave it out, and quantize the finished model in the image for CPUs: "
            "amphora quantize --model FOLDER --data FOLDER",
        )


def load(plan: Plan, table: Table) -> TrainableModel:
    """Load the model of a job, and decide how long its samples are.

    Raises:
        RecipeError: The model cannot be loaded, or cannot be trained as planned.
    """
    task, given = plan.task, plan.hyperparameters
    model, tokenizer = task.load(plan.source)
    pretrained.check_vocabulary(plan.source, model, tokenizer)
    pretrained.check_precision(model, plan.arguments.bf16, plan.arguments.fp16)
    bare: Any = lora.bare(model)
    trained_task = {"task": given.task, "class": type(bare).__name__}
    setattr(bare.config, TRAINED_TASK, {**trained_task, "columns": task.request_columns()})
    max_length = task.longest(model, tokenizer)
    parameters = sum(weight.numel() for weight in model.parameters())
    where = "from a folder" if plan.source.is_local else "from the Hugging Face hub"
    table.add("model", f"{plan.source.location}, {parameters / 1e6:.1f} M parameters", where)
    if line := tokenizers.replacement_of(tokenizer):
        table.add("tokenizer", line)
    if given.quantize:
        int8.check_encoder(lora.bare(model), tokenizer, max_length)
    if max_length:
        is_split = task.pieces(max_length + 1, max_length) > 1
        how = "split into pieces of" if is_split else "truncated to"
        reason = "as given" if given.max_length else "the default; set max_length to change it"
        table.add("length", f"texts are {how} at most {max_length} tokens", reason)
    copies = given.bf16_weights and given.trains
    if copies:
        why_not = bf16_weights.why_not(model, task.objective.packable, plan.arguments)
        copies = why_not is None
        detail = "bfloat16 copies of the float32 weights" if copies else "float32, by autocast"
        table.add("weights", detail, why_not or "bf16_weights=True is set")
    packing = given.packing
    if packing is None and plan.arguments.neftune_noise_alpha:
        packing = False
        reason = "neftune_noise_alpha scales its noise by the length of a row"
        table.add("packing", "off: each row has one text", reason)
    return TrainableModel(
        model=model,
        tokenizer=tokenizer,
        arguments=plan.arguments,
        objective=task.objective,
        packing=packing,
        max_length=max_length,
        bf16_weights=copies,
        cuda_graphs=given.cuda_graphs,
    )


def add_stop_tokens(learned: set[int] | None, loaded: TrainableModel, table: Table) -> None:
    """Make generation stop at the tokens that end the learned texts, and at those of the model."""
    if learned is None:
        return
    stops = set[int]().union(*device.gather_objects(learned))
    model: Any = lora.bare(loaded.model)
    before = model.generation_config.eos_token_id
    before = before if isinstance(before, list) else [] if before is None else [before]
    every = [*before, *sorted(stops - {*before})]
    shown = ", ".join(loaded.tokenizer.convert_ids_to_tokens(every)) or "none"
    reason = "the model's, and what ends the learned texts" if stops else (
        "learned texts end without a special token, so generation continues to its maximum length"
    )  # fmt: skip
    table.add("stop tokens", shown, reason)
    if every:
        model.generation_config.eos_token_id = every if len(every) > 1 else every[0]


def learning_rate(hyperparameters: Hyperparameters, task: str) -> tuple[float, str]:
    """Return the learning rate and its reason."""
    if hyperparameters.learning_rate is not None:
        return hyperparameters.learning_rate, "as given"
    whole, adapters = task_table.TASKS[task].learning_rates
    if hyperparameters.lora_r is not None:
        return adapters, f"the default of {task} with LoRA"
    return whole, f"the default of {task} for all weights"


def _same_task(
    hyperparameters: Hyperparameters, channels: Mapping[str, Path], hosts: Hosts
) -> tuple[str, str]:
    """Return the task that the first host with training data detects, and the reason.

    Files of other hosts must have the same columns, as those of one host must.
    """
    if not hosts.sharded:
        return detection.find(hyperparameters, channels)
    files: Sequence[Path] = ()
    with contextlib.suppress(DataError):  # reading the data reports it
        data = layout.training_channels(channels, hyperparameters.trains)
        files = layout.find(data, hosts.sharded).files.get("train", ())
    with hosts.together():
        decision = detection.find(hyperparameters, channels) if files else None
    first = next(filter(None, hosts.gather(decision)), None)
    return first or detection.find(hyperparameters, channels)
