"""Rewards of task=grpo: by name, or of the user's rewards.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from recipe.data.column_names import PROMPT
from recipe.errors import DataError, HyperparameterError
from recipe.tasks.base import named_splits
from recipe.tasks.completion_judges import FILE, CheckedJudge, exact_answer, find_judges, text_of
from recipe.tasks.post_training.data import ANSWER, Preferences

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


def find_rewards(
    names: Sequence[str], data: Preferences, generated: int, code: Path | None
) -> list[CheckedJudge]:
    """Return the reward functions of these names.

    Args:
        generated: The most tokens of a completion.
        code: The channel code, if there is one.

    Raises:
        HyperparameterError: There are no names, one is unknown, or rewards.py cannot be imported.
        DataError: A row has no answer with which `exact_answer` could compare.
    """
    if not names:
        raise HyperparameterError(
            "task=grpo needs rewards, and reward_funcs is not given.",
            "Give reward_funcs=exact_answer, which compares with the column answer, format, "
            f"length, or the name of a function in {FILE} (docs/TRAINING.md).",
        )
    splits = named_splits(data)
    if "exact_answer" in names and ANSWER not in data.train.column_names:
        raise HyperparameterError(
            f"Hyperparameter reward_funcs has value {','.join(names)!r}, and the data has no "
            "column answer.",
            "Call the column of right answers answer.",
        )
    for use, split in splits.items() if "exact_answer" in names else ():
        lacking = [n for n, answer in enumerate(split[ANSWER]) if answer in (None, "")]
        if lacking:
            raise DataError(
                f"{len(lacking)} rows have no answer: {data.where(use, lacking[0])}.",
                "reward_funcs=exact_answer compares with it: give it, or remove the rows.",
            )

    def where(prompt: Any) -> str:
        for use, split in splits.items():
            for number, other in enumerate(split[PROMPT]):
                if other == prompt:
                    return data.where(use, number)
        return repr(prompt)[:80]

    functions = find_judges("reward_funcs", names, usual_rewards(generated), code)
    return [CheckedJudge(name, functions[name], where) for name in names]


def try_out(functions: Sequence[CheckedJudge], train: Dataset) -> None:
    """Call the functions for an empty completion of the first rows, and for their answers if they
    have any, so that their mistakes show before training."""
    rows = train.select(range(min(2, len(train)))).to_list()
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
