"""Find the answers to questions in the model's outputs for windows, and score them.

The scores are those of SQuAD's official scripts (1.1, and 2.0 if questions may have no answer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe.batching.window_batches import NOWHERE, Windows
from recipe.models.answer_spans import find_spans
from recipe.reports.last_answers import Mistake, PredictedAnswers
from recipe.tasks.evaluation import exact_match, word_f1

LONGEST_ANSWER = 30
_NONE = "(no answer)"


@dataclass(frozen=True, kw_only=True)
class SpanAnswer:
    """The model's answer to a question."""

    text: str
    """Empty if there is no answer."""
    start: int
    """Its first character in the context; -1 without an answer."""
    true: Sequence[str]

    @property
    def exact(self) -> float:
        """Return 1 if it equals a true answer, apart from case, articles and punctuation."""
        return max(exact_match(text, self.text) for text in self.true or [""])

    @property
    def f1(self) -> float:
        """Return the F1 of its words, compared with the closest true answer."""
        return max(word_f1(text, self.text) for text in self.true or [""])


def scores(answers: Sequence[SpanAnswer], has_unanswerable: bool) -> dict[str, float]:
    """Return percentages: exact_match and f1 of all questions. If some have no answer, also both of
    those that have one, and no_answer: the share of the others that got none."""
    metrics = {"exact_match": _mean([answer.exact for answer in answers]),
             "f1": _mean([answer.f1 for answer in answers])}  # fmt: skip
    without = [answer for answer in answers if not answer.true]
    if has_unanswerable or without:
        rest = [answer for answer in answers if answer.true]
        if rest:
            metrics["answerable_exact_match"] = _mean([answer.exact for answer in rest])
            metrics["answerable_f1"] = _mean([answer.f1 for answer in rest])
        if without:
            metrics["no_answer"] = _mean([answer.exact for answer in without])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return 100 * sum(values) / max(1, len(values))


def find(
    outputs: np.ndarray[Any, Any],
    windows: Windows,
    rows: Sequence[Mapping[str, Any]],
    may_be_none: bool,
) -> list[SpanAnswer]:
    """Return the best answer to each question over its windows, as transformers' run_qa.py does.

    Args:
        outputs: [windows, 1 + 2 * tokens], as `recipe.models.token_heads.patch_forward_for_spans`
            has them.
        rows: The questions, by the numbers in the windows' labels.
        may_be_none: Whether a question may have no answer.
    """
    tokens = (outputs.shape[1] - 1) // 2
    best = [(-np.inf, 0, 0)] * len(rows)
    nothing = [np.inf] * len(rows)
    for window, (_, _, number, nowhere) in enumerate(windows.labels.tolist()):
        span = windows.span(window)
        begins, ends = windows.begins[span], windows.ends[span]
        both = outputs[window, 1:].reshape(2, tokens)[:, : len(begins)]
        none, likely = find_spans(both, begins != NOWHERE, nowhere, 1, LONGEST_ANSWER)
        nothing[number] = min(nothing[number], float(none))
        for first, last, score in likely:
            best[number] = max(best[number], (score, int(begins[first]), int(ends[last])))
    answers = []
    for row, none, (score, begin, stop) in zip(rows, nothing, best, strict=True):
        is_none = score == -np.inf or (may_be_none and none > score)
        text = "" if is_none else row["context"][begin:stop]
        answers.append(SpanAnswer(text=text, start=-1 if is_none else begin, true=row["answers"]))
    return answers


@dataclass(frozen=True, kw_only=True)
class FoundAnswers(PredictedAnswers):
    """The model's last answers on the split that it is evaluated on."""

    ids: Sequence[str]
    questions: Sequence[str]
    answers: Sequence[SpanAnswer]

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the number and id of each question, the answer, its start, and the true answers."""
        for row, (name, answer) in enumerate(zip(self.ids, self.answers, strict=True)):
            yield {
                "row": row,
                "id": name,
                "answer": answer.text,
                "start": answer.start,
                "true": list(answer.true),
                "exact_match": answer.exact,
                "f1": round(answer.f1, 6),
            }

    @property
    def measure(self) -> str:
        return "F1"

    def __len__(self) -> int:
        return len(self.answers)

    def mistakes(self, most: int) -> tuple[int, list[Mistake]]:
        """Return the answers that equal no true one, those with the fewest words of it first."""
        wrong = [row for row, answer in enumerate(self.answers) if not answer.exact]
        wrong.sort(key=lambda row: self.answers[row].f1)
        return len(wrong), [
            Mistake(
                row=row,
                text=self.questions[row],
                true=" | ".join(self.answers[row].true) or _NONE,
                predicted=self.answers[row].text or _NONE,
                measure=self.answers[row].f1,
            )
            for row in wrong[:most]
        ]
