"""Write predictions.jsonl for `do_predict`, and report a classifier's last answers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax  # type: ignore[import-untyped]

from recipe.console import say
from recipe.data.labels import NUMBER, SEVERAL, SINGLE, Labels
from recipe.reports import figures, section
from recipe.reports.section import RULE, Section
from recipe.storage import atomic

NAME = "predictions.jsonl"
_MISTAKES = 12
_MOST_IN_MATRIX = 40
Array = npt.NDArray[Any]


class PredictedAnswers(Protocol):
    """A model's answers to the rows of a split."""

    @property
    def split(self) -> str: ...

    def sections(self) -> Sequence[Section]:
        """Return the report's sections on them."""

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Return the entry of each row, as JSON values."""


def write(answers: PredictedAnswers, folder: Path, remedy: str) -> None:
    """Write a JSON line for each row, in the order of the data."""
    lines = [json.dumps(row, ensure_ascii=False) for row in answers.lines()]
    text = "\n".join(lines) + "\n"
    with atomic.results(NAME, folder, len(text.encode()), remedy) as aside:
        (aside / NAME).write_text(text, encoding="utf-8", errors="backslashreplace")
    say(f"{len(lines)} predictions for the {answers.split} data written to {folder}/{NAME}")


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The model's last answers on the split that it is evaluated on."""

    split: str
    labels: Labels
    outputs: Array
    """[N, classes], or [N, 1] for a number."""
    true: Array
    """Class ids [N], 0 or 1 [N, classes], or numbers [N]."""
    texts: Sequence[str] | None
    """None if the data came tokenised."""
    pairs: Sequence[str] | None = None
    """The second text of each sample, if samples are pairs."""
    thresholds: Array | None = None
    """Probability [classes] from which each label is predicted, if a text may have several; None
    means 0.5."""

    @property
    def scores(self) -> Array:
        """Return the probabilities [N, classes]; of a number, the number itself."""
        outputs = self.outputs.astype(np.float64)
        if self.labels.problem == SEVERAL:
            return np.asarray(expit(outputs))
        if self.labels.problem == NUMBER:
            return outputs
        return np.asarray(softmax(outputs, axis=1))

    @property
    def predicted(self) -> Array:
        """Return the predictions in the form of `true`."""
        if self.labels.problem == SINGLE:
            return np.asarray(self.outputs.argmax(axis=1))
        if self.labels.problem == NUMBER:
            return self.outputs[:, 0]
        return self.scores >= (0.5 if self.thresholds is None else self.thresholds)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield for each row its number, from 0, the prediction (the label with its probability,
        several labels, or a number), and the true value."""
        names, problem = self.labels.names, self.labels.problem
        answers: Sequence[Array] = (self.predicted, self.scores, self.true)
        if problem == NUMBER:  # of 32 bits: 3.1 as it was written, not 3.0999999
            answers = [column.astype("f4").astype(str).astype("f8") for column in answers]
        triples = zip(*(column.tolist() for column in answers), strict=True)
        for row, (predicted, scores, true) in enumerate(triples):
            if problem == NUMBER:
                yield {"row": row, "value": predicted, "true": true}
            elif problem == SEVERAL:
                yield {
                    "row": row,
                    "labels": [name for name, has in zip(names, predicted, strict=True) if has],
                    "scores": dict(zip(names, scores, strict=True)),
                    "true": [name for name, has in zip(names, true, strict=True) if has],
                }
            else:
                yield {
                    "row": row,
                    "label": names[predicted],
                    "score": scores[predicted],
                    "true": names[true],
                }

    def sections(self) -> list[Section]:
        """Return a figure of all answers, the scores of each class, the worst mistakes."""
        sections = []
        names, problem = self.labels.names, self.labels.problem
        if problem == NUMBER:
            title = f"Predicted and true numbers, {self.split} data"
            draw = functools.partial(figures.scatter, self.true, self.predicted)
            sections.append(Section(title=title, figure=("predictions", draw)))
        elif problem == SINGLE and len(names) <= _MOST_IN_MATRIX:
            counts = confusion(self.true, self.predicted, len(names))
            draw = functools.partial(figures.confusion, counts, names)
            title = f"Confusion matrix, {self.split} data"
            sections.append(Section(title=title, figure=("confusion", draw)))
        if problem != NUMBER:
            sections.append(self._classes())
        mistakes = _mistakes(self)
        sections.append(
            Section(
                title=f"Worst mistakes, {self.split} data",
                note="" if mistakes else f"None of {len(self.true)} texts.",
                columns=[
                    ("text", section.TEXT),
                    ("true", section.LABEL),
                    ("predicted", section.LABEL),
                    ("score", section.NUMBER),
                ],
                rows=mistakes,
            )
        )
        return sections

    def _classes(self) -> Section:
        """Return a table with the scores of each class."""
        count = len(self.labels.names)
        if self.labels.problem == SEVERAL:
            true, given = self.true > 0.5, self.predicted
            rows_of, given_of, both = true.sum(0), given.sum(0), (true & given).sum(0)
        else:
            is_right = self.predicted == self.true
            rows_of, given_of, both = (
                np.bincount(ids, minlength=count)
                for ids in (self.true, self.predicted, self.true[is_right])
            )
        precision, recall = both / np.maximum(given_of, 1), both / np.maximum(rows_of, 1)
        f1 = 2 * both / np.maximum(given_of + rows_of, 1)
        rows = [
            [name, *(f"{scores[number]:.3f}" for scores in (precision, recall, f1)),
             str(rows_of[number])]
            for number, name in enumerate(self.labels.names)
        ]  # fmt: skip
        columns = ["precision", "recall", "F1", "rows"]
        if self.thresholds is not None:
            columns.append("threshold")
            rows = [[*row, f"{self.thresholds[number]:.3f}"] for number, row in enumerate(rows)]
        return Section(
            title=f"Classes, {self.split} data",
            columns=section.texts("class") + section.numbers(*columns),
            rows=rows,
        )


def confusion(true: Array, predicted: Array, count: int) -> Array:
    """Return [count, count]: how many texts of the row's class were predicted to have the column's
    class."""
    counts = np.zeros((count, count), dtype=np.int64)
    np.add.at(counts, (true, predicted), 1)
    return counts


def _mistakes(answers: Predictions) -> list[list[str]]:
    """Return the wrong predictions of the highest confidence, worst first."""
    scores, problem = answers.scores, answers.labels.problem
    rows = np.arange(len(answers.true))
    if problem == SINGLE:
        wrong = answers.predicted != answers.true
        badness = scores[rows, answers.predicted] - scores[rows, answers.true]
    elif problem == SEVERAL:
        wrong = (answers.predicted != (answers.true > 0.5)).any(axis=1)
        badness = np.abs(scores - answers.true).max(axis=1)
    else:
        wrong, badness = np.ones(len(rows), dtype=bool), np.abs(answers.predicted - answers.true)
    worst = sorted(rows[wrong].tolist(), key=lambda row: -badness[row])[:_MISTAKES]
    cells = []
    for row in worst:
        text = f"row {row}" if answers.texts is None else answers.texts[row]
        texts = [text] if answers.pairs is None else [text, answers.pairs[row]]
        cells.append(
            [
                RULE.join(map(section.beginning, texts)),
                answers.labels.show(answers.true[row]),
                answers.labels.show(answers.predicted[row]),
                "" if problem == NUMBER else f"{scores[row].max():.0%}",
            ]
        )
    return cells
