"""Choose the column of each role of a task by its name.

A hyperparameter decides, then the columns of the training data, then known names (`choose`). A
column that belongs to a sample and would not be read ends the job (`check_parts`): a text that is
silently left out makes a wrong model.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_content import (
    possible_labels,
    values_of,
)
from recipe.data.column_names import (
    ANSWERS_COMPARED,
    IMAGES,
    SURE_LABELS,
    TEXT,
    plain,
)
from recipe.data.files.part import Part, is_list, is_string
from recipe.errors import DataError, near
from recipe.settings import DataSettings

_SHOWN = 8
_CHOICES = {"choices", "options", "endings", "alternatives", "candidates", "distractors"}
_CHOICE = re.compile(
    r"(choice|option|opt|op|ending|alternative|answer|distractor|sol)?_?(\d+|[a-e])"
)
"""What columns of answers to choose from are called."""
SCRIPT = (
    "Train a model of images and texts by a script of your own (TRL's SFTTrainer; "
    "docs/TRAINING.md, Your own script), or remove these rows."
)
"""What to do with conversations that are more than texts."""


@dataclass(frozen=True)
class Role:
    """What a column of a sample is for."""

    what: str
    names: Sequence[str]
    """What such columns are called (`plain`), most telling first."""
    key: str = ""
    """The hyperparameter that names the column, if there is one."""
    is_optional: bool = False
    parts: Collection[str] = ()
    """What columns are called that belong to this one. One with values ends the job, unless the
    hyperparameter names this column."""


def check_named(part: Part, given: DataSettings) -> None:
    """Check that the columns exist that hyperparameters name, all at once.

    Raises:
        DataError: one or more do not.
    """
    names = part.table.column_names
    wrong: dict[str, str] = {}
    for item in dataclasses.fields(given):
        value = getattr(given, item.name)
        if not value or not item.name.endswith(("_column", "_columns")):
            continue
        for name in [value] if value in names else [part.strip() for part in value.split(",")]:
            # A column of records is named without its fields.
            if not any(column == name or column.startswith(f"{name}.") for column in names):
                wrong[name] = item.name
    if wrong:
        values = ", ".join(f"{key} has value {name!r}" for name, key in wrong.items())
        meant = " ".join(dict.fromkeys(filter(None, (near(name, names) for name in wrong))))
        raise DataError(
            f"{values}, but {part.path} has the columns {', '.join(names)}.",
            meant or f"Name one of them in {' and '.join(dict.fromkeys(wrong.values()))}.",
        )


def first_known(part: Part, known: Sequence[str], taken: Collection[str] = ()) -> str | None:
    """Return the column with the first of the `known` names, or None; none of those `taken`."""
    free = [name for name in reversed(part.table.column_names) if name not in taken]
    by_plain = {plain(name): name for name in free}
    return next((by_plain[name] for name in known if name in by_plain), None)


def choose(
    part: Part,
    alternatives: Sequence[Sequence[Role]],
    given: DataSettings,
    like: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the column of each role of the first alternative that the table has.

    A hyperparameter names a column; otherwise it is that of the training data (`like`), or the one
    with a known name. If hyperparameters name columns, alternatives without any of them are out.

    Raises:
        DataError: a column that is named does not exist; no alternative has its columns (the
            message lists those of the first one); or others belong to them and would not be read.
    """
    check_named(part, given)
    names, like = part.table.column_names, like or {}
    keys = {role.key for roles in alternatives for role in roles} - {""}
    named = {key: getattr(given, key) for key in keys if getattr(given, key)}
    missing: list[Role] = []
    for roles in alternatives:
        if not like.keys() <= {role.what for role in roles}:
            continue
        if named and not named.keys() & {role.key for role in roles}:
            continue
        chosen: dict[str, str] = {}
        for role in roles:
            column = named.get(role.key) or like.get(role.what)
            if column is None and not like:
                column = first_known(part, role.names, {*named.values(), *chosen.values()})
            if column in names:
                chosen[role.what] = str(column)
        required = [role for role in roles if not role.is_optional or role.what in like]
        absent = [role for role in required if role.what not in chosen]
        if not absent:
            break
        missing = missing or absent
    else:
        if like:
            lacking = " and ".join(repr(like.get(role.what)) for role in missing)
            raise DataError(
                f"{part.path} lacks {lacking}, read in the training data: its columns are "
                f"{', '.join(names)}.",
                "Give the columns the same names in all files.",
            )
        raise unknown(part, missing)
    if len(set(chosen.values())) < len(chosen):
        raise DataError(
            f"One column of {part.path} is named for two things: {chosen}.",
            f"Name a different column in each of {', '.join(role.key for role in roles)}.",
        )
    for role in roles:
        if role.parts and role.what in chosen and role.key not in named:
            if len(roles) > 1:
                check_choices(part)
            leave = f"{role.key}={chosen[role.what]}" if role.key else ""
            check_parts(part, chosen.values(), role.parts, leave)
    return chosen


def unknown(part: Part, missing: Sequence[Role]) -> DataError:
    """Return the refusal of a table without a known column for each role."""
    plural = "s" if len(missing) > 1 else ""
    pronoun = "them" if plural else "it"
    keys = [role.key or role.what for role in missing]
    remedy = f"Name {pronoun} in the hyperparameter{plural} {' and '.join(keys)}."
    if not all(role.key for role in missing):
        remedy = f"Rename {pronoun} to {' and '.join(keys)}."
    return DataError(
        f"The {' and '.join(role.what for role in missing)} column{plural} of {part.path} "
        f"{'are' if plural else 'is'} not known by name: its columns are "
        f"{', '.join(part.table.column_names)}.",
        remedy,
    )


def several_labels(part: Part, names: Sequence[str]) -> DataError:
    """Return the refusal of a table in which several columns may be the label."""
    return DataError(
        f"{part.path} has {', '.join(map(repr, names))}, which may be the labels: the label column "
        "is not known for sure by its name.",
        f"Give label_column={' or label_column='.join(names[:_SHOWN])}.",
    )


def check_choices(part: Part) -> None:
    """Raise DataError if there are answers to choose from, in lists or in columns as `option_1`.

    Without them, a model could only learn the labels of the right answers by heart.
    """
    found, by_stem = [], defaultdict(list)
    for name in part.table.column_names:
        kind, match = part.table.schema.field(name).type, _CHOICE.fullmatch(plain(name))
        if _CHOICES & {*plain(name).split(".")}:
            # In a CSV, lists and records are written as strings.
            values = values_of(part, name) if is_string(kind) else []
            is_written = bool(values) and all(value.lstrip()[:1] in ("[", "{") for value in values)
            found += [name] if is_list(kind) or "." in name or is_written else []
        elif match and (is_string(kind) or (match[1] and pa.types.is_integer(kind))):
            by_stem[match[1]].append(name)
    found += [name for stem, of in by_stem.items() if len(of) > (1 if stem else 2) for name in of]
    if found:
        raise DataError(
            f"{part.path} has answers to choose from in {', '.join(map(repr, found))}: a model "
            "that does not read them learns to guess.",
            "Give a question, a list called choices and the right one called answer "
            "(task=multiple-choice); or a row for each answer, with label 1 for the right one and "
            "0 for the others (task=reranking); or name the columns to read "
            "(text_column and label_column, or prompt_column and completion_column) to leave them "
            "out.",
        )


def check_parts(part: Part, read: Collection[str], names: Collection[str], leave: str) -> None:
    """Raise DataError if a column that is not read belongs to what is, by its name.

    Args:
        read: The columns that are read.
        names: Plain names, without numbers; of a record, its own.
        leave: The hyperparameters that leave the column out; '' if none does.
    """
    for column in part.table.column_names:
        name = re.sub(r"\d+", "", plain(column).partition(".")[0])
        is_label = name in SURE_LABELS
        if name not in names or column in read or not _has_values(part, column):
            continue
        if is_label and not possible_labels(part, [column]):
            continue
        remedy = f"Write them into what is read, or give {leave} to leave {column!r} out."
        if name in IMAGES:
            remedy = SCRIPT
        elif not leave:
            remedy = f"Write them into what is read, or remove the column {column!r}."
        elif name in ANSWERS_COMPARED:
            remedy = "Give task=preference to learn from both answers, or remove the column."
        elif is_label:
            remedy = f"Keep the rows that are wanted, or give {leave} to learn all rows alike."
        elif name == TEXT:
            remedy = f"Give text_column={column} to learn it as a whole, or remove the column."
        raise DataError(
            f"{part.path} has values in column {column!r}, which belong to a sample and would not "
            "be read.",
            remedy,
        )


def _has_values(part: Part, name: str) -> bool:
    nothing: Sequence[Any] = (None, "", "[]", "{}", "null", [])
    cells = (cell for _, batch in part.batches([name]) for cell in batch[name].to_pylist())
    return any((cell.strip() if isinstance(cell, str) else cell) not in nothing for cell in cells)
