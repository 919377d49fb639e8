"""Run one training: read data and model, write a servable model and its metrics."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, set_seed

from recipe.backend.engines import int8
from recipe.batching.samples import Samples
from recipe.compat import parts, quieten
from recipe.console import is_first_process, say, say_row
from recipe.errors import ModelError, OutputError
from recipe.hyperparameters import Hyperparameters
from recipe.metrics import result_lines
from recipe.paths import Folders
from recipe.plan import data_report, resolution
from recipe.plan.batch_layout import Loaded
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.reports import last_answers, model_card, report, tracking, verdict
from recipe.reports.section import Section
from recipe.runtime import device, distribution, host_order, memory, xla
from recipe.storage import atomic, hub
from recipe.tasks.base import OK, WARNING, Finding, judged_split
from recipe.training import engine, host_samples, job_identity, proving, quantization
from recipe.training import forecast as forecasting
from recipe.training.engine import Engine
from recipe.training.forecast import Stopwatch
from recipe.training.progress import MetricLines, ProgressLines

_REMEDY = (
    "Free space there or raise the volume size, then start the job again. It resumes from its last "
    "checkpoint; if training had ended, it only writes the results."
)
_REPORT_BYTES = 1_000_000


def run(
    hyperparameters: Hyperparameters, folders: Folders, environ: Mapping[str, str]
) -> dict[str, float]:
    """Train on a job's channels; write the model, its card and metrics.json, and return the
    metrics. Raise RecipeError for what the user can fix; then the model folder is unchanged."""
    watch = Stopwatch()
    parts.check()
    pushing: hub.Repository | None = None
    if is_first_process():
        # Results must be writable, which is checked before hours of training.
        for what, target, variable in (
            ("The model's folder", folders.model_dir, "SM_MODEL_DIR"),
            ("The output's folder", folders.output_data_dir, "SM_OUTPUT_DATA_DIR"),
        ):
            remedy = f"Mount it writable, or set {variable} to another folder."
            atomic.check_writable(what, target, remedy)
        if hyperparameters.push_to_hub:
            token = hyperparameters.hub_token or hyperparameters.hf_token or environ.get("HF_TOKEN")
            is_private = hyperparameters.hub_private_repo is not False
            pushing = hub.prepare(str(hyperparameters.hub_model_id), token, is_private)
    datasets.disable_progress_bars()
    quieten()
    tracking.set_default_folders(folders)

    def log_row(row: Finding) -> None:
        mark = "WARNING: " if row.level == WARNING else ""
        say_row(row.what, f"{mark}{row}{f', {row.example}' if row.example else ''}")

    table = Table(log_row)
    names = {"job": "TRAINING_JOB_NAME", "instance": "SM_CURRENT_INSTANCE_TYPE"}
    start_facts = model_card.versions() | {k: environ.get(v, "") for k, v in names.items()}
    say_row("environment", ", ".join(f"{k} {v}" for k, v in start_facts.items() if v))
    plan = resolution.resolve(hyperparameters, folders, environ, table)
    watch.lap("data")
    job = _make(plan, table, watch, folders, environ)
    given, trainer = plan.hyperparameters, job.trainer
    trainer.leave_model = job.write_partial
    with tracking.run(plan.arguments, job.parameters):
        metrics = job.train()
    watch.lap("training")
    weights = distribution.whole_weights(trainer)
    if is_first_process():
        facts = job.facts(metrics)
        job.write(weights, facts, given.trains)
        watch.lap("saving")
        if given.quantize:
            job.quantize()
            watch.lap("int8")
            facts = job.facts(metrics)
            if given.trains:
                _write_card(facts, folders.model_dir)
        output = folders.output_data_dir
        # arguments.parse has refused do_predict for tasks that do not support it.
        if given.predicts and (answers := plan.task.answers()) is not None:
            last_answers.write(answers, plan.task.data, output, _REMEDY)
        if given.trains:
            job.write_report(facts, watch.seconds)
    if xla.is_used():
        say("torch-xla compiled {} graphs in {:.0f} s".format(*xla.compiled()))
    if plan.device.kind == "cuda":
        say(f"device memory: {memory.size(torch.cuda.max_memory_allocated())} at most")
    device.leave_world()
    if pushing:
        pushing.push(folders.model_dir)
    return metrics


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The parts of a training run."""

    plan: Plan
    table: Table
    folders: Folders
    name: str
    data_sections: list[Section]
    loaded: Loaded
    samples: Mapping[str, Samples]
    trainer: Engine

    @property
    def parameters(self) -> Mapping[str, str]:
        """Return the hyperparameters as text."""
        return self.plan.hyperparameters.as_text()

    def facts(
        self, metrics: Mapping[str, float], partial: Mapping[str, int] | None = None
    ) -> model_card.Facts:
        """Return what the model's card says."""
        return model_card.Facts(
            base_model=self.plan.source.location,
            base_is_local=self.plan.source.is_local,
            hyperparameters=self.parameters,
            about=self.plan.task.about(),
            decisions=[
                (row.what, f"{'WARNING: ' * (row.level == WARNING)}{row}")
                for row in self.table.rows
            ],
            metrics=metrics,
            job_name=self.name,
            partial=partial or {},
        )

    def quantize(self) -> None:
        """Quantize the model that was written, or without training the one that was evaluated.
        Raise ModelError if the job only quantizes, and the result is outside the bounds."""
        plan, folder = self.plan, self.folders.model_dir
        trains = plan.hyperparameters.trains
        if not trains and folder.resolve() != Path(plan.source.location).resolve():
            with atomic.results("The model", folder, 0, _REMEDY) as arriving:
                shutil.copytree(plan.source.location, arriving, dirs_exist_ok=True)
        try:
            detail, is_written = quantization.quantize(plan, self.samples, folder)
        except Exception as error:
            if not trains:
                raise
            shutil.rmtree(folder / int8.FOLDER, ignore_errors=True)
            detail, is_written = f"not saved: {type(error).__name__}: {error}", False
        if not (is_written or trains):
            kept = f" Its earlier {int8.FOLDER} is kept." if (folder / int8.FOLDER).is_dir() else ""
            raise ModelError(
                f"The model in {folder} is not quantized: {detail}.{kept}",
                "Raise max_score_loss or max_flips if you accept that.",
            )
        level = OK if is_written else WARNING
        self.table.append(Finding(level=level, what="int8", detail=detail))

    def train(self) -> dict[str, float]:
        """Train and evaluate, with all processes, and return the metrics, equal on all of them."""
        trainer, test, given = self.trainer, self.samples.get("test"), self.plan.hyperparameters
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
            metrics |= self.plan.task.tune(trainer)
        if test is not None and (given.evaluates or given.predicts):
            metrics |= trainer.evaluate(test, metric_key_prefix="test")
        metrics.pop("total_flos", None)
        return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}

    def write_partial(self, step: int) -> None:
        """Write the model of a stopped training, with the metrics of its step. All processes call
        it. If that fails, there is no model, but a job with a checkpoint can still resume."""
        weights = distribution.whole_weights(self.trainer)
        if not is_first_process():
            return
        state = self.trainer.state
        partial = {"step": step, "stopped_at": state.global_step, "of_steps": state.max_steps}
        logged = [entry for entry in state.log_history if entry["step"] == step]
        metrics = {key: value for entry in logged for key, value in entry.items()
                   if key.startswith("eval_") and math.isfinite(value)}  # fmt: skip
        try:
            self.write(weights, self.facts(metrics, partial), is_trained=True)
        except OutputError as error:
            say(f"warning: no partial model is left: {error}")
            return
        say(model_card.PARTIAL.format(**partial))

    def write(
        self, weights: dict[str, Any] | None, facts: model_card.Facts, is_trained: bool
    ) -> None:
        """Write the model, if it was trained, and metrics.json, and log the metrics."""
        folders, trainer, given = self.folders, self.trainer, self.plan.hyperparameters
        if is_trained:
            trained: Any = trainer.model
            needed = sum(weight.nbytes for weight in trained.parameters())
            with atomic.results("The model", folders.model_dir, needed, _REMEDY) as folder:
                model = trainer.accelerator.unwrap_model(trained)
                if xla.is_used():
                    model.to("cpu")
                    model.tie_weights()  # moving between kinds of devices makes one tensor two
                # An earlier model's int8 would be served instead.
                shutil.rmtree(folders.model_dir / int8.FOLDER, ignore_errors=True)
                self.plan.task.save(model, weights, self.loaded.tokenizer, folder)
                proving.prove(str(given.task), folder, self.table, bool(facts.partial))
                _write_card(facts, folder)
            state = trainer.state
            step, which = state.global_step, "the last"
            if trainer.args.load_best_model_at_end and state.best_global_step:
                step, which = (
                    state.best_global_step,
                    f"the best by {trainer.args.metric_for_best_model}",
                )
            say(f"model written to {folders.model_dir}: the weights of step {step}, {which}")
        partial = {"partial": dict(facts.partial)} if facts.partial else {}
        metrics = json.dumps({**facts.metrics, **partial}, indent=2) + "\n"
        output = folders.output_data_dir
        with atomic.results("metrics.json", output, len(metrics), _REMEDY) as folder:
            (folder / "metrics.json").write_text(metrics)
        say(f"metrics written to {output}/metrics.json:")
        for line in result_lines(facts.metrics):
            say(line)
        if is_trained:
            say(
                "next: `amphora serve` answers requests with it; on SageMaker, deploy() the "
                "estimator"
            )

    def write_report(self, facts: model_card.Facts, seconds: Mapping[str, float]) -> None:
        """Write the report, or log why it cannot be written. `seconds` are those of each phase;
        training includes evaluations."""
        trainer, given, folder = (
            self.trainer, self.plan.hyperparameters, self.folders.output_data_dir
        )  # fmt: skip
        try:
            evaluating = sum(
                value
                for entry in trainer.state.log_history[len(trainer.before.log_history) :]
                for name, value in entry.items()
                if name in ("eval_runtime", "test_runtime")
            )
            training = seconds["training"] - evaluating
            phases = {**seconds, "training": training, "evaluation": evaluating}
            phases["saving"] = phases.pop("saving")  # last
            task, history = self.plan.task, trainer.state.log_history
            sections = [*task.sections(trainer, self.samples)]
            remedy = "Free space there; the model and metrics.json are already written."
            if (answers := task.answers()) is not None:
                mistakes = last_answers.write_mistakes(answers, task.data, folder, remedy)
                sections += [] if mistakes is None else [mistakes]
            # A budget shortens the training; early stopping ends it.
            planned = 0 if trainer.forecast is None else trainer.forecast.planned
            split, rows = judged_split(task.data)
            planned = planned if trainer.state.max_steps < planned else 0
            material = report.Material(
                facts=facts,
                history=history,
                verdict=verdict.judge(facts, history, answers, planned, (split, len(rows))),
                warnings=[
                    (row.what, ", ".join(filter(None, (str(row), row.example))))
                    for row in self.table.rows
                    if row.level == WARNING
                ],
                sections=[*sections, *self.data_sections],
                lengths=trainer.training_lengths(),
                max_length=self.loaded.max_length,
                computed_tokens=trainer.tokens_computed(),
                phases=phases,
                price_per_hour=given.price_per_hour,
                hosts=self.plan.host_count,
                epochs=(trainer.state.epoch or 0) - (trainer.before.epoch or 0),
            )
            with atomic.results("The report", folder, _REPORT_BYTES, remedy) as aside:
                report.write(material, aside)
            say(f"report written to {folder}/report.html")
        except Exception as error:  # the trained model matters more than its report
            say(f"warning: the report cannot be written: {type(error).__name__}: {error}")


def _make(
    plan: Plan, table: Table, watch: Stopwatch, folders: Folders, environ: Mapping[str, str]
) -> _Job:
    task, arguments, given = plan.task, plan.arguments, plan.hyperparameters
    if plan.device.threads:
        torch.set_num_threads(plan.device.threads)
    if plan.device.kind == "cpu":
        memory.keep_freed()
    set_seed(given.seed)  # before the model's new head is initialised
    # Under torch-xla, processes wait for each other in its own rendezvous.
    waits = arguments.main_process_first if xla.is_used() else host_order.first_of_host
    with waits():
        loaded = resolution.load(plan, table)
    watch.lap("model")
    sections: list[Section] = []
    # A host may have no rows of sharded channels.
    if is_first_process() and given.trains and len(task.data.train):
        lengths = data_report.sampled_lengths(task, loaded.tokenizer)
        findings, sections = data_report.inspect(task, loaded.tokenizer, lengths, loaded.max_length)
        for finding in findings:
            table.append(finding)
        watch.lap("data report")
    with waits():
        samples = task.samples(loaded.tokenizer, loaded.max_length)
    if plan.hosts.sharded:
        host_samples.check_same_model(loaded.model, plan.hosts)
    samples = host_samples.gather_hosts(samples, task.data.sharded, plan.hosts, environ)
    stops = task.stop_tokens(loaded.tokenizer, samples, loaded.max_length)
    resolution.add_stop_tokens(stops, loaded, table)
    watch.lap("tokens")
    decisive = job_identity.decisive(given.values, arguments)
    if job_identity.evaluation_decides(given.values, arguments):
        decisive["evaluation data"] = samples["evaluation"].fingerprint()
    trainer = engine.build(
        loaded,
        samples,
        class_weight=given.class_weight,
        table=table,
        decisive=decisive,
        save_minutes=given.save_minutes,
        **(
            {"locate": functools.partial(task.data.where, "train")} if task.samples_are_rows else {}
        ),
    )
    distribution.shard(trainer)
    if given.early_stopping_patience is not None:
        patience, threshold = given.early_stopping_patience, given.early_stopping_threshold
        trainer.add_callback(EarlyStoppingCallback(patience, threshold))
    trainer.add_callback(MetricLines())
    forecast = trainer.forecast = forecasting.forecast_job(
        plan,
        loaded.model,
        rows={name: len(split) for name, split in samples.items()},
        steps_of_epoch=trainer.steps_of_epoch(),
        started=watch.started,
        bytes_per_second=lambda: trainer.bytes_per_second,
    )
    trainer.add_callback(forecast)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressLines(forecast))
    return _Job(
        plan=plan,
        table=table,
        folders=folders,
        name=environ.get("TRAINING_JOB_NAME", ""),
        data_sections=sections,
        loaded=loaded,
        samples=samples,
        trainer=trainer,
    )


def _write_card(facts: model_card.Facts, folder: Path) -> None:
    # A file name that is not UTF-8 has surrogates.
    card = model_card.write(facts)
    (folder / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")
