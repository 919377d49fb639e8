"""The report on a training run: one HTML page that needs no other file, and its figures as PNG."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from transformers import TrainerState, TrainingArguments

from recipe.console import say
from recipe.data.labels import NUMBER, SEVERAL, SINGLE, Labels
from recipe.reports import figures, model_card
from recipe.reports.generations import Continuation
from recipe.reports.model_card import Facts, versions
from recipe.runtime import matmul_rate
from recipe.storage import atomic

_MISTAKES = 12
_SHOWN_CHARS = 280
_MOST_IN_MATRIX = 40
_BYTES = 1_000_000
_LONG_SECONDS = 20
_REMEDY = "Free space there: the model and metrics.json are written."
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The model's last answers, on the split that it is judged by."""

    split: str
    labels: Labels
    outputs: Array
    """[N, classes], or [N, 1] for a number."""
    true: Array
    """Class ids [N], 0 or 1 [N, classes], or numbers [N]."""
    texts: Sequence[str] | None
    """None where the data came tokenised."""
    pairs: Sequence[str] | None = None
    """The second text of each sample, where they are pairs."""

    @property
    def scores(self) -> Array:
        """Probabilities [N, classes]; of a number, the number itself."""
        outputs = self.outputs.astype(np.float64)
        if self.labels.problem == SEVERAL:
            return 1 / (1 + np.exp(-outputs))
        if self.labels.problem == NUMBER:
            return outputs
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    @property
    def predicted(self) -> Array:
        """As `true`."""
        if self.labels.problem == SINGLE:
            return np.asarray(self.outputs.argmax(axis=1))
        return self.outputs[:, 0] if self.labels.problem == NUMBER else self.outputs >= 0


@dataclass(frozen=True)
class Shown:
    """The model's answers, as far as there are any to show."""

    predictions: Predictions | None = None
    """None where a run was resumed after its last evaluation, or predicts no labels."""
    continuations: Sequence[Continuation] = ()


@dataclass(frozen=True, kw_only=True)
class Material:
    """What the report is made of."""

    facts: Facts
    history: Sequence[Mapping[str, Any]]
    """The Trainer's log."""
    predictions: Predictions | None
    continuations: Sequence[Continuation] = ()
    lengths: Array
    """Tokens of each training text, cut."""
    max_length: int
    places: int
    """Tokens computed in one pass over the training texts, padding included."""
    phases: Mapping[str, float]
    """Seconds of each phase of the job."""
    price_per_hour: float | None
    """Of one host."""
    hosts: int
    epochs: float
    """Passes over the training texts since this start of the job."""
    flops_per_token: float
    """Floating point operations of a training step for each token."""
    matrix_rate: float | None
    """Floating point operations a second that all processes reach in matrix products."""


class FinishedRun(Protocol):
    """What a report asks of the trainer that a run has ended with."""

    args: TrainingArguments
    state: TrainerState
    before: TrainerState
    """Where this start of the job began."""
    flops_per_token: float

    def training_lengths(self) -> Any: ...

    def tokens_computed(self) -> int: ...


def of_run(
    trainer: FinishedRun,
    facts: Facts,
    show: Callable[[], Shown],
    max_length: int,
    seconds: Mapping[str, float],
    hosts: int,
    folder: Path,
) -> None:
    """Write the report on a finished run to `folder`; where it cannot be, a line says so.

    Args:
        show: Gives the model's answers.
        seconds: Of each phase; the one called training has the evaluations in it.
    """
    try:
        evaluating = sum(
            value
            for entry in trainer.state.log_history[len(trainer.before.log_history) :]
            for name, value in entry.items()
            if name in ("eval_runtime", "test_runtime")
        )
        phases = {**seconds, "training": seconds["training"] - evaluating, "evaluation": evaluating}
        phases["saving"] = phases.pop("saving")  # last
        shown = show()
        material = Material(
            facts=facts,
            history=trainer.state.log_history,
            predictions=shown.predictions,
            continuations=shown.continuations,
            lengths=trainer.training_lengths(),
            max_length=max_length,
            places=trainer.tokens_computed(),
            phases=phases,
            price_per_hour=facts.hyperparameters.price_per_hour,
            hosts=hosts,
            epochs=(trainer.state.epoch or 0) - (trainer.before.epoch or 0),
            flops_per_token=trainer.flops_per_token,
            matrix_rate=_matrix_rate(trainer, phases["training"]),
        )
        with atomic.results("The report", folder, _BYTES, _REMEDY) as aside:
            write(material, aside)
        say(f"report written to {folder}/report.html")
    except Exception as error:  # the model is trained, whatever is wrong with its report
        say(f"warning: there is no report: {type(error).__name__}: {error}")


def _matrix_rate(trainer: FinishedRun, seconds: float) -> float | None:
    """Of all processes, which are taken to be alike; None for a training too short to say much."""
    one = matmul_rate.of_matrix_products(trainer.args.device) if seconds >= _LONG_SECONDS else None
    return one and one * trainer.args.world_size


def write(material: Material, folder: Path) -> Path:
    """Write report.html and a PNG of each of its figures to `folder`; returns the page's path."""
    # jinja2 and matplotlib take a second, and no other module needs them.
    from jinja2 import Environment, FileSystemLoader

    given = material.predictions
    folder.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    with warnings.catch_warnings(), figures.style():
        warnings.simplefilter("ignore")  # a glyph that matplotlib's font lacks is no news
        drawn = {name: figures.save(figure, folder / name) for name, figure in _drawn(material)}
    page = environment.get_template("report.html.j2").render(
        facts=material.facts,
        tiles=_tiles(material),
        padding=padding(material),
        figures=drawn,
        split=given.split if given else "",
        classes=_classes(given) if given else [],
        mistakes=_mistakes(given) if given else [],
        continuations=material.continuations,
        tested=len(given.true) if given else 0,
        metrics={name: f"{value:.6g}" for name, value in material.facts.metrics.items()},
        hyperparameters=model_card.shown(material.facts.hyperparameters),
        versions=versions(),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _drawn(material: Material) -> list[tuple[str, Any]]:
    given, history = material.predictions, material.history
    made = [
        ("loss", figures.loss(history)),
        ("evaluation", figures.evaluation(history)),
        ("lengths", figures.lengths(material.lengths, material.max_length)),
        ("time", figures.phases(material.phases)),
    ]
    if any("eval_perplexity" in entry for entry in history):
        made.append(("perplexity", figures.perplexity(history)))
    if given is None:
        return made
    if given.labels.problem == NUMBER:
        made.append(("predictions", figures.scatter(given.true, given.predicted)))
    elif given.labels.problem == SINGLE and len(given.labels.names) <= _MOST_IN_MATRIX:
        counts = confusion(given.true, given.predicted, len(given.labels.names))
        made.append(("confusion", figures.confusion(counts, given.labels.names)))
    return made


def confusion(true: Array, predicted: Array, count: int) -> Array:
    """[count, count]: how often a text of the class of the row was given that of the column."""
    counts = np.zeros((count, count), dtype=np.int64)
    np.add.at(counts, (true, predicted), 1)
    return counts


def _tiles(material: Material) -> dict[str, str]:
    """The figures to see first."""
    metrics, real = material.facts.metrics, int(material.lengths.sum())
    wanted = (
        "perplexity",
        "token_accuracy",
        "accuracy",
        "f1_macro",
        "f1_micro",
        "pearson",
        "mse",
        "loss",
    )
    prefix = "test" if any(name.startswith("test_") for name in metrics) else "eval"
    found = [
        (name, metrics[f"{prefix}_{name}"]) for name in wanted if f"{prefix}_{name}" in metrics
    ]
    tiles = {f"{prefix} {name.replace('_', ' ')}": f"{value:.4g}" for name, value in found[:3]}
    tiles |= _speed(material)
    tiles["padding"] = f"{1 - real / material.places:.0%}"
    seconds = sum(material.phases.values())
    tiles["time"] = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    if material.price_per_hour is not None:
        cost = material.price_per_hour * material.hosts * seconds / 3600
        tiles[f"cost ({material.hosts} x {material.price_per_hour:g} an hour)"] = f"{cost:.2g}"
    return tiles


def padding(material: Material) -> str:
    """How much of what is computed is padding, here and laid out in the usual ways."""
    lengths, most = material.lengths, material.max_length
    real, size = int(lengths.sum()), material.facts.hyperparameters.per_device_train_batch_size
    shuffled = np.random.default_rng(0).permutation(lengths)
    batches = [shuffled[at : at + size] for at in range(0, len(shuffled), size)]
    to_longest = sum(len(batch) * int(batch.max()) for batch in batches)
    return (
        f"Of the tokens computed, {1 - real / material.places:.1%} were padding. It would have "
        f"been {1 - real / (len(lengths) * most):.1%} with every text padded to {most} tokens, and "
        f"{1 - real / to_longest:.1%} with random batches of {size} padded to their longest text."
    )


def _speed(material: Material) -> dict[str, str]:
    """Of the training without its evaluations; real tokens only."""
    per_second = material.epochs / material.phases["training"]
    if not per_second:
        return {}
    tokens = per_second * int(material.lengths.sum())
    tiles = {
        "texts per second": f"{per_second * len(material.lengths):,.1f}",
        "tokens per second": f"{tokens:,.0f}",
    }
    if material.matrix_rate:
        share = tokens * material.flops_per_token / material.matrix_rate
        rated = f"{material.matrix_rate / 1e9:,.0f} GFLOP/s"
        tiles[f"of the bfloat16 matrix rate ({rated}, measured)"] = f"{share:.0%}"
    return tiles


def _classes(given: Predictions) -> list[dict[str, Any]]:
    """Precision, recall and F1 of each class."""
    if given.labels.problem == NUMBER:
        return []
    rows = []
    for number, name in enumerate(given.labels.names):
        several = given.labels.problem == SEVERAL
        true = given.true[:, number] > 0.5 if several else given.true == number
        said = given.predicted[:, number] if several else given.predicted == number
        both = int((true & said).sum())
        precision = both / int(said.sum()) if said.any() else 0.0
        recall = both / int(true.sum()) if true.any() else 0.0
        total = precision + recall
        rows.append(
            {
                "name": name,
                "precision": precision,
                "recall": recall,
                "f1": 2 * precision * recall / total if total else 0.0,
                "rows": int(true.sum()),
            }
        )
    return rows


def _mistakes(given: Predictions) -> list[dict[str, str | None]]:
    """The texts that the model is most sure and most wrong about, worst first."""
    scores, problem = given.scores, given.labels.problem
    rows = np.arange(len(given.true))
    if problem == SINGLE:
        wrong = given.predicted != given.true
        badness = scores[rows, given.predicted] - scores[rows, given.true]
    elif problem == SEVERAL:
        wrong = (given.predicted != (given.true > 0.5)).any(axis=1)
        badness = np.abs(scores - given.true).max(axis=1)
    else:
        wrong, badness = np.ones(len(rows), dtype=bool), np.abs(given.predicted - given.true)
    worst = sorted(rows[wrong].tolist(), key=lambda row: -badness[row])[:_MISTAKES]
    return [_mistake(given, row, scores[row]) for row in worst]


def _mistake(given: Predictions, row: int, scores: Array) -> dict[str, str | None]:
    text = f"row {row}" if given.texts is None else given.texts[row]
    sure = "" if given.labels.problem == NUMBER else f"{scores.max():.0%}"
    return {
        "text": _beginning(text),
        "pair": None if given.pairs is None else _beginning(given.pairs[row]),
        "true": given.labels.show(given.true[row]),
        "predicted": given.labels.show(given.predicted[row]),
        "sure": sure,
    }


def _beginning(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."
