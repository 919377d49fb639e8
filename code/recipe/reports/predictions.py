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
from datasets import Dataset
from scipy.special import expit, softmax  # type: ignore[import-untyped]
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from recipe.console import say
from recipe.data.held_out import DataSets
from recipe.data.labels import NUMBER, SEVERAL, SINGLE, Labels
from recipe.reports import figures
from recipe.reports.section import Section
from recipe.storage import atomic

NAME = "predictions.jsonl"
_MISTAKES, _SHOWN_CHARS = 12, 280
_MOST_IN_MATRIX = 40
Array = npt.NDArray[Any]


class PredictedAnswers(Protocol):
    """A model's answers to the rows of a split."""

    @property
    def split(self) -> str: ...

    def sections(self) -> Sequence[Section]:
        """Return the report's sections on them."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return the entry of each row, as JSON values; `row` is its number in the split."""


def write(answers: PredictedAnswers, data: DataSets, folder: Path, remedy: str) -> None:
    """Write a JSON line for each row, with its file and line, in the order of the data."""
    located = ({**data.entry(answers.split, row.pop("row")), **row} for row in answers.lines())
    lines = [json.dumps(row, ensure_ascii=False) for row in located]
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
    rows: Sequence[Mapping[str, Any]] | Dataset
    """The data of the split."""
    columns: Sequence[str]
    """The columns of `rows` with a text, or a pair of texts; none if the data is tokenised, or on
    other hosts, too."""
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
            sections.append(Section(title=title, figure=draw))
        elif problem == SINGLE and len(names) <= _MOST_IN_MATRIX:
            counts = confusion_matrix(self.true, self.predicted, labels=range(len(names)))
            draw = functools.partial(figures.confusion, counts, names)
            sections.append(Section(title=f"Confusion matrix, {self.split} data", figure=draw))
        if problem != NUMBER:
            sections.append(self._classes())
        mistakes = self._mistakes()
        sections.append(
            Section(
                title=f"Worst mistakes, {self.split} data",
                note="" if mistakes else f"None of {len(self.true)} texts.",
                columns=("text", "true", "predicted", "score"),
                rows=mistakes,
            )
        )
        return sections

    def _classes(self) -> Section:
        """Return a table with the scores of each class."""
        names, is_set = self.labels.names, self.labels.problem == SEVERAL
        true = self.true > 0.5 if is_set else self.true
        scores = precision_recall_fscore_support(
            true, self.predicted, labels=range(len(names)), zero_division=0
        )
        columns = ["class", "precision", "recall", "F1", "rows"]
        values = [names, *(column.tolist() for column in scores)]
        if self.thresholds is not None:
            columns.append("threshold")
            values.append(self.thresholds.tolist())
        rows = [*zip(*values, strict=True)]
        return Section(title=f"Classes, {self.split} data", columns=columns, rows=rows)

    def _mistakes(self) -> list[list[str | float]]:
        """Return the wrong predictions of the highest confidence, worst first."""
        scores, problem = self.scores, self.labels.problem
        rows = np.arange(len(self.true))
        if problem == SINGLE:
            wrong = self.predicted != self.true
            badness = scores[rows, self.predicted] - scores[rows, self.true]
        elif problem == SEVERAL:
            wrong = (self.predicted != (self.true > 0.5)).any(axis=1)
            badness = np.abs(scores - self.true).max(axis=1)
        else:
            wrong, badness = np.ones(len(rows), dtype=bool), np.abs(self.predicted - self.true)
        worst = sorted(rows[wrong].tolist(), key=lambda row: -badness[row])[:_MISTAKES]
        show, shown = self.labels.show, []
        for row in worst:
            texts = [self.rows[row][column][:_SHOWN_CHARS] for column in self.columns]
            score = "" if problem == NUMBER else float(scores[row].max())
            text = "\n\n".join(texts) or f"row {row}"
            shown.append([text, show(self.true[row]), show(self.predicted[row]), score])
        return shown
