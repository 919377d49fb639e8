"""Report a classifier's last answers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from scipy.special import expit, softmax  # type: ignore[import-untyped]
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from recipe.data.labels import NUMBER, SEVERAL, SINGLE, Labels
from recipe.reports import figures, matrix
from recipe.reports.last_answers import Baseline, Mistake, PredictedAnswers
from recipe.reports.section import Section

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Predictions(PredictedAnswers):
    """The model's last answers on the split that it is evaluated on."""

    labels: Labels
    outputs: Array
    """[N, classes], or [N, numbers]."""
    true: Array
    """Class ids [N], 0 or 1 [N, classes], or numbers [N], of several columns [N, numbers]."""
    rows: Dataset
    """The data of the split."""
    columns: Sequence[str]
    """The columns of `rows` with a text, or a pair of texts; none if the data is tokenized, or on
    other hosts, too."""
    thresholds: Array | None = None
    """Probability [classes] from which each label is predicted, if a text may have several; None
    means 0.5."""

    @property
    def scores(self) -> Array:
        """Return the probabilities [N, classes]; of numbers, these themselves."""
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
            return self.outputs if self.true.ndim > 1 else self.outputs[:, 0]
        return self.scores >= (0.5 if self.thresholds is None else self.thresholds)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield for each row its number, from 0, the prediction (the label with its probability,
        several labels, or numbers), and the true value."""
        names, problem = self.labels.names, self.labels.problem
        answers: Sequence[Array] = (self.predicted, self.scores, self.true)
        if problem == NUMBER:  # of 32 bits: 3.1 as it was written, not 3.0999999
            answers = [column.astype("f4").astype(str).astype("f8") for column in answers]
        triples = zip(*(column.tolist() for column in answers), strict=True)
        for row, (predicted, scores, true) in enumerate(triples):
            if problem == NUMBER and len(names) > 1:
                predicted, true = (dict(zip(names, one, strict=True)) for one in (predicted, true))
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

    def __len__(self) -> int:
        return len(self.true)

    @property
    def measure(self) -> str:
        """Return what sorts mistakes."""
        return "difference" if self.labels.problem == NUMBER else "confidence"

    def sections(self) -> list[Section]:
        """Return a figure of all answers, the usual confusions, the scores of each class."""
        names, problem = self.labels.names, self.labels.problem
        if problem == NUMBER:
            return self._numbers()
        if problem == SEVERAL:
            return [self._classes()]
        counts = confusion_matrix(self.true, self.predicted, labels=range(len(names)))
        sections = [
            Section(
                title=f"Confusion matrix, {self.split} data",
                note=matrix.explain(names),
                figure=functools.partial(matrix.draw, counts, names),
            )
        ]
        if len(names) > 2:
            sections.append(
                Section(
                    title=f"Most frequent confusions, {self.split} data",
                    columns=("true", "predicted", "rows", "of the true class"),
                    rows=matrix.confusions(counts, names),
                )
            )
        sections.append(self._classes())
        return sections

    def _numbers(self) -> list[Section]:
        """Return a figure of each column of numbers; if there are several, also their scores."""
        where = f"numbers, {self.split} data"
        if self.true.ndim == 1:
            draw = functools.partial(figures.scatter, self.true, self.predicted)
            return [Section(title=f"Predicted and true {where}", figure=draw)]
        drawn, rows = list[Section](), []
        for name, *pair in zip(self.labels.names, self.true.T, self.predicted.T, strict=True):
            true, predicted = pair
            draw = functools.partial(figures.scatter, true, predicted)
            drawn.append(Section(title=f"Predicted and true {where}: {name}", figure=draw))
            varies = len(true) > 1 and min(map(np.ptp, pair)) > 0
            pearson = float(np.corrcoef(true, predicted)[0, 1]) if varies else "none"
            errors = np.square(predicted - true).mean(), true.var()
            rows.append([name, *map(float, errors), pearson])
        columns = ("number", "mse", "mse of answering the mean", "pearson")
        return [Section(title=f"N{where[1:]}", columns=columns, rows=rows), *drawn]

    def _classes(self) -> Section:
        """Return a table with the scores of each class, the worst first."""
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
        rows = sorted(zip(*values, strict=True), key=operator.itemgetter(3))
        return Section(title=f"Classes, {self.split} data", columns=columns, rows=rows)

    def mistakes(self, most: int) -> tuple[int, list[Mistake]]:
        """Return the wrong predictions, those of the highest confidence first; of numbers, those
        that are farthest from the true ones, by the farthest of several."""
        scores, problem = self.scores, self.labels.problem
        rows = np.arange(len(self.true))
        if problem == SINGLE:
            wrong, measures = self.predicted != self.true, scores.max(axis=1)
        elif problem == SEVERAL:
            differs = self.predicted != (self.true > 0.5)
            wrong = differs.any(axis=1)
            # How sure the model is of the label that it got most wrong.
            certainty = np.where(self.predicted, scores, 1 - scores)
            measures = np.where(differs, certainty, 0).max(axis=1)
        else:
            measures = np.abs(self.predicted - self.true).reshape(len(rows), -1).max(axis=1)
            wrong = measures > 0
        order = rows[wrong][np.argsort(-measures[wrong], kind="stable")][:most]
        columns = [self.rows.select(order)[column] for column in self.columns if self.rows]
        texts = ["\n\n".join(cells) for cells in zip(*columns, strict=True)] or [""] * len(order)
        show = self.labels.show
        return int(wrong.sum()), [
            Mistake(
                row=row,
                text=text,
                true=show(self.true[row]),
                predicted=show(self.predicted[row]),
                measure=float(measures[row]),
            )
            for row, text in zip(order.tolist(), texts, strict=True)
        ]

    def baseline(self, score: str) -> Baseline | None:
        """Return the accuracy of always answering the most frequent class, or the error of always
        answering the mean."""
        if self.labels.problem == SINGLE and score == "accuracy" and len(self.true):
            counts = np.bincount(self.true, minlength=len(self.labels.names))
            what = f"always answering {self.labels.names[int(counts.argmax())]!r}"
            return Baseline(what=what, score=float(counts.max() / counts.sum()))
        if self.labels.problem == NUMBER and score == "mse" and len(self.true):
            error = float(self.true.var(axis=0).mean())
            return Baseline(what="always answering the mean", score=error)
        return None

    def never_predicted(self) -> list[str]:
        """Return the classes of rows that are never predicted."""
        if self.labels.problem == NUMBER:
            return []
        if self.labels.problem == SINGLE:
            missing = sorted({*self.true.tolist()} - {*self.predicted.tolist()})
        else:
            missing = np.flatnonzero((self.true > 0.5).any(0) & ~self.predicted.any(0)).tolist()
        return [self.labels.names[number] for number in missing]

    def class_count(self) -> int:
        return len(self.labels.names)
