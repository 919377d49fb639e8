"""Report the choices of a model: accuracy by the position of the right choice, and the worst
answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt

from recipe.reports import section
from recipe.reports.section import Section
from recipe.tasks.multiple_choice.data import CHOICES, CONTEXT, QUESTION

_WORST = 12


@dataclass(frozen=True, kw_only=True)
class ChosenAnswers:
    """The model's last answers on the split that it is evaluated on."""

    split: str
    data: datasets.Dataset
    probabilities: npt.NDArray[np.float32]
    """[rows, most]: 0 for missing choices."""
    true: npt.NDArray[np.int64]

    @property
    def chosen(self) -> npt.NDArray[np.int64]:
        """Return the most probable choice of each row."""
        chosen: npt.NDArray[np.int64] = self.probabilities.argmax(axis=1)
        return chosen

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return for each row its choice, the right one, and the probability of each."""
        for row, (choice, true) in enumerate(zip(self.chosen, self.true, strict=True)):
            choices = self.data[row][CHOICES]
            yield {
                "row": row,
                "choice": choices[choice],
                "index": int(choice),
                "true": int(true),
                "scores": [round(float(p), 6) for p in self.probabilities[row, : len(choices)]],
            }

    def sections(self) -> list[Section]:
        """Return the accuracy by the position of the right choice, and the most confident wrong
        answers."""
        right = self.chosen == self.true
        positions = [
            [str(position), f"{right[mask].mean():.1%}", f"{(self.chosen == position).mean():.1%}",
             str(int(mask.sum()))]
            for position in range(self.probabilities.shape[1])
            if (mask := self.true == position).any()
        ]  # fmt: skip
        sure = self.probabilities.max(axis=1)
        wrong = np.flatnonzero(~right)
        worst = wrong[np.argsort(-sure[wrong], kind="stable")][:_WORST].tolist()
        shown = []
        for row in worst:
            sample = self.data[row]
            texts = (
                f"{sample[CONTEXT]} {sample[QUESTION]}".strip(),
                *(sample[CHOICES][index] for index in (self.true[row], self.chosen[row])),
            )
            shown.append([*map(section.beginning, texts), f"{sure[row]:.1%}"])
        return [
            Section(
                title=f"Positions of the right choice, {self.split} data",
                note="A model that has learned nothing may prefer a position.",
                columns=section.numbers(
                    "place, from 0", "accuracy", "share of the answers", "count"
                ),
                rows=positions,
            ),
            Section(
                title=f"Worst answers, {self.split} data",
                note=f"{len(wrong)} of {len(right)} answers are wrong.",
                columns=section.texts("question", "right choice", "answer")
                + section.numbers("probability"),
                rows=shown,
            ),
        ]
