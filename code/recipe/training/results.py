"""Write the results of a job: the model with its card, metrics.json, predictions and the report."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.backend.engines import int8
from recipe.backend.proofs import trained_answers
from recipe.console import is_first_process, say
from recipe.data.held_out import DataSets
from recipe.errors import ModelError, OutputError
from recipe.hyperparameters import Hyperparameters
from recipe.metrics import result_lines
from recipe.paths import Folders
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.reports import last_answers, model_card, report, verdict
from recipe.runtime import distribution, xla
from recipe.runtime.stopwatch import Stopwatch
from recipe.storage import atomic, hub
from recipe.tasks.base import OK, WARNING, Finding, judged_split
from recipe.training import proving, quantization
from recipe.training.engine import Engine
from recipe.training.preparation import PreparedTraining

_REMEDY = (
    "Free space there or raise the volume size, then start the job again. It resumes from its last "
    "checkpoint; if training had ended, it only writes the results."
)
_REPORT_BYTES = 1_000_000


def open_outputs(
    hyperparameters: Hyperparameters, folders: Folders, environ: Mapping[str, str]
) -> hub.Repository | None:
    """Check, before hours of training, that results can be written, and return the repository to
    push to, if there is one. Raise OutputError or HyperparameterError if they cannot."""
    for what, target, variable in (
        ("The model's folder", folders.model_dir, "SM_MODEL_DIR"),
        ("The output's folder", folders.output_data_dir, "SM_OUTPUT_DATA_DIR"),
    ):
        remedy = f"Mount it writable, or set {variable} to another folder."
        atomic.check_writable(what, target, remedy)
    if not hyperparameters.push_to_hub:
        return None
    token = hyperparameters.hub_token or hyperparameters.hf_token or environ.get("HF_TOKEN")
    is_private = hyperparameters.hub_private_repo is not False
    return hub.prepare(str(hyperparameters.hub_model_id), token, is_private)


@dataclass(frozen=True, kw_only=True)
class JobResults:
    """Writes the results of a job. The first process calls it, if not said otherwise."""

    plan: Plan
    prepared: PreparedTraining
    table: Table
    """The decisions that the card lists."""
    folders: Folders
    job_name: str

    def facts(
        self, metrics: Mapping[str, float], partial: Mapping[str, int] | None = None
    ) -> model_card.Facts:
        """Return what the model's card says."""
        source, given = self.plan.source, self.plan.hyperparameters
        base = source.base or source.location
        saved = {"merged": model_card.MERGED, "adapter": model_card.ALONE}[given.lora_save]
        return model_card.Facts(
            base_model=base,
            base_is_local=Path(base).is_dir(),
            adapter="" if given.lora_r is None else saved,
            start=source.location if source.base else "",
            hyperparameters=given.as_text(),
            about=self.plan.task.about(),
            decisions=[(row.what, f"{row.mark}{row}") for row in self.table.rows],
            metrics=metrics,
            job_name=self.job_name,
            partial=partial or {},
        )

    def write(
        self,
        trainer: Engine,
        weights: dict[str, Any] | None,
        metrics: Mapping[str, float],
        watch: Stopwatch,
    ) -> None:
        """Write all results. Raise ModelError at the end if the saved model does not answer as the
        trained one; on a GPU, where the comparison has not been tried, a warning has to do.

        Args:
            weights: The gathered weights of a sharded model; None if it is not sharded.
            watch: Has the seconds of each phase so far; training includes evaluations.
        """
        given, facts, folders = self.plan.hyperparameters, self.facts(metrics), self.folders
        fault = self.write_model(trainer, weights, facts, given.trains)
        watch.lap("saving")
        if given.quantize:
            self.quantize()
            watch.lap("int8")
            facts = self.facts(metrics)
            if given.trains:
                _write_card(facts, folders.model_dir)
        # arguments.parse has refused do_predict for tasks that do not support it.
        if given.predicts and (answers := self.plan.task.answers()) is not None:
            last_answers.write(answers, self.plan.task.data, folders.output_data_dir, _REMEDY)
        if given.trains:
            self.write_report(trainer, facts, watch.seconds)
        if fault and self.plan.device.kind == "cpu":
            raise ModelError(
                f"The model in {folders.model_dir} does not answer as the trained one: {fault}.",
                "Do not deploy it. Report this message with the log; the checkpoints in "
                f"{folders.checkpoints} have the trained weights.",
            )

    def write_partial(self, trainer: Engine, step: int) -> None:
        """Write the model of a stopped training, with the metrics of its step. All processes call
        it. If that fails, there is no model, but a job with a checkpoint can still resume."""
        weights = distribution.whole_weights(trainer)
        if not is_first_process():
            return
        state = trainer.state
        partial = {"step": step, "stopped_at": state.global_step, "of_steps": state.max_steps}
        logged = [entry for entry in state.log_history if entry["step"] == step]
        metrics = {key: value for entry in logged for key, value in entry.items()
                   if key.startswith("eval_") and math.isfinite(value)}  # fmt: skip
        try:
            self.write_model(trainer, weights, self.facts(metrics, partial), is_trained=True)
        except OutputError as error:
            say(f"warning: no partial model is left: {error}")
            return
        say(model_card.PARTIAL.format(**partial))

    def write_model(
        self,
        trainer: Engine,
        weights: dict[str, Any] | None,
        facts: model_card.Facts,
        is_trained: bool,
    ) -> str:
        """Write the model, if it was trained, and metrics.json, and log the metrics. Return how the
        saved model differs from the trained one; empty if it does not, or was not compared."""
        folders, fault = self.folders, ""
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
                why_not = "torch-xla computed it" if xla.is_used() else ""
                why_not = why_not if weights is None else "its weights are sharded over processes"
                loaded = self.prepared.loaded
                # Saving may merge adapters into the model in memory.
                answers = trained_answers.compute(
                    model, loaded.tokenizer, loaded.max_length, why_not
                )
                self.plan.task.save(model, weights, loaded.tokenizer, folder)
                given = self.plan.hyperparameters
                trusts = {"HF_TRUST_REMOTE_CODE": "1"} if given.trust_remote_code else {}
                is_partial = bool(facts.partial)
                fault = proving.prove(
                    str(given.task), folder, self.table, is_partial, trusts, answers
                )
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
        return fault

    def quantize(self) -> None:
        """Quantize the model that was written, or without training the one that was evaluated.
        Raise ModelError if the job only quantizes, and the result is outside the bounds."""
        plan, folder = self.plan, self.folders.model_dir
        trains = plan.hyperparameters.trains
        if not trains and folder.resolve() != Path(plan.source.location).resolve():
            with atomic.results("The model", folder, 0, _REMEDY) as arriving:
                shutil.copytree(plan.source.location, arriving, dirs_exist_ok=True)
        try:
            detail, is_written = quantization.quantize(plan, self.prepared.samples, folder)
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

    def write_report(
        self, trainer: Engine, facts: model_card.Facts, seconds: Mapping[str, float]
    ) -> None:
        """Write the report, or log why it cannot be written. `seconds` are those of each phase;
        training includes evaluations."""
        plan, prepared, folder = self.plan, self.prepared, self.folders.output_data_dir
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
            task, history = plan.task, trainer.state.log_history
            sections = [*task.sections(trainer, prepared.samples)]
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
                    (row.what, _with_short_paths(task.data, row))
                    for row in self.table.rows
                    if row.level == WARNING
                ],
                sections=[*sections, *prepared.sections],
                lengths=trainer.training_lengths(),
                max_length=prepared.loaded.max_length,
                computed_tokens=trainer.tokens_computed(),
                phases=phases,
                price_per_hour=plan.hyperparameters.price_per_hour,
                hosts=plan.host_count,
                epochs=(trainer.state.epoch or 0) - (trainer.before.epoch or 0),
            )
            with atomic.results("The report", folder, _REPORT_BYTES, remedy) as aside:
                report.write(material, aside)
            say(f"report written to {folder}/report.html")
        except Exception as error:  # the trained model matters more than its report
            say(f"warning: the report cannot be written: {type(error).__name__}: {error}")


def _with_short_paths(data: DataSets, row: Finding) -> str:
    """Return a finding with its example, files by channel and name."""
    text = row.with_example()
    for source in data.sources:
        text = text.replace(str(source.path), source.name)
    return text


def _write_card(facts: model_card.Facts, folder: Path) -> None:
    # A file name that is not UTF-8 has surrogates.
    card = model_card.write(facts)
    (folder / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")
