"""Quantize the encoder of a finished model to int8, and prove what that costs (`quantize=int8`).

CTranslate2 quantizes the weights of the encoder, and activations while it computes, with a scale
for each token: nothing is calibrated. The model is then evaluated with it as in a training, on
the whole evaluation split. Within the bounds of `max_score_loss` and `max_flips` the folder `int8`
is added to the float weights, else nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe.backend.engines import ctranslate, int8
from recipe.backend.engines.ctranslate import Forward
from recipe.backend.engines.int8 import Int8Proof, Trial
from recipe.batching.batches import Samples
from recipe.compat import quieten
from recipe.data.labels import NUMBER, Labels
from recipe.metrics import LOWER_IS_BETTER
from recipe.models.sources.origin import Origin
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.storage import atomic
from recipe.training import engine, proving
from recipe.training.preparation import prepare

_DECISIONS = ("label", "labels", "tags", "answer", "index")
"""Keys of a line of predictions.jsonl that hold the answer."""
_REMEDY = "The model itself is written. Free space there, and run `amphora quantize`."


@dataclass(frozen=True)
class _Evaluation:
    """What an evaluation of a model gave."""

    scores: Mapping[str, float]
    outputs: Any
    decisions: Sequence[Any]
    """The answer to each row; empty if answers are numbers or vectors."""
    are_numbers: bool = False
    """Whether outputs are numbers: each column is compared for itself."""


@dataclass(frozen=True)
class _Int8Cost:
    """What int8 changes in an evaluation."""

    metric: str
    score: float
    score_int8: float
    changed: float
    """The share of answers that differ; of numbers and vectors, 1 - the correlation or the mean
    cosine."""
    are_decisions: bool

    @classmethod
    def between(cls, metric: str, exact: _Evaluation, quick: _Evaluation) -> _Int8Cost:
        """Compare the main metric and the answers of two evaluations."""
        scores = exact.scores[metric], quick.scores[metric]
        if exact.decisions:
            pairs = zip(exact.decisions, quick.decisions, strict=True)
            return cls(metric, *scores, float(np.mean([one != two for one, two in pairs])), True)
        ours, theirs = (np.asarray(one.outputs, np.float64) for one in (quick, exact))
        if exact.are_numbers or ours.ndim == 1 or ours.shape[-1] == 1:
            columns = ours.shape[-1] if exact.are_numbers else 1
            ours, theirs = (one.reshape(-1, columns).T for one in (ours, theirs))
            ours, theirs = (one - one.mean(axis=1, keepdims=True) for one in (ours, theirs))
        sizes = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
        # Groups may have fewer texts than there is room for.
        cosines = (ours * theirs).sum(-1)[sizes > 0] / sizes[sizes > 0]
        return cls(metric, *scores, 1 - float(cosines.mean()), False)

    def excess(self, most_lost: float, most_changed: float) -> str:
        """Return which bound is exceeded and by how much; empty if none is."""
        lost = self.score - self.score_int8
        if self.metric in LOWER_IS_BETTER:
            lost = -lost / abs(self.score or 1)
        # NaN is beyond every bound.
        if not lost <= most_lost:
            return f"the loss of {lost:.4f} exceeds max_score_loss={most_lost:g}"
        if not self.changed <= most_changed:
            return f"the change of {self.changed:.4f} exceeds max_flips={most_changed:g}"
        return ""

    def __str__(self) -> str:
        scores = f"{self.metric} {self.score_int8:.4f} instead of {self.score:.4f}"
        if self.are_decisions:
            return f"{scores}, {self.changed:.2%} of the answers differ"
        return f"{scores}, 1 - the similarity of the answers {self.changed:.4f}"


class _Subject:
    """The model of a folder, evaluated by the task of the job that wrote it."""

    def __init__(self, plan: Plan, samples: Mapping[str, Samples]) -> None:
        self._task, self._samples = plan.task, samples
        prepared = prepare(plan, Table(), samples=samples)
        self.model: Any = prepared.loaded.model
        self.encoder: Any = self.model.base_model
        self.trainer = engine.build(prepared)

    def evaluate(self) -> _Evaluation:
        """Evaluate the model as it computes now."""
        outcome = self.trainer.evaluation_loop(self._samples["evaluation"], "")
        assert outcome.metrics is not None
        answers = self._task.answers()
        decisions = [
            line[name]
            for line in (answers.lines() if answers else ())
            for name in _DECISIONS
            if name in line
        ]
        scores = {key.removeprefix("eval_"): value for key, value in outcome.metrics.items()}
        labels: Labels | None = getattr(self._task.data, "labels", None)
        are_numbers = labels is not None and labels.problem == NUMBER
        return _Evaluation(scores, outcome.predictions, decisions, are_numbers)

    def reset(self, forward: Forward | None) -> None:
        """Compute the encoder by `forward`, or by its own class if that is None."""
        for module in (self.model, self.encoder):
            vars(module).pop("forward", None)
        if forward is not None:
            forward.replace(self.model)
            self._task.objective.prepare(self.model, packed=False)


def quantize(plan: Plan, samples: Mapping[str, Samples], folder: Path) -> tuple[str, bool]:
    """Write the folder `int8` of a finished model, if it is within the bounds. Return the scores
    and the changed answers as a sentence, and whether the folder was written. Raise OutputError if
    it cannot be written.

    Args:
        plan: The job's plan, whose task evaluates.
        samples: The samples of training and evaluation.
        folder: The model's folder.
    """
    given = plan.hyperparameters
    # A copy: the last answers of the job's task are the float model's.
    task = copy.copy(plan.task)
    task.objective = copy.copy(task.objective)
    whole = dataclasses.replace(given.after_training(), packing=False, quantize=None)
    task.model_settings = whole
    task.data = dataclasses.replace(task.data, test=None)
    with tempfile.TemporaryDirectory(prefix="int8-") as scratch:
        source = Origin(str(folder))
        padded = dataclasses.replace(plan, hyperparameters=whole, task=task, source=source)
        subject = _Subject(padded, samples)
        exact = subject.evaluate()
        aside = Path(scratch) / int8.FOLDER
        with int8.quiet():
            names = ctranslate.convert(subject.encoder, aside, "int8")
        # Correlations are NaN if the data's scores are equal.
        scores = {name: exact.scores.get(name, np.nan) for name in task.about().headline}
        metric = next((name for name, score in scores.items() if np.isfinite(score)), "loss")
        forward = Forward(aside, names)
        subject.reset(forward)
        cost = _Int8Cost.between(metric, exact, subject.evaluate())
        if excess := cost.excess(given.max_score_loss, given.max_flips):
            return f"not saved: {cost}; {excess}", False
        proof = Int8Proof(
            outputs=names,
            tolerance=math.inf,
            metric=metric,
            score=cost.score,
            score_int8=cost.score_int8,
            changed=cost.changed,
            evaluated=len(samples["evaluation"]),
            weights=int8.weights_of(folder),
            versions=int8.versions(),
            processor=int8.processor(),
        )
        int8.write(aside, proof)
        size = sum(path.stat().st_size for path in aside.iterdir())
        with atomic.results("The model in int8", folder, size, _REMEDY) as arriving:
            shutil.copytree(aside, arriving / int8.FOLDER)
    detail = f"{cost} of {proof.evaluated} rows"
    # A new process, since this one has run CTranslate2, and serving tries it in a fork.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        trial = pool.submit(_serve, str(given.task), str(folder)).result()
    if trial is None or not math.isfinite(trial.tolerance):
        shutil.rmtree(folder / int8.FOLDER)
        return f"not saved: {trial.why_not if trial else 'the model is not served in int8'}", False
    proof = dataclasses.replace(proof, milliseconds=trial.milliseconds, tolerance=trial.tolerance)
    int8.write(folder / int8.FOLDER, proof)
    return f"{detail}; {trial}", True


def _serve(task: str, folder: str) -> Trial | None:
    """Load the model as a server does; return the trial of its encoder in int8."""
    os.environ.pop("AMPHORA_DTYPE", None)  # which would turn int8 off
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # int8 is for CPUs
    torch.set_num_threads(1)
    quieten()
    _, loaded = proving.load(task, Path(folder), {})
    trial: Trial | None = loaded.loaded_model.trial
    return trial
