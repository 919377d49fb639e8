"""What a column's values are: texts, classes, numbers of rows, marks of an annotation tool."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import DERIVED, LABEL_NAMES, METADATA, plain
from recipe.data.files.part import Part, is_number, is_string

SAMPLE_ROWS = 1_000
_MOST_CLASSES = 50
_LOOKED_AT = 2_000
"""Characters of a text whose words are counted."""
_SENTENCE = 4
"""Words on average, from which also values that repeat are texts, not names of classes."""
_LONG = 8
"""Words on average that no author, place or date has."""
# Written without spaces: Thai, Japanese and Chinese.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
_FILE = re.compile(
    r"\S*\.(jpe?g|png|gif|bmp|webp|tiff?|wav|mp3|flac|ogg|m4a|mp4|avi|pdf|docx?|dcm)", re.IGNORECASE
)
_BYTES = re.compile(r"b(?P<quote>['\"]).*(?P=quote)", re.DOTALL)
_LETTER = re.compile(r"[^\W\d_]")
ANSWER, MARKS = "answer", {"accept", "reject", "ignore"}
"""The column in which Prodigy's exports say what was made of each row, and its values."""


def possible_labels(part: Part, names: Sequence[str]) -> list[str]:
    """Return the columns whose values repeat as those of classes do, and do not number rows."""
    sample = part.table.slice(0, SAMPLE_ROWS)
    most = min(_MOST_CLASSES, max(2, sample.num_rows // 2))
    can_be = (is_string, pa.types.is_integer, pa.types.is_boolean)
    return [
        name
        for name in names
        if any(test(sample[name].type) for test in can_be)
        and 1 < len(sample[name].unique()) <= most
        and (plain(name) in LABEL_NAMES or not numbers_rows(name))
    ]


def numbers_rows(name: str) -> bool:
    """Return whether a column numbers the rows, by its name."""
    last = plain(name).rpartition("_")[2]
    return last in ("id", "ids", "idx", "index") or plain(name).startswith("unnamed")


def is_constant(part: Part, name: str) -> bool:
    """Return whether a column has one value in all rows that are looked at, or nothing."""
    column = part.table[name].slice(0, SAMPLE_ROWS)
    return not pa.types.is_nested(column.type) and len({*column.unique().to_pylist()} - {""}) < 2


def same_classes(part: Part, name: str, label: str) -> bool:
    """Return whether a column has one value for each label, as `label_text` beside `label`."""
    both = part.table.select([label, name]).slice(0, SAMPLE_ROWS).to_pydict()
    rows = list(zip(map(str, both[label]), map(str, both[name]), strict=True))
    labels = {label_of_row for label_of_row, _ in rows}
    return len(labels) <= len(rows) / 2 and len(set(rows)) == len(labels)


def is_mark(part: Part, name: str) -> bool:
    """Return whether a column says of each row whether its annotation was accepted."""
    names = {*part.table.column_names}
    is_export = name == ANSWER and names & {"_input_hash", "_task_hash", "spans"}
    if not is_export or not is_string(part.table.schema.field(name).type):
        return False
    values = set(part.distinct(name, len(MARKS) + 1) or [""]) - {None}
    return bool(values) and values <= MARKS


def is_something_else(texts: Sequence[str]) -> str | None:
    """Return in words what strings are that are no texts; None if they may be some."""
    if texts and all(_FILE.fullmatch(text.strip()) for text in texts):
        return "names files"
    if sum(bool(_BYTES.fullmatch(text.strip())) for text in texts) * 2 > len(texts):
        return "holds bytes as Python writes them"
    return None


def is_text(part: Part, name: str) -> bool:
    """Return whether the column holds strings that are not all numbers."""
    if not is_string(part.table[name].type):
        return False
    return not all(is_number(value) for value in values_of(part, name))


def reads_like_text(part: Part, name: str) -> bool:
    """Return whether most values have several words, and are no names of classes."""
    return has_words(part, name) and (differs(part, name) or _mean_words(part, name) >= _SENTENCE)


def has_words(part: Part, name: str) -> bool:
    """Return whether half of the texts or more have several words."""
    if not is_text(part, name):
        return False
    counts = _words(part, name)
    return sum(count > 1 for count in counts) >= len(counts) / 2


def differs(part: Part, name: str) -> bool:
    """Return whether there are more values than classes would have."""
    values = values_of(part, name)
    return len(set(values)) > min(_MOST_CLASSES, len(values) / 2)


def is_metadata(part: Part, name: str) -> bool:
    """Return whether a column is about the text (its id, place, date, author) or made of it."""
    spaced = plain(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name))
    last = re.sub(r"_?\d+$", "", spaced).rpartition("_")[2]
    if last in DERIVED or plain(name).startswith("unnamed"):
        return True
    # `user_name` is about the text, `product_name` is a part of it.
    is_known = {plain(name), spaced} & {*METADATA} or (last in METADATA and last != "name")
    return bool(is_known) and _mean_words(part, name) < _LONG


def values_of(part: Part, name: str) -> list[str]:
    """Return the strings of the first rows that are not empty."""
    values = part.table[name].slice(0, SAMPLE_ROWS).to_pylist()
    return [value for value in values if value and isinstance(value, str)]


def _mean_words(part: Part, name: str) -> float:
    counts = _words(part, name)
    return sum(counts) / max(1, len(counts))


def _words(part: Part, name: str) -> list[int]:
    """Return the number of words of each value: what stands between spaces and has a letter."""
    return [
        sum(bool(_LETTER.search(word)) for word in text.split()) + len(_UNSPACED.findall(text)) // 2
        for text in (value[:_LOOKED_AT] for value in values_of(part, name))
    ]
