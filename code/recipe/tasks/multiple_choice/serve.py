"""Multiple choice: which of some answers to a question, or endings of a text, is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipe.backend import bounds, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import Answers, BadRequest, Prepared, Request, a_text
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.saved.origin import Origin
from recipe.backend.served_task import ServedTask
from recipe.tasks.multiple_choice.model import ScorerOfChoices, pairs_of
from recipe.tasks.multiple_choice.spec import SPECS
from recipe.tokenization.encoding import encode_pairs

_KEYS = frozenset({"question", "choices"})
_EXAMPLE = (
    'Send for example {"inputs": {"question": "Where does the sun rise?", "choices": ["in the '
    'east", "in the west"]}}, and maybe a "context".'
)
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

    def prepare(self, request: Request) -> Prepared:
        request = request.checked(set(), "multiple-choice")
        inputs = request.read(a_question)
        rows = sum(len(choices) for _, _, choices in inputs.values)
        bounds.hold(Bound.ROWS, rows)
        bounds.hold(Bound.ANSWER, 2 * rows)
        prepared: list[list[TokenRow]] = []
        truncated, read = [], 0
        limit = self.loaded.max_length
        for index, question in enumerate(inputs.values):
            pairs = pairs_of(*question)
            prepared.append([])
            for first, second in pairs:
                turns.pause()
                bounds.hold_text(first, second)
                ids, types = encode_pairs(self.loaded.tokenizer, [first], [second], limit)
                prepared[-1].append(TokenRow(ids[0], types[0] if types else None))
            read += sum(len(row.ids) for row in prepared[-1])
            bounds.hold(Bound.READ, read)
            if any(
                len(row.ids) == limit and self.loaded.is_longer(pair, limit)
                for row, pair in zip(prepared[-1], pairs, strict=True)
            ):
                truncated.append(index)
        sizes = [len(row.ids) for some in prepared for row in some]
        return Prepared(
            request=request, inputs=inputs, sizes=sizes, truncated=truncated, work=prepared
        )

    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Return for each request `{"choice", "index", "scores"}` for each question.

        Scores are the softmax over the choices, in their order.
        """
        every_row = [row for prepared in requests for rows in prepared.work for row in rows]
        logits = iter(self.loaded.forward(every_row, Reading.LABELS))
        answers: list[Any] = []
        for prepared in requests:
            entries = []
            for (_, _, choices), rows in zip(prepared.inputs.values, prepared.work, strict=True):
                scores = torch.stack([next(logits)[0] for _ in rows]).softmax(-1)
                best = int(scores.argmax())
                entries.append({"choice": choices[best], "index": best, "scores": scores.tolist()})
            answers.append(Answers(entries, prepared.truncated, prepared.request.single))
        return answers


def a_question(value: Any) -> Question:
    """Return an input's context, question and choices.

    Raises:
        BadRequest: One of them is missing or empty.
    """
    if isinstance(value, bytes):
        a_text(value)
    if not isinstance(value, dict) or not _KEYS <= set(value) <= {*_KEYS, "context"}:
        raise BadRequest(
            f"An input is {str(value)[:60]!r}, not a question with its choices. {_EXAMPLE}"
        )
    choices = value["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise BadRequest(f"choices is {str(choices)[:60]!r}, not a list of two or more. {_EXAMPLE}")
    texts = [a_text(text) for text in (value.get("context", ""), value["question"], *choices)]
    if not all(text.strip() for text in texts[1:]):
        raise BadRequest(f"A question or a choice is empty. {_EXAMPLE}")
    return texts[0], texts[1], texts[2:]
