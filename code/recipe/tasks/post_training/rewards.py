"""Rewards of task=grpo: by name, or of the user's rewards.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipe.tasks.completion_judges import CheckedJudge, exact_answer, text_of
from recipe.tasks.post_training.data import ANSWER

_CACHE = 0.2
"""The last share of max_completion_length in which `length` falls to -1."""


def usual_rewards(length: int) -> dict[str, Callable[..., Any]]:
    """Return the rewards by name. `length` is the most tokens of a completion."""
    rewards: Any = importlib.import_module("trl.rewards")  # takes a second

    def has_format(completions: Sequence[Any], **_: Any) -> Any:
        messages = [[{"content": text_of(completion)}] for completion in completions]
        return rewards.think_format_reward(messages)

    return {
        "exact_answer": exact_answer,
        "format": has_format,
        "length": rewards.get_soft_overlong_punishment(length, max(1, int(_CACHE * length))),
    }


def try_out(functions: Sequence[CheckedJudge], rows: Sequence[Mapping[str, Any]]) -> None:
    """Call the functions for an empty completion of each row, and for its answer if it has one, so
    that their mistakes show before training."""
    for text in ("", None):
        if text is None and any(ANSWER not in row for row in rows):
            return
        texts = [str(row[ANSWER]) if text is None else text for row in rows]
        is_chat = isinstance(rows[0]["prompt"], list)
        completions = [[{"role": "assistant", "content": t}] for t in texts] if is_chat else texts
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        for function in functions:
            function(
                [row["prompt"] for row in rows],
                completions,
                completion_ids=[[1] * len(t) for t in texts],
                **columns,
            )
