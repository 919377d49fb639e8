"""Scores of answers: by name, or functions of the user's rewards.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recipe.tasks import text_scores
from recipe.tasks.causal_lm.exchanges import PromptAnswer
from recipe.tasks.completion_judges import exact_answer, text_of

TOOL_CALLS = "tool_calls"
Score = Callable[..., Sequence[float | None]]
"""Takes `prompts`, `completions` and `answer`, as a reward of task=grpo does."""


def exact_match(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for each completion that is the answer, but for white space around it, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(text_of(text).strip() == true.strip()) for text, true in pairs]


def valid_json(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each completion that is a JSON value, else 0."""
    return [float(_is_json(text_of(text))) for text in completions]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


BY_ANSWER: Mapping[str, Score] = {
    "exact_match": exact_match, "exact_answer": exact_answer, "valid_json": valid_json,
}  # fmt: skip
"""Shares of right answers, which are reported in per cent."""
NAMES = (*BY_ANSWER, *text_scores.ROUGE, TOOL_CALLS)


def calls_in(text: str) -> list[str]:
    """Return the calls of tools in a text, JSON objects of a name and arguments, in one order."""
    return sorted(json.dumps(call, sort_keys=True) for call in _calls(text))


def _calls(text: str) -> Iterator[Any]:
    start, decoder = text.find("{"), json.JSONDecoder()
    while start >= 0:
        end = start + 1
        try:
            value, after = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value = {}
        given = value.get("arguments", value.get("parameters"))
        if isinstance(value.get("name"), str) and given is not None:
            if isinstance(given, str) and _is_json(given):
                given = json.loads(given)
            yield value["name"], given
            end = after
        start = text.find("{", end)


def right_calls(text: str, exchange: PromptAnswer, written: str) -> float:
    """Return 1 if an answer calls the tools that the data calls, with equal arguments, or calls
    none as the data does; else 0.

    Args:
        written: The turn of the data as the chat template writes it. If it writes calls in another
            form than JSON, the texts are compared.
    """
    calls = calls_in(written)
    if exchange.turn.get("tool_calls") and not calls:
        return float(text.split() == written.split())
    return float(calls_in(text) == (calls if exchange.turn.get("tool_calls") else []))


def score(
    names: Mapping[str, Score | None],
    exchanges: Sequence[PromptAnswer],
    texts: Sequence[str],
    written: Callable[[PromptAnswer], str],
) -> dict[str, float]:
    """Return the scores of answers: in per cent, those of functions of rewards.py as these return
    them.

    Args:
        names: The scores, with the functions of those in BY_ANSWER and rewards.py.
        written: Returns a turn of the data as the chat template writes it.
    """
    answers = [exchange.answer for exchange in exchanges]
    rouge = {}
    if any(name in text_scores.ROUGE for name in names):
        rouge = text_scores.score_rouge(texts, answers)
    scores = {}
    for name, function in names.items():
        if name in rouge:
            scores[name] = rouge[name]
            continue
        if function is None:
            pairs = zip(texts, exchanges, strict=True)
            values = [right_calls(text, one, written(one)) for text, one in pairs]
        else:
            prompts = [exchange.prompt for exchange in exchanges]
            shaped = [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            given = function(prompts=prompts, completions=shaped, answer=answers)
            values = [value for value in given if value is not None]
        scale = 100 if name in NAMES else 1
        scores[name] = scale * float(np.mean(values)) if values else float("nan")
    return scores
