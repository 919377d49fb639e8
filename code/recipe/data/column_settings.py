"""Hyperparameters that name columns, and what the values of columns look like."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe import column_words
from recipe.column_words import words_of
from recipe.data.column_names import plain_name
from recipe.data.files.part import DATE, Part, is_list, is_number, is_string
from recipe.errors import DataError, did_you_mean
from recipe.settings import COLUMN_SETTINGS, DataSettings, split_values
from recipe.spec import HEADS_OF_TEXTS, TEXTS_OF_SAMPLES, name_stem, normalize_name
from recipe.task_table import names_of_samples

_DERIVED = {
    *("label", "annot", "clean", "cleaned", "processed", "preprocessed", "normalized", "tidy"),
    *("lemmatized", "tokenized", "raw", "meta"),
    *("num", "n", "number", "total", "count", "is", "has"),
}
"""Words in names of columns that repeat, count or describe others."""
_IDENTIFIER = re.compile(
    r"(?i:(^|[\s_.-])(id|idx|uid|uuid|guid|index))$|[a-z](Id|ID)$|^(?i:id|uuid)[\s_.-]"
)
"""Names of columns that messages propose only if there are no others."""
_SHOWN_COLUMNS, _SHOWN_CHARS = 12, 40
_SAMPLE_ROWS = 1_000
_FEWEST_ROWS, _MOST_CLASSES = 12, 50
_WORDS_OF_TEXTS, _WORDS_OF_NAMES = 1.5, 5
_LONG_WORD = 15
_VERDICTS = [
    (frozenset(good.split()), frozenset(bad.split()))
    for good, bad in (("1 1.0 true", "0 0.0 false"), ("1 1.0", "-1 -1.0"), ("good", "bad"),
                      ("up thumbs_up 👍", "down thumbs_down 👎"), ("like", "dislike"))
]  # fmt: skip
"""Words that stand together for good and bad answers, flags first."""
_FLAGS = frozenset.union(*_VERDICTS[0])
_BESIDE_RESPONSES = re.compile(r"(.+?)\.(suggestion([._]\w+)?|responses[._]\w+)")
"""Names of what Argilla exports with the responses of annotators."""
_SPANS = re.compile(r'\[(\[\d+, \d+, "([^"\\]|\\.)*"\](, )?)+\]')
"""Lists of [start, end, label], as `records` writes them."""
SPAN_KEYS = (
    ("start", "start_offset", "begin", "start_char"),
    ("end", "end_offset", "stop", "end_char"),
    ("label", "labels", "type", "entity_type", "category_str", "tag", "entity"),
)
"""Keys of the first character of a span, the one after it, and its label."""
NOTHING: Sequence[object] = (None, "", "[]", "{}", "null", [])
"""Values of cells that hold nothing."""


class ColumnsError(DataError):
    """The columns of a file do not make the samples of a task.

    Args:
        advice: What to do if no hyperparameter solves it.
        is_rival: Whether columns of a sample would not be read, or which ones is not clear.
        is_final: Whether no hyperparameter helps.
        unread: Columns that ignore_columns may leave out.
    """

    def __init__(
        self,
        message: str,
        advice: str = "",
        is_rival: bool = False,
        is_final: bool = False,
        unread: Sequence[str] = (),
    ) -> None:
        super().__init__(message, advice)
        self.is_rival, self.is_final, self.unread = is_rival, is_final, unread


class PreferencesError(DataError):
    """A file has preference pairs, which several tasks read.

    Args:
        unread: Columns that ignore_columns has to leave out.
    """

    def __init__(self, message: str, remedy: str, unread: Sequence[str]) -> None:
        super().__init__(message, remedy)
        self.unread = unread


def quote_value(value: str) -> str:
    """Return a value for a message, in quotes if it has what a shell takes for itself, or a last
    character that could belong to the sentence."""
    if re.fullmatch(r"[\w@%+=:,./-]*[\w@%+=/-]", value):
        return value
    return repr(value) if value.isascii() or "'" in value else f"'{value}'"


def named_settings(settings: DataSettings) -> str:
    """Return the hyperparameters that name columns, for messages."""
    names = [name for name in (*COLUMN_SETTINGS, "columns") if getattr(settings, name)]
    return ", ".join(f"{name}={getattr(settings, name)}" for name in names)


def is_identifier(name: str) -> bool:
    """Return whether a column's name says that it holds identifiers of rows, or of other things."""
    return _IDENTIFIER.search(name) is not None


def may_be_text(part: Part, name: str) -> bool:
    """Return whether a column holds strings that are not all numbers or dates."""
    cells = sample_cells(part, name) if is_string(part.table.schema.field(name).type) else []
    return not all(is_number(cell) or DATE.fullmatch(cell.strip()) for cell in cells)


def verdicts_in(part: Part, name: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the words for good and for bad answers, if a column holds only such words."""
    is_nested = pa.types.is_nested(part.table.schema.field(name).type)
    values = None if is_nested else part.distinct(name, len(_FLAGS))
    words = {str(value).strip().lower() for value in values or ()}
    return next((both for both in _VERDICTS if words and words <= frozenset.union(*both)), None)


def is_flag(part: Part, name: str) -> bool:
    """Return whether a column holds only 0 and 1, or true and false."""
    return verdicts_in(part, name) == _VERDICTS[0]


def is_beside_responses(name: str, names: Sequence[str]) -> bool:
    """Return whether a column of Argilla's describes a record or the responses to it, or holds what
    a model suggested instead of them."""
    if (match := _BESIDE_RESPONSES.fullmatch(name)) is not None:
        return f"{match[1]}.responses" in names
    return name == "status" and any(other.endswith(".responses") for other in names)


def is_search(part: Part, name: str) -> bool:
    """Return whether a column holds the same query in all rows, by which these were found."""
    is_query = normalize_name(name) == "query" and part.table.num_rows > 1
    return is_query and len(part.distinct(name, 1) or ()) == 1


def is_category(part: Part, name: str) -> bool:
    """Return whether a column of strings has few values for its rows."""
    cells = sample_cells(part, name) if is_string(part.table.schema.field(name).type) else []
    return len(cells) >= _FEWEST_ROWS and len({*cells}) <= min(_MOST_CLASSES, len(cells) // 3)


def labels_spans(part: Part, name: str) -> bool:
    """Return whether a column's type is that of labelled spans: lists of records with start, end
    and label, or of [start, end, label], which have no type in Arrow and are written as JSON."""
    kind = part.table.schema.field(name).type
    if is_list(kind) and pa.types.is_struct(kind.value_type):
        keys = {field.name for field in kind.value_type}
        return not any(map(keys.isdisjoint, SPAN_KEYS))
    cells = sample_cells(part, name) if name in part.mixed else []
    return bool(cells) and all(map(_SPANS.fullmatch, map(str, cells)))


def holds_texts(part: Part, name: str) -> bool:
    """Return whether a column holds strings of several words, which are not few values."""
    if not may_be_text(part, name) or is_category(part, name):
        return False
    cells = [str(cell) for cell in sample_cells(part, name)]
    # Other scripts have no spaces.
    words = sum(len(cell.split()) + len(cell) // 8 * (not cell.isascii()) for cell in cells)
    return words > len(cells) * _WORDS_OF_TEXTS


def holds_codes(part: Part, name: str) -> bool:
    """Return whether a column holds few values of a word, which are no texts."""
    cells = sample_cells(part, name) if is_category(part, name) else ["a text"]
    return not any(" " in cell for cell in cells) and sum(map(len, cells)) < len(cells) * _LONG_WORD


def holds_long_texts(part: Part, name: str) -> bool:
    """Return whether a column holds texts of more than some words, as names of people have."""
    if not holds_texts(part, name):
        return False
    cells = [str(cell) for cell in sample_cells(part, name)]
    words = sum(len(cell.split()) + len(cell) // 8 * (not cell.isascii()) for cell in cells)
    return words > len(cells) * _WORDS_OF_NAMES


def sample_cells(part: Part, name: str) -> list[Any]:
    """Return the values in the first rows of a column."""
    cells = part.table[name].slice(0, _SAMPLE_ROWS).to_pylist()
    return [cell for cell in cells if cell not in NOTHING]


def is_in_sample(part: Part, name: str, is_target_named: bool) -> bool:
    """Return whether a column belongs to a sample by its name, or by the last part of a record's
    name."""
    whole = normalize_name(name)
    first, last = whole.partition(".")[0], whole.rpartition(".")[2]
    keys = {whole, last, name_stem(name), name_stem(last)}
    known_names = names_of_samples()
    if first != whole and last == "responses":  # Argilla's
        return True
    if keys & known_names.parts or (first != whole and first in known_names.parts):
        return True
    if name_stem(name) != whole and name_stem(name) in known_names.numbered:
        return True
    if known := [known_names.single[key] for key in keys if key in known_names.single]:
        return not (is_target_named and all(known))
    if column_words.plain_word(plain_name(name)) in column_words.TITLES:
        # A summary is a heading, or a target.
        return not (is_target_named and whole in set().union(*known_names.pairs.values()))
    words = column_words.split_name(name)
    *qualifiers, noun = words_of(name)
    if words[1:] and known_names.parts.issuperset(words):  # `Aspect Term`
        return True
    is_texts = is_string(kind := part.table.schema.field(name).type) or (
        is_list(kind) and is_string(kind.value_type)
    )
    is_part = noun in HEADS_OF_TEXTS and any(
        words[:-1] == qualifiers and words[-1] in TEXTS_OF_SAMPLES
        for words in map(words_of, part.table.column_names)
    )
    if is_texts and (noun in TEXTS_OF_SAMPLES or (qualifiers and is_part)):
        is_about_users = [*qualifiers, noun] == ["user", "description"]
        is_target = is_target_named and known_names.single.get(noun, False)
        return not (is_about_users or is_target or _DERIVED & {*qualifiers})
    others = {normalize_name(other) for other in part.table.column_names}
    return any(
        keys & pair and pair - keys <= others and not (is_target_named and keys & targets)
        for pair, targets in known_names.pairs.items()
    )


def show_examples(part: Part, names: Sequence[str]) -> str:
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
    requested["columns"] = list(itertools.chain(*settings.columns_by_role.values()))
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
    return [value] if value in part.table.column_names else split_values(value)
