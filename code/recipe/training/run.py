"""Run one training: read data and model, write a servable model and its metrics."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import datasets
import torch
import transformers
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)

from recipe import task_table
from recipe.batching.samples import Samples
from recipe.compat import parts, quieten
from recipe.console import has_terminal, is_first_process, say
from recipe.data import shards
from recipe.errors import DistributedError, HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.metrics import result_lines
from recipe.models import cpu_kernels, loading, quantized
from recipe.paths import Places
from recipe.reports import answers, model_card, report
from recipe.runtime import device, distribution, memory, turns, xla
from recipe.runtime.device import Device
from recipe.runtime.distribution import Distribution
from recipe.runtime.timer import Stopwatch
from recipe.storage import atomic, checksums, hub
from recipe.tasks import detection
from recipe.tasks.base import Objective, Task
from recipe.training import engine, host_samples, tracking
from recipe.training.engine import Engine
from recipe.training.progress import Bar, MetricLines, ProgressLines

_REMEDY = (
    "Free space there or raise the volume size, then start the job again. It resumes from its last "
    "checkpoint; if training had ended, it only writes the results."
)


def run(
    hyperparameters: Hyperparameters, places: Places, environ: Mapping[str, str]
) -> dict[str, float]:
    """Train on a job's channels; write the model, its card and metrics.json.

    Returns:
        The metrics, as in metrics.json.

    Raises:
        RecipeError: The user can fix the job; the model folder is unchanged.
    """
    watch = Stopwatch()
    parts.check()
    for line in hyperparameters.notes:
        say(line)
    if is_first_process():  # fail now, not after hours of training
        remedy = "Mount it writable, or set {} to another folder."
        for what, folder, variable in (
            ("The model's folder", places.model_dir, "SM_MODEL_DIR"),
            ("The output's folder", places.output_data_dir, "SM_OUTPUT_DATA_DIR"),
        ):
            atomic.check_writable(what, folder, remedy.format(variable))
    pushing = hub.prepare(hyperparameters, environ) if is_first_process() else None
    hyperparameters, why = detection.find(hyperparameters, places.channels)
    say(f"task: {why}")
    chosen, arguments = _set_up(hyperparameters, places, environ)
    job = _make(hyperparameters, places, arguments, watch, environ)
    with tracking.run(cast("list[str]", arguments.report_to), hyperparameters):
        metrics = _train(job, hyperparameters)
    watch.lap("training")
    weights = distribution.whole_weights(job.trainer)
    if is_first_process():
        facts = model_card.Facts(
            base_model=job.source.name,
            base_is_local=job.source.is_local,
            hyperparameters=hyperparameters,
            about=job.task.about(),
            found=job.task.found,
            device=chosen.describe(),
            metrics=metrics,
        )
        _write(job, weights, facts, places)
        watch.lap("saving")
        hosts = len(json.loads(environ.get("SM_HOSTS") or "[]")) or 1
        show = functools.partial(job.task.sections, job.trainer, job.samples)
        output = places.output_data_dir
        # arguments.parse has refused do_predict for tasks that do not support it.
        if hyperparameters.predicts and (predictions := job.task.answers(job.trainer)) is not None:
            answers.write(predictions, output, _REMEDY)
        if hyperparameters.trains:
            report.of_run(job.trainer, facts, show, job.max_length, watch.seconds, hosts, output)
    if xla.in_use():
        say("torch-xla compiled {} graphs in {:.0f} s".format(*xla.compiled()))
    if chosen.kind == "cuda":
        say(f"device memory: {memory.size(torch.cuda.max_memory_allocated())} at most")
    device.leave_world()
    if pushing:
        pushing.push(places.model_dir)
    return metrics


@dataclass(frozen=True, kw_only=True)
class _Made:
    """The parts of a training run."""

    task: Task
    source: loading.Source
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    samples: Mapping[str, Samples]
    trainer: Engine


def _make(
    hyperparameters: Hyperparameters,
    places: Places,
    arguments: TrainingArguments,
    watch: Stopwatch,
    environ: Mapping[str, str],
) -> _Made:
    hosts = shards.of_job(environ)
    if hosts.sharded:
        hyperparameters = host_samples.same_task(hyperparameters, places.channels, hosts)
        arguments.learning_rate = hyperparameters.learning_rate or arguments.learning_rate
    kind = task_table.load(hyperparameters.task)
    if hosts.sharded and not kind.takes_shards:
        raise DistributedError(
            f"The channels {', '.join(sorted(hosts.sharded))} are sharded (ShardedByS3Key), and "
            f"task {hyperparameters.task} needs all rows on every host.",
            "Set their S3DataDistributionType to FullyReplicated.",
        )
    task = kind(places.channels, hyperparameters)
    for line in task.found:
        say(line)
    watch.lap("data")
    source = loading.find(hyperparameters.model_name_or_path, places.channels)
    # Under torch-xla, processes wait for each other in its own rendezvous.
    waits = arguments.main_process_first if xla.in_use() else turns.first_of_host
    with waits():
        model, tokenizer = task.load(source)
    loading.check_precision(model, arguments.bf16, arguments.fp16)
    max_length = task.longest(model, tokenizer)
    parameters = sum(weight.numel() for weight in model.parameters())
    is_split = max_length and task.pieces(max_length + 1, max_length) > 1
    how = "in pieces of at most" if is_split else "cut at"
    cut = f", texts {how} {max_length} tokens" if max_length else ""
    say(f"model: {source.name}, {parameters / 1e6:.1f} M parameters{cut}")
    watch.lap("model")
    with waits():
        samples = task.samples(tokenizer, max_length)
    if hosts.sharded:
        host_samples.check_same_model(model, hosts)
    samples = host_samples.of_all_hosts(samples, task.data.sharded, hosts, environ)
    watch.lap("tokens")
    trainer = _trainer(
        model, tokenizer, arguments, hyperparameters, samples, task.objective, environ
    )
    return _Made(
        task=task,
        source=source,
        tokenizer=tokenizer,
        max_length=max_length,
        samples=samples,
        trainer=trainer,
    )


def _set_up(
    hyperparameters: Hyperparameters, places: Places, environ: Mapping[str, str]
) -> tuple[Device, TrainingArguments]:
    if not has_terminal() or not is_first_process():
        datasets.disable_progress_bars()
    quieten()
    passed = hyperparameters.passed
    chosen = device.choose(
        environ,
        hyperparameters.bf16,
        use_cpu=passed.get("use_cpu", False),
        fp16=passed.get("fp16", False),
    )
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.kind == "cpu":
        cpu_kernels.keep_memory()
    device.join(chosen.kind, environ)  # before set_seed, which may start a device's runtime
    set_seed(hyperparameters.seed)  # before the model's new head is initialised
    tracking.set_places(places)
    shared = distribution.choose(hyperparameters, chosen, environ)
    quantized.check(hyperparameters, chosen, shared.arguments)
    arguments = training_arguments(hyperparameters, places, chosen, shared)
    device.settle_on_gpu(arguments.device, os.environ)
    device.check_world(arguments.device, chosen.processes)
    for line in (chosen.describe(), *shared.said):
        say(line)
    return chosen, arguments


def training_arguments(
    hyperparameters: Hyperparameters, places: Places, chosen: Device, shared: Distribution
) -> TrainingArguments:
    """Return the Trainer's arguments: the recipe's defaults, overridden by the user's values.

    Raises:
        HyperparameterError: The Trainer refuses a value or a combination of values.
    """
    on_cpu = chosen.kind == "cpu"
    # The Trainer creates its folder even if it saves nothing.
    unused = tempfile.gettempdir() if hyperparameters.passed.get("save_strategy") == "no" else None
    kind = device.kind_of(chosen.kind)
    steps = hyperparameters.warmup_steps
    is_share = steps < 1 and steps != 0
    # transformers 4 has another argument for a share of all steps.
    is_older = transformers.__version__.startswith("4.")
    warmup = "warmup_ratio" if is_share and is_older else "warmup_steps"
    # The Trainer recognises only losses as lower-is-better; None leaves it the decision.
    metric = str(hyperparameters.passed.get("metric_for_best_model"))
    is_greater_better = False if metric.endswith(("perplexity", "mse")) else None
    values: dict[str, Any] = {
        "output_dir": hyperparameters.output_dir or unused or str(places.checkpoints),
        "num_train_epochs": hyperparameters.num_train_epochs,
        "max_steps": hyperparameters.max_train_steps or -1,
        "per_device_train_batch_size": hyperparameters.per_device_train_batch_size,
        "per_device_eval_batch_size": hyperparameters.per_device_eval_batch_size,
        "learning_rate": hyperparameters.learning_rate
        or task_table.learning_rate(hyperparameters.task, hyperparameters.lora_r is not None),
        warmup: steps if is_share else int(steps),
        "weight_decay": hyperparameters.weight_decay,
        "seed": hyperparameters.seed,
        "save_total_limit": hyperparameters.save_total_limit,
        "bf16": chosen.bf16,
        "use_cpu": on_cpu,
        # Without use_cpu and the backend, processes on a CPU silently train separate models.
        "ddp_backend": "gloo" if on_cpu and chosen.processes > 1 else None,
        "optim": "adamw_torch_fused" if kind.has_fused_optimizer else "adamw_torch",
        "dataloader_pin_memory": kind.pins_memory,
        # Every parameter gets a gradient in every step.
        "ddp_find_unused_parameters": False,
        # The filter synchronizes with the device in each step, to replace NaN losses.
        "logging_nan_inf_filter": False,
        "eval_strategy": "epoch" if hyperparameters.evaluates else "no",
        "save_strategy": "steps" if "save_steps" in hyperparameters.passed else "epoch",
        # Early stopping counts evaluations.
        "restore_callback_states_from_checkpoint": True,
        "logging_steps": 0.05,
        "load_best_model_at_end": hyperparameters.early_stopping_patience is not None,
        "greater_is_better": is_greater_better,
        "disable_tqdm": not has_terminal(),
        **shared.arguments,
        **hyperparameters.passed,
        "report_to": tracking.names(hyperparameters.passed.get("report_to")),
    }
    try:
        return TrainingArguments(**values)
    except ValueError as error:
        raise HyperparameterError(f"The hyperparameters do not fit together: {error}") from error


def _trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    hyperparameters: Hyperparameters,
    ready: Mapping[str, Samples],
    objective: Objective,
    environ: Mapping[str, str],
) -> Engine:
    trainer = engine.build(model, tokenizer, arguments, hyperparameters, ready, objective)
    distribution.shard(trainer)
    if hyperparameters.early_stopping_patience is not None:
        patience, threshold = (
            hyperparameters.early_stopping_patience,
            hyperparameters.early_stopping_threshold,
        )
        trainer.add_callback(EarlyStoppingCallback(patience, threshold))
    trainer.add_callback(MetricLines())
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressLines() if arguments.disable_tqdm else Bar())
    return trainer


def _train(job: _Made, hyperparameters: Hyperparameters) -> dict[str, float]:
    """Train and evaluate, with all processes, and return the metrics, equal on all of them."""
    trainer, test = job.trainer, job.samples.get("test")
    metrics = trainer.run() if hyperparameters.trains else {}
    done: dict[str, float] = {}
    if hyperparameters.trains and not trainer.args.load_best_model_at_end:
        # Reuse the evaluation of the final weights, if the last epoch ended with one.
        at_end = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        if at_end and at_end[-1]["step"] == trainer.state.global_step:
            done = {key: value for key, value in at_end[-1].items() if key.startswith("eval_")}
    if hyperparameters.predicts and test is None:
        metrics |= trainer.evaluate()  # its answers become predictions.jsonl
    elif hyperparameters.evaluates:
        metrics |= done or trainer.evaluate()
    if hyperparameters.evaluates:
        metrics |= job.task.tune(trainer)
    if test is not None and (hyperparameters.evaluates or hyperparameters.predicts):
        metrics |= trainer.evaluate(test, metric_key_prefix="test")
    metrics.pop("total_flos", None)
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}


def _write(
    job: _Made, weights: dict[str, Any] | None, facts: model_card.Facts, places: Places
) -> None:
    """Write the model, if it was trained, and metrics.json, and log the metrics."""
    if facts.hyperparameters.trains:
        trained: Any = job.trainer.model
        needed = sum(weight.nbytes for weight in trained.parameters())
        with atomic.results("The model", places.model_dir, needed, _REMEDY) as folder:
            model = job.trainer.accelerator.unwrap_model(trained)
            if xla.in_use():
                model = xla.on_host(model)
            job.task.save(model, weights, job.tokenizer, folder)
            checksums.write(folder)
            (folder / "README.md").write_text(model_card.write(facts), encoding="utf-8")
        say(f"model written to {places.model_dir}")
    metrics = json.dumps(dict(facts.metrics), indent=2) + "\n"
    output = places.output_data_dir
    with atomic.results("metrics.json", output, len(metrics), _REMEDY) as folder:
        (folder / "metrics.json").write_text(metrics)
    say(f"metrics written to {output}/metrics.json:")
    for line in result_lines(facts.metrics):
        say(line)
