"""Multiple choice: which of some answers to a question, or endings of a text, is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recipe.backend import bounds, loading
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import BadRequest, Request, read_record
from recipe.backend.rows import Reading
from recipe.backend.served_task import ServedTask
from recipe.models.sources.origin import Origin
from recipe.tasks.multiple_choice.model import ScorerOfChoices, pairs_of
from recipe.tasks.multiple_choice.spec import SPECS

Question = tuple[str, str, list[str]]
"""A context (may be empty), a question, and its choices."""


@dataclass(frozen=True, kw_only=True)
class Chooser(ServedTask):
    """A saved model of multiple choice."""

    served = SPECS[0].served["multiple-choice"]
    loaded: LoadedModel

    @classmethod
    def load(cls, origin: Origin) -> Chooser:
        """Return the model that `origin` names.

        Raises:
            ModelError: It cannot be loaded.
        """
        return cls(loaded=loading.load(origin, ScorerOfChoices, reading=Reading.LABELS))

    def example(self, text: str) -> Request:
        return Request(inputs=[{"question": text, "choices": ["a", "b"]}])

    def prepare(self, request: Request) -> Request:
        request = request.checked(set(), "multiple-choice")
        questions = request.read(a_question)
        owners = [index for index, (*_, choices) in enumerate(questions) for _ in choices]
        bounds.hold(Bound.ROWS, len(owners))
        bounds.hold(Bound.ANSWER, 2 * len(owners))
        pairs = [pair for question in questions for pair in pairs_of(*question)]
        prepared = self.loaded.encode(request, pairs)
        truncated = sorted({owners[index] for index in prepared.truncated})
        return replace(prepared, values=questions, truncated=truncated)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request `{"choice", "index", "scores"}` for each question.

        Scores are the softmax over the choices, in their order.
        """
        answers: list[Any] = []
        for prepared, rows in zip(
            requests, self.loaded.rows(requests, Reading.LABELS), strict=True
        ):
            logits, entries = iter(rows), []
            for _, _, choices in prepared.values:
                scores = torch.stack([next(logits)[0] for _ in choices]).softmax(-1)
                best = int(scores.argmax())
                entries.append({"choice": choices[best], "index": best, "scores": scores.tolist()})
            answers.append(prepared.answer(entries, single=prepared.single))
        return answers


def a_question(value: Any) -> Question:
    """Return an input's context, question and choices. Raise BadRequest if one is missing."""
    cells = read_record(value, Chooser.served.inputs)
    question, choices = cells["question"], cells["choices"]
    if len(choices) < 2 or not all(text.strip() for text in (question, *choices)):
        raise BadRequest(
            f"A question needs two or more choices, and no text may be empty: {str(choices)[:60]}."
        )
    return cells.get("context", ""), question, choices
