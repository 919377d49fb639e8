"""Hyperparameters that name columns: read them, and propose them where columns are not clear."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.files.part import DATE, Part, is_list, is_number, is_string
from recipe.errors import DataError, did_you_mean
from recipe.settings import COLUMN_SETTINGS, DataSettings, separated
from recipe.spec import Column, Kind, TaskSpec

_IDENTIFIER = re.compile(r"(?i:(^|[\s_.-])(id|idx|uid|uuid|guid|index))$|[a-z](Id|ID)$")
"""Names of columns that messages propose only if there are no others."""
_SHOWN_COLUMNS, _SHOWN_CHARS, _SHOWN_LINES = 12, 40, 8
_SAMPLE_ROWS = 1_000
_FLAGS = ("0", "1", "0.0", "1.0", "true", "false")
NOTHING: Sequence[object] = (None, "", "[]", "{}", "null", [])
"""Values of cells that hold nothing."""


class ColumnsError(DataError):
    """The columns of a file do not make the samples of a task.

    Args:
        lines: The hyperparameters that choose the columns, with the effect of each.
        advice: What else to do.
        missing: How many roles have no column; 0 if columns are ambiguous or would not be read.
        is_near: Whether any role has a column.
        is_close: Whether two or more have one, and a single role has none.
        is_rival: Whether columns of a sample would not be read, or which ones is not clear.
    """

    def __init__(
        self,
        message: str,
        lines: Sequence[str],
        advice: str = "",
        missing: int = 0,
        is_near: bool = True,
        is_close: bool = False,
        is_rival: bool = False,
    ) -> None:
        super().__init__(message, remedy(lines, advice))
        self.lines, self.advice = lines, advice
        self.missing, self.is_near, self.is_rival = missing, is_near, is_rival
        self.is_close = is_close


def remedy(lines: Sequence[str], advice: str = "") -> str:
    """Return the remedy to give one of some hyperparameters."""
    return " ".join(filter(None, (f"Give {'; or '.join(lines)}." if lines else "", advice)))


def several_candidates(
    part: Part, spec: TaskSpec, candidates: Mapping[Column, Sequence[str]], settings: DataSettings
) -> ColumnsError:
    """Return the refusal of a file in which several columns may have one role."""
    shown, choices = [], []
    for column, names in candidates.items():
        shown.append(f"{len(names)} columns may be the {column.role}: {examples(part, names)}")
        choices.append([f"{column.naming}{quoted(name)}" for name in names])
        if column.setting == "text_column" and len(names) == 2 and takes_pairs(spec):
            choices[-1].append(f"{column.naming}{quoted(','.join(names))} for a pair")
    lines = [_joined(line, settings) for line in itertools.product(*choices)]
    message = f"{part.path}: {'; '.join(shown)}."
    return ColumnsError(message, lines[:_SHOWN_LINES], is_rival=True)


def quoted(value: str) -> str:
    """Return a value for a message, in quotes if it has spaces."""
    return value if re.fullmatch(r"[^\s'\"]+", value) else repr(value)


def _joined(pairs: Sequence[str], settings: DataSettings) -> str:
    """Return a line of hyperparameters in which one `columns` names all roles, including given
    ones."""
    roles = [settings.columns] if settings.columns else []
    is_given = len(roles)
    roles += [pair.removeprefix("columns=") for pair in pairs if pair.startswith("columns=")]
    others = [pair for pair in pairs if not pair.startswith("columns=")]
    return " ".join([*others, *([f"columns={','.join(roles)}"] if len(roles) > is_given else [])])


def named_settings(settings: DataSettings) -> str:
    """Return the hyperparameters that name columns, for messages."""
    names = [name for name in (*COLUMN_SETTINGS, "columns") if getattr(settings, name)]
    return ", ".join(f"{name}={getattr(settings, name)}" for name in names)


def takes_pairs(spec: TaskSpec) -> bool:
    """Return whether a task reads pairs of texts."""
    return any(c.setting == "text_pair_column" for form in spec.forms for c in form.columns)


def naming_lines(
    part: Part, missing: Sequence[Column], read: Collection[str], settings: DataSettings
) -> list[str]:
    """Return the hyperparameters that name other columns of a file as the missing ones, or `...`.

    Args:
        read: The columns that have a role, or are ignored.
    """
    others = [name for name in part.table.column_names if name not in read]
    others = [name for name in others if not is_identifier(name)] or others
    others = [name for name in others if _sample(part, name)]

    def may_be(column: Column, name: str) -> bool:
        if column.is_repeated and not column.setting:
            return False  # its several columns cannot be named: `columns` takes one for each role
        if column.is_target and column.kind is not Kind.TEXT:
            return True
        if is_list(part.table.schema.field(name).type):
            return column.kind not in (Kind.TEXT, Kind.IMAGE)
        return column.kind is Kind.IMAGE or may_be_text(part, name)

    candidates = [[name for name in others if may_be(column, name)] for column in missing]
    sets = [names for names in itertools.product(*candidates) if len(set(names)) == len(names)]
    if not sets:
        return [_joined([f"{column.naming}..." for column in missing], settings)]
    if len(sets) > _SHOWN_LINES and len(missing) > 1:
        # The next refusal proposes the others.
        return naming_lines(part, missing[:1], read, settings)
    lines = [
        _joined(
            [f"{column.naming}{quoted(n)}" for column, n in zip(missing, names, strict=True)],
            settings,
        )
        for names in sets
    ]
    if len(missing) == 1 and missing[0].is_list:
        indicators = [name for name in others if is_flag(part, name)]
        if len(indicators) > 1:
            several = f"{missing[0].naming}{quoted(','.join(indicators))}"
            lines.insert(0, f"{several} for several labels")
    return lines[:_SHOWN_LINES]


def is_identifier(name: str) -> bool:
    """Return whether a column's name says that it holds identifiers of rows, or of other things."""
    return _IDENTIFIER.search(name) is not None


def may_be_text(part: Part, name: str) -> bool:
    """Return whether a column holds strings that are not all numbers or dates."""
    cells = _sample(part, name) if is_string(part.table.schema.field(name).type) else []
    return not all(is_number(cell) or DATE.fullmatch(cell.strip()) for cell in cells)


def is_flag(part: Part, name: str) -> bool:
    """Return whether a column holds only 0 and 1, or true and false."""
    if pa.types.is_nested(part.table.schema.field(name).type):
        return False
    values = part.distinct(name, len(_FLAGS)) or ["none"]
    return {str(value).lower() for value in values} <= {*_FLAGS}


def _sample(part: Part, name: str) -> list[Any]:
    """Return the values in the first rows of a column."""
    cells = part.table[name].slice(0, _SAMPLE_ROWS).to_pylist()
    return [cell for cell in cells if cell not in NOTHING]


def languages(part: Part, spec: TaskSpec) -> list[str]:
    """Return the hyperparameters that choose the languages of a column of translations."""
    patterns = {
        name.partition("{")[0]
        for form in spec.forms
        for name in (() if form.needs_task else form.columns[0].names)
        if "{" in name and not name.startswith("{")
    }
    codes = [
        name.removeprefix(pattern)
        for pattern in patterns
        for name in part.table.column_names
        if name.startswith(pattern)
    ]
    return [
        f"source_lang={source} target_lang={target}"
        for source, target in itertools.permutations(codes, 2)
    ][:_SHOWN_LINES]


def examples(part: Part, names: Sequence[str]) -> str:
    """Return columns with an example of each, for messages: `'body' ('We waited ...')`."""
    shown = []
    for name in names[:_SHOWN_COLUMNS]:
        cells = part.table[name].slice(0, 100).to_pylist()
        value = next((cell for cell in cells if cell not in NOTHING), None)
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        cut = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        shown.append(f"{name!r} ({cut!r})" if isinstance(value, str) else f"{name!r} ({cut})")
    more = len(names) - _SHOWN_COLUMNS
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def check_named(part: Part, settings: DataSettings) -> None:
    """Check that the columns exist that hyperparameters name, all at once.

    Raises:
        DataError: one or more do not.
    """
    names = part.table.column_names
    requested = {key: split_names(part, value) for key in COLUMN_SETTINGS
                 if (value := getattr(settings, key))}  # fmt: skip
    requested["columns"] = list(settings.columns_by_role.values())
    _check_exist(requested, names, f"{part.path} has")


def check_ignored(parts: Sequence[Part], settings: DataSettings) -> None:
    """Check that some file has each column that ignore_columns names.

    Raises:
        DataError: no file has one or more.
    """
    names = list(dict.fromkeys(name for part in parts for name in part.table.column_names))
    where = f"{parts[0].path} has" if len(parts) == 1 else "the files have"
    _check_exist({"ignore_columns": settings.ignored_columns}, names, where)


def _check_exist(
    requested: Mapping[str, Sequence[str]], names: Sequence[str], which_have: str
) -> None:
    wrong = {
        name: key
        for key, columns in requested.items()
        for name in columns
        # A column of records is named without its fields.
        if not any(column == name or column.startswith(f"{name}.") for column in names)
    }
    if wrong:
        values = ", ".join(f"{key} has value {name!r}" for name, key in wrong.items())
        meant = " ".join(dict.fromkeys(filter(None, (did_you_mean(name, names) for name in wrong))))
        raise DataError(
            f"{values}, but {which_have} the columns {', '.join(names)}.",
            meant or f"Name one of them in {' and '.join(dict.fromkeys(wrong.values()))}.",
        )


def split_names(part: Part, value: str) -> list[str]:
    """Return the columns that a value names: one whose name has commas, or several."""
    return [value] if value in part.table.column_names else separated(value)
