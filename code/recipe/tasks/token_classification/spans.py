"""Convert entities given as spans of characters to words with tags.

The usual forms are read: spaCy's and doccano's `[start, end, label]`, Label Studio's `{"start",
"end", "labels": [label]}` (also inside its `annotations`), and records that call the label `label`,
`type`, `entity`, `entity_group` or `tag`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from recipe.data.files.part import Part
from recipe.data.reading import only
from recipe.errors import DataError

_STARTS, _ENDS = ("start", "start_offset", "begin", "start_char"), ("end", "end_offset", "end_char")
_LABELS = ("label", "labels", "type", "entity", "entity_group", "entity_type", "tag", "category")
_WORDS = ("text", "word", "value", "surface")
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` (exclusive) are a `label`."""

    start: int
    end: int
    label: str
    text: str | None = None
    """The characters that a record declares."""


def _spans(value: Any) -> list[Span] | None:
    """Return the spans in a cell, in the order of the text; None if the cell does not hold
    spans."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list):
        return None
    spans: list[Span] = []
    for item in value:
        text = None
        if isinstance(item, list) and len(item) == 3:
            start, end, label = item
        elif isinstance(item, dict) and isinstance(item.get("result"), list):
            # A task of Label Studio.
            inner = [] if _is_skipped(item) else _spans(item["result"])
            if inner is None:
                return None
            spans += inner
            continue
        elif isinstance(item, dict) and item.get("type") == "relation":
            continue  # Label Studio's, between spans
        elif isinstance(item, dict):
            item = item["value"] if isinstance(item.get("value"), dict) else item
            start, end, label = (
                next((item[name] for name in names if item.get(name) is not None), None)
                for names in (_STARTS, _ENDS, _LABELS)
            )
            text = next((item[name] for name in _WORDS if isinstance(item.get(name), str)), None)
        else:
            return None
        if isinstance(label, list):
            label = label[0] if len(label) == 1 else None
        if isinstance(start, str) and isinstance(end, str) and start.isdigit() and end.isdigit():
            start, end = int(start), int(end)
        if type(start) is not int or type(end) is not int or not isinstance(label, (str, int)):
            return None
        spans.append(Span(start, end, str(label), text))
    return sorted(spans, key=lambda span: (span.start, span.end))


def words_of(
    part: Part, row: int, text: str, value: Any
) -> tuple[list[str], list[str], tuple[int, int]]:
    """Return the words of a text and a tag (B-, I- or O) for each; how many spans had white space
    trimmed, and how many begin or end within a word. Words are split at the edges of spans.

    Raises:
        DataError: a span lies outside the text, is empty, overlaps another one, or does not hold
            the characters that it declares.
    """
    spans = _spans(value)
    if spans is None:
        raise _wrong(part, row, f"has no spans that can be read: {json.dumps(value)[:80]}")
    kept: list[Span] = []
    trimmed = within = end = 0
    for span in spans:
        if not 0 <= span.start < span.end <= len(text):
            what = f"has a span {span.start} to {span.end} ({span.label})"
            raise _wrong(part, row, f"{what}, and a text of {len(text)} characters")
        inside = text[span.start : span.end]
        start = span.start + len(inside) - len(inside.lstrip())
        stop = span.end - (len(inside) - len(inside.rstrip()))
        if start >= stop:
            raise _wrong(part, row, f"has a span {span.start} to {span.end} of white space")
        if span.text is not None and inside.strip() != span.text.strip():
            what = f"has a span {span.start} to {span.end}, which holds"
            raise _wrong(part, row, f"{what} {inside!r} and not {span.text!r}, its text")
        trimmed += (start, stop) != (span.start, span.end)
        if start < end:
            what = f"{text[kept[-1].start : end]!r} and {text[start:stop]!r}"
            raise _wrong(part, row, f"has spans that overlap: {what}")
        # A letter on both sides, of a script with two cases, whose words are separated by spaces.
        neighbours = [text[max(0, edge - 1) : edge + 1] for edge in (start, stop)]
        within += any(
            len(pair) == 2 and all(letter.lower() != letter.upper() for letter in pair)
            for pair in neighbours
        )
        kept.append(Span(start, stop, span.label))
        end = stop
    words: list[str] = []
    tags: list[str] = []
    offset = 0
    for span in kept:
        between = _WORD.findall(text[offset : span.start])
        named = _WORD.findall(text[span.start : span.end])
        words += [*between, *named]
        tags += ["O"] * len(between)
        tags += [f"B-{span.label}", *([f"I-{span.label}"] * (len(named) - 1))]
        offset = span.end
    rest = _WORD.findall(text[offset:])
    return [*words, *rest], [*tags, *(["O"] * len(rest))], (trimmed, within)


def check_edges(part: Part, within: int, spans: int, notes: list[str]) -> None:
    """Check that spans cover whole words; add a note if some begin or end within one.

    Raises:
        DataError: half of them do, for example because ends are inclusive or offsets count bytes.
    """
    if not within:
        return
    what = f"{within} of {spans} spans of {part.path} begin or end within a word"
    if within * 2 >= spans:
        raise DataError(
            f"{what}: they do not seem to count characters from 0, with the end excluded (but an "
            "inclusive end, bytes or UTF-16?).",
            "Count as Python does: text[start:end] is the entity.",
        )
    notes.append(f"{what}, which is cut there.")


def annotated(part: Part, column: str, notes: list[str]) -> Part:
    """Return `part` without Label Studio's tasks that have no annotation, or only skipped ones:
    this does not mean that they have no entities.

    Args:
        column: The column of annotations, or of spans in another form, of which all rows are kept.
        notes: Receives the number of rows left out.
    """
    kind = str(part.table.schema.field(column).type)
    if "result: list" not in kind:
        return part
    if "choices: list" in kind and "labels: list" not in kind:
        raise DataError(
            f"Column {column!r} of {part.path} has Label Studio's choices for whole texts, no "
            "spans.",
            "Export them as JSON-MIN or CSV, which have a column for each question, and name it in "
            "label_column.",
        )
    cells = part.table[column].to_pylist()
    is_seen = [any(not _is_skipped(item) for item in cell or ()) for cell in cells]
    return only(part, is_seen, "were not annotated in Label Studio", notes)


def _is_skipped(item: Any) -> bool:
    return isinstance(item, dict) and bool(item.get("was_cancelled"))


def _wrong(part: Part, row: int, what: str) -> DataError:
    return DataError(
        f"{part.where(row)} {what}.",
        'Write spans as {"text": "Ada was here", "entities": [{"start": 0, "end": 3, "label": '
        '"PER"}]}: characters from 0, the end excluded.',
    )
