"""The tasks: what each folder below `recipe/tasks/` declares in its module `spec`.

Specs import neither torch nor transformers, so that hyperparameters are read without these. What a
spec names is imported when it is needed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.spec import (
    CHOSEN_NAMES,
    PARTS_OF_SAMPLES,
    REJECTED_NAMES,
    Served,
    TaskSpec,
    name_stem,
    normalize_name,
)

_FOLDERS = sorted(path.parent.name for path in (Path(__file__).parent / "tasks").glob("*/spec.py"))
TASKS: Mapping[str, TaskSpec] = {
    spec.name: spec
    for folder in _FOLDERS
    for spec in importlib.import_module(f"recipe.tasks.{folder}.spec").SPECS
}
"""Each value of the hyperparameter `task`."""
SERVED: Mapping[str, Served] = {
    name: served
    for spec in sorted(TASKS.values(), key=lambda spec: spec.rank)
    for name, served in spec.served.items()
}
"""The tasks of requests that are merged into batches. Of those that could serve a model, the first
one does."""


def resolve(path: str) -> Any:
    """Return what a spec names by `module:name`, a module below `recipe/`."""
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(f"recipe.{module}"))


def served_as(name: str) -> str:
    """Return the task of requests that answers with the models of a task."""
    return next(iter(TASKS[name].served), TASKS[name].served_as)


def load(name: str) -> Any:
    """Return the class of a task, to be called with the job's channels and hyperparameters."""
    return resolve(f"tasks.{TASKS[name].folder}.task:TASK")


@dataclass(frozen=True, kw_only=True)
class NamesOfSamples:
    """Names of columns that belong to a sample of any task, normalized."""

    parts: frozenset[str]
    single: Mapping[str, bool]
    """Whether a name is known for targets only."""
    pairs: Mapping[frozenset[str], frozenset[str]]
    """Names that belong to a sample only together, and which of them are targets."""
    numbered: frozenset[str]
    """Names that belong to a sample only with a number appended."""


@functools.cache
def names_of_samples() -> NamesOfSamples:
    """Return the names of columns that belong to a sample of any task."""
    single = dict.fromkeys(map(normalize_name, (*CHOSEN_NAMES, *REJECTED_NAMES)), True)
    pairs: dict[frozenset[str], frozenset[str]] = {}
    numbered: set[str] = set()
    for form in itertools.chain.from_iterable(spec.forms for spec in TASKS.values()):
        if form.is_pair:
            is_target = form.columns[1].is_target
            for pair in form.pairs:
                targets = {normalize_name(pair[1])} if is_target else set()
                pairs[frozenset(map(normalize_name, pair))] = frozenset(targets)
        for column in form.columns[2 * form.is_pair :]:
            if column.is_numbered:
                numbered |= set(map(normalize_name, column.names))
                continue
            for name in column.names if column.is_content else ():
                single[normalize_name(name)] = column.is_target and single.get(
                    normalize_name(name), True
                )
    return NamesOfSamples(
        parts=frozenset(map(normalize_name, PARTS_OF_SAMPLES)),
        single=single,
        pairs=pairs,
        numbered=frozenset(numbered),
    )


def names_target(name: str) -> bool:
    """Return whether a name is known for what is learned, and never for an input."""
    keys = {normalize_name(name), name_stem(name)}
    if len(keys) > 1 and name_stem(name) in names_of_samples().numbered:
        return False  # `choice_1` is one of several
    known = [single for key in keys if (single := names_of_samples().single.get(key)) is not None]
    return bool(known) and all(known)
