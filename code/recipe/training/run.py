"""Run one training: read data and model, write a servable model and its metrics."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import datasets
import torch
from transformers import EarlyStoppingCallback

from recipe.compat import parts, quieten
from recipe.console import Progress, is_first_process, say, say_row
from recipe.hyperparameters import Hyperparameters
from recipe.paths import Folders
from recipe.plan import resolution, trainer_arguments
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.reports import model_card, tracking
from recipe.runtime import compiled_layers, device, distribution, memory, xla
from recipe.runtime.stopwatch import Stopwatch
from recipe.training import engine, forecast, job_identity, preparation, results
from recipe.training.engine import Engine
from recipe.training.preparation import PreparedTraining
from recipe.training.progress import MetricLines, ProgressLines

_CHEAP = 0.05
"""Share of a training that the evaluation before it may take."""


def run(
    hyperparameters: Hyperparameters, folders: Folders, environ: Mapping[str, str]
) -> dict[str, float]:
    """Train on a job's channels; write the model, its card and metrics.json, and return the
    metrics. Raise RecipeError for what the user can fix; then the model folder is unchanged."""
    watch = Stopwatch()
    parts.check()
    is_first = is_first_process()
    pushing = results.open_outputs(hyperparameters, folders, environ) if is_first else None
    datasets.disable_progress_bars()
    quieten()
    tracking.set_default_folders(folders)

    table = Table(lambda row: say_row(row.what, f"{row.mark}{row.with_example()}"))
    names = {"job": "TRAINING_JOB_NAME", "instance": "SM_CURRENT_INSTANCE_TYPE"}
    start_facts = model_card.package_versions() | {k: environ.get(v, "") for k, v in names.items()}
    say_row("environment", ", ".join(f"{k} {v}" for k, v in start_facts.items() if v))

    with Progress("reading the data"):
        plan = resolution.resolve(hyperparameters, folders, environ, table)
    watch.lap("data")
    prepared = preparation.prepare(plan, table, watch)
    writer = results.JobResults(
        plan=plan,
        prepared=prepared,
        table=table,
        folders=folders,
        job_name=environ.get("TRAINING_JOB_NAME", ""),
    )
    trainer = _build_engine(plan, prepared, writer, watch)
    with Progress("training"), tracking.run(plan.arguments, plan.hyperparameters.as_text()):
        metrics = _train_and_evaluate(plan, prepared, trainer)
    watch.lap("training")
    weights = distribution.whole_weights(trainer)
    if is_first:
        with Progress("writing the results"):
            writer.write(trainer, weights, metrics, watch)

    if xla.is_used():
        say("torch-xla compiled {} graphs in {:.0f} s".format(*xla.compiled()))
    if prepared.batches.compiles_layers:
        say(f"torch.compile: {compiled_layers.describe()}")
    if plan.device.kind == "cuda":
        say(f"device memory: {memory.size(torch.cuda.max_memory_allocated())} at most")
    device.leave_world()
    if pushing:
        pushing.push(folders.model_dir)
    return metrics


def _build_engine(
    plan: Plan, prepared: PreparedTraining, writer: results.JobResults, watch: Stopwatch
) -> Engine:
    """Return the engine of a job, which resumes only from a checkpoint of the same job."""
    task, given, samples = plan.task, plan.hyperparameters, prepared.samples
    decisive = job_identity.decisive(given.values, plan.arguments)
    if job_identity.evaluation_decides(given.values, plan.arguments):
        decisive["evaluation data"] = samples["evaluation"].fingerprint()
    expected = forecast.forecast_job(plan, prepared, watch.started)
    callbacks: list[Any] = [MetricLines(), ProgressLines(expected)]
    if given.early_stopping_patience is not None:
        patience, threshold = given.early_stopping_patience, given.early_stopping_threshold
        callbacks.insert(0, EarlyStoppingCallback(patience, threshold))
    locate = functools.partial(task.data.where, "train")
    built: Engine = engine.build(
        prepared,
        given.class_weight,
        decisive=decisive,
        save_minutes=given.save_minutes,
        forecast=expected,
        callbacks=callbacks,
        leave_model=writer.write_partial,
        **({"locate": locate} if task.samples_are_rows else {}),
    )
    if "eval_on_start" not in given.passed and isinstance(built, Engine):
        built.args.eval_on_start = _is_cheap_to_evaluate_first(plan, prepared)
    return built


def _is_cheap_to_evaluate_first(plan: Plan, prepared: PreparedTraining) -> bool:
    """Return whether the untrained model is evaluated, with which the report compares the trained
    one: if that takes a small share of the training, and no text is generated for it."""
    given, training = plan.hyperparameters, prepared.batches.training
    if not given.evaluates or given.budget_seconds(plan.host_count) is not None:
        return False
    steps = trainer_arguments.count_steps(plan.arguments, training.steps())
    # A forward pass is a third of a step.
    share = len(prepared.samples["evaluation"]) / (3 * training.samples_per_step * steps)
    return share <= _CHEAP and not prepared.loaded.objective.generates


def _train_and_evaluate(
    plan: Plan, prepared: PreparedTraining, trainer: Engine
) -> dict[str, float]:
    """Train and evaluate, with all processes, and return the metrics, equal on all of them."""
    given, test = plan.hyperparameters, prepared.samples.get("test")
    if given.trains:
        prepared.loaded.objective.look_before(trainer)
    metrics = trainer.run() if given.trains else {}
    done: dict[str, float] = {}
    if given.trains and not trainer.args.load_best_model_at_end:
        # Reuse the evaluation of the final weights, if the last epoch ended with one.
        logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        if logged and logged[-1]["step"] == trainer.state.global_step:
            done = {key: value for key, value in logged[-1].items() if key.startswith("eval_")}
    if given.predicts and test is None:
        metrics |= trainer.evaluate()  # its answers become predictions.jsonl
    elif given.evaluates:
        metrics |= done or trainer.evaluate()
    if given.evaluates:
        metrics |= plan.task.tune(trainer)
    if test is not None and (given.evaluates or given.predicts):
        metrics |= trainer.evaluate(test, metric_key_prefix="test")
    metrics.pop("total_flos", None)
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
