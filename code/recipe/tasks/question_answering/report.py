"""Find the answers to questions in the model's outputs for windows, score them, and show them.

The scores are those of SQuAD's official scripts (1.1, and 2.0 if questions may have no answer).
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recipe.reports import section
from recipe.reports.section import Section
from recipe.tasks.question_answering.tokens import NOWHERE, Windows

_BEST, LONGEST_ANSWER = 20, 30
_EXAMPLES, _SHOWN_CHARS = 12, 240
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The model's answer to a question."""

    question: str
    context: str
    text: str
    """Empty if there is no answer."""
    start: int
    """Its first character in the context; -1 without an answer."""
    margin: float
    """The difference between its logits and those of no answer (or of the next best answer)."""
    true: Sequence[str]

    @property
    def exact(self) -> float:
        """Return 1 if it equals a true answer, apart from case, articles and punctuation."""
        return max(float(normal(text) == normal(self.text)) for text in self.true or [""])

    @property
    def f1(self) -> float:
        """Return the F1 of its words, compared with the closest true answer."""
        return max(f1_of(text, self.text) for text in self.true or [""])


def normal(text: str) -> str:
    """Return a text normalised as in SQuAD's scripts."""
    bare = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def f1_of(true: str, predicted: str) -> float:
    """Return F1 of the words of one text against those of another."""
    true_words, predicted_words = normal(true).split(), normal(predicted).split()
    if not true_words or not predicted_words:
        return float(true_words == predicted_words)
    common = sum((Counter(true_words) & Counter(predicted_words)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted_words), common / len(true_words)
    return 2 * precision * recall / (precision + recall)


def scores(answers: Sequence[Answer], has_unanswerable: bool) -> dict[str, float]:
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
    outputs: Array, windows: Windows, rows: Sequence[Mapping[str, Any]], may_be_none: bool
) -> list[Answer]:
    """Return the best answer to each question over its windows, as run_qa.py of transformers finds
    it.

    Args:
        outputs: [windows, 1 + 2 * tokens], as `recipe.models.token_heads.patch_forward_for_spans`
            has them.
        rows: The questions, by the numbers in the windows' labels.
        may_be_none: Whether a question may have no answer.
    """
    tokens = (outputs.shape[1] - 1) // 2
    windows_of_row: dict[int, list[int]] = defaultdict(list)
    for window, number in enumerate(windows.labels[:, 2].tolist()):
        windows_of_row[number].append(window)
    answers = []
    for number, row in enumerate(rows):
        nothing = np.inf
        candidates: list[tuple[float, int, int]] = []
        for window in windows_of_row[number]:
            span = windows.span(window)
            begins, ends = windows.begins[span], windows.ends[span]
            length = len(begins)
            start = outputs[window, 1 : 1 + length]
            end = outputs[window, 1 + tokens : 1 + tokens + length]
            nowhere = int(windows.labels[window, 3])
            nothing = min(nothing, float(start[nowhere] + end[nowhere]))
            inside = begins != NOWHERE
            firsts, lasts = (
                np.argsort(-np.where(inside, logits, -np.inf), kind="stable")[:_BEST]
                for logits in (start, end)
            )
            candidates += [
                (float(start[first] + end[last]), int(begins[first]), int(ends[last]))
                for first in firsts
                for last in lasts
                if inside[first] and inside[last] and first <= last < first + LONGEST_ANSWER
            ]
        candidates.sort(reverse=True)
        score, begin, stop = candidates[0] if candidates else (-np.inf, 0, 0)
        others = [rival for rival, *edges in candidates if edges != [begin, stop]]
        rival = nothing if may_be_none else max(others, default=score)
        is_none = not candidates or (may_be_none and nothing > score)
        answers.append(
            Answer(
                question=row["question"],
                context=row["context"],
                text="" if is_none else row["context"][begin:stop],
                start=-1 if is_none else begin,
                margin=float(nothing - score if is_none else score - rival),
                true=row["answers"],
            )
        )
    return answers


@dataclass(frozen=True, kw_only=True)
class FoundAnswers:
    """The model's last answers on the split that it is evaluated on."""

    split: str
    ids: Sequence[str]
    answers: Sequence[Answer]

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

    def sections(self) -> list[Section]:
        """Return scores of the kinds of questions, and the wrong answers, most confident first."""
        first_words = [(normal(answer.question).split() or [""])[0] for answer in self.answers]
        groups = {
            "all": self.answers,
            "with an answer": [answer for answer in self.answers if answer.true],
            "without an answer": [answer for answer in self.answers if not answer.true],
        }
        for word, _ in Counter(first_words).most_common(8):
            is_first = (other == word for other in first_words)
            groups[f"{word} ..."] = list(itertools.compress(self.answers, is_first))
        rows = [
            [name, f"{_mean([member.exact for member in members]):.1f}",
             f"{_mean([member.f1 for member in members]):.1f}", str(len(members))]
            for name, members in groups.items() if members
        ]  # fmt: skip
        wrong = sorted(
            (answer for answer in self.answers if answer.f1 < 1), key=lambda one: -one.margin
        )
        worst = []
        for answer in wrong[:_EXAMPLES]:
            start = max(0, answer.start - _SHOWN_CHARS // 2)
            shown = answer.context[start : start + _SHOWN_CHARS]
            is_cut = start + len(shown) < len(answer.context)
            worst.append([
                answer.question,
                f"{'... ' * bool(start)}{shown}{' ...' * is_cut}",
                " | ".join(dict.fromkeys(answer.true)) or "(none)",
                answer.text or "(none)",
                f"{answer.f1:.0%}",
            ])  # fmt: skip
        return [
            Section(
                title=f"Questions, {self.split} data",
                columns=section.texts("questions") + section.numbers("exact match", "F1", "count"),
                rows=rows,
            ),
            Section(
                title=f"Worst answers, {self.split} data",
                note=f"{len(wrong)} of {len(self.answers)} answers are not completely correct.",
                columns=section.texts("question", "context", "true", "answer")
                + section.numbers("F1"),
                rows=worst,
            ),
        ]
