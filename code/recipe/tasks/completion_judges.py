"""Functions that judge completions, by name or of the user's rewards.py: rewards of task=grpo, and
scores of do_generate."""

from __future__ import annotations

import importlib.util
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe.errors import DataError, HyperparameterError, did_you_mean

FILE = "rewards.py"
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
_MARKED = re.compile(r"\\boxed\{([^{}]*)\}|####\s*(.+)|<answer>(.*?)</answer>", re.DOTALL)


class CheckedJudge:
    """A function that judges completions, whose results are checked.

    Args:
        name: By which TRL logs it.
        where: Returns the file and line of a prompt.
        kind: What messages call it.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], where: Callable[[Any], str],
        kind: str = "reward",
    ) -> None:  # fmt: skip
        self.__name__, self.function, self.where, self.kind = name, function, where, kind

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **given: Any) -> Any:
        """Return a number for each completion. Raise DataError if the function raises or returns
        something else."""
        name, first = f"{self.kind} {self.__name__}", self.where(prompts[0])
        try:
            rewards = self.function(prompts=prompts, completions=completions, **given)
        except Exception as error:
            raise DataError(
                f"The {name} raised {type(error).__name__}: {error}, for {len(prompts)} "
                f"completions, the first of {first}.",
                f"Correct the function in {FILE}; it gets prompts, completions and the columns of "
                "the data as lists of the same length.",
            ) from error
        if not isinstance(rewards, (list, tuple)) or len(rewards) != len(completions):
            count = f"{len(rewards)} values" if isinstance(rewards, (list, tuple)) else ""
            raise DataError(
                f"The {name} returned {count or type(rewards).__name__} for "
                f"{len(completions)} completions, the first of {first}.",
                "Return a list with a number for each.",
            )
        for prompt, reward in zip(prompts, rewards, strict=True):
            is_number = isinstance(reward, numbers.Real) and math.isfinite(reward)
            if not is_number and reward is not None:
                raise DataError(
                    f"The {name} is {reward!r} for a completion of {self.where(prompt)}.",
                    f"Return a finite number, or None where the {self.kind} does not apply.",
                )
        return list(rewards)


def text_of(completion: Any) -> str:
    """Return the text of a completion, which may be a list of messages."""
    return completion if isinstance(completion, str) else "".join(m["content"] for m in completion)


def exact_answer(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 if a completion is the answer, or ends with it: after a mark (`\\boxed{}`, `####`,
    `<answer>`), or as its last number; else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(_is_answer(text_of(completion), str(wanted))) for completion, wanted in pairs]


def _is_answer(text: str, wanted: str) -> bool:
    def last(text: str) -> str:
        marked = [next(filter(None, groups), "") for groups in _MARKED.findall(text)]
        return (marked[-1] if marked else text).strip()

    written, right = last(text), last(wanted)
    numbers = _NUMBER.findall(written)
    if _NUMBER.fullmatch(right) and numbers:
        return float(numbers[-1].replace(",", "")) == float(right.replace(",", ""))
    return written.casefold() == right.casefold()


def find_judges(
    setting: str,
    names: Sequence[str],
    known: Mapping[str, Callable[..., Any]],
    code: Path | None,
) -> dict[str, Callable[..., Any]]:
    """Return functions by their names.

    Args:
        setting: The hyperparameter with the names.
        known: Those that need no file.
        code: The channel code, which may have the user's rewards.py, if there is one.

    Raises:
        HyperparameterError: A name is unknown, or rewards.py cannot be imported.
    """
    base = Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    files = (folder / FILE for folder in (code, base / "code") if folder is not None)
    if (file := next((path for path in files if path.is_file()), None)) is not None:
        known = {**known, **_functions(file)}
    for name in names:
        if name not in known:
            where = f"{file} has no function of this name" if file else f"there is no {FILE}"
            raise HyperparameterError(
                f"Hyperparameter {setting} has value {','.join(names)!r}, but {name} is not "
                f"known, and {where}.",
                did_you_mean(name, known)
                or f"Give some of {', '.join(known)}; or put {FILE} into a channel called code.",
            )
    return {name: known[name] for name in names}


def _functions(file: Path) -> Mapping[str, Any]:
    """Return the functions of a file."""
    spec = importlib.util.spec_from_file_location("rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise HyperparameterError(
            f"{file} cannot be imported: {type(error).__name__}: {error}.", "Correct it."
        ) from error
    return {name: value for name, value in vars(module).items() if callable(value)}
