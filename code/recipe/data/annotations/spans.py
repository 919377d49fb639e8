"""Convert entities given as spans of characters to words with tags.

Spans are lists `[start, end, label]` (spaCy, doccano) or records `{"start", "end", "label"}`
(Prodigy), also with `start_offset`, `end_offset` (doccano) and `labels: [label]` (Label Studio's
JSON-MIN).
"""

from __future__ import annotations

import json
import operator
import re
from typing import Any

from recipe.data import values
from recipe.data.files.part import Part
from recipe.errors import DataError

_KEYS = ("start", "start_offset"), ("end", "end_offset"), ("label", "labels")
_WORDS = ("text", "word", "value", "surface")
_WORD = re.compile(r"\w+|[^\w\s]")


def _spans(value: Any) -> list[tuple[int, int, str, str | None]] | None:
    """Return start, end, label and declared text of the spans in a cell, in the order of the text;
    None if the cell does not hold spans."""
    value = values.container(value) if isinstance(value, str) else value
    if not isinstance(value, list):
        return None
    spans = []
    for item in value:
        text = None
        if isinstance(item, list) and len(item) == 3:
            start, end, label = item
        elif isinstance(item, dict):
            start, end, label = (
                next((item[name] for name in names if item.get(name) is not None), None)
                for names in _KEYS
            )
            text = next((item[name] for name in _WORDS if isinstance(item.get(name), str)), None)
        else:
            return None
        if isinstance(label, list) and len(label) == 1:
            (label,) = label
        if type(start) is not int or type(end) is not int or not isinstance(label, (str, int)):
            return None
        spans.append((start, end, str(label), text))
    return sorted(spans, key=operator.itemgetter(0, 1))


def words_of(part: Part, row: int, text: str, value: Any) -> tuple[list[str], list[str], int]:
    """Return the words of a text, a tag (B-, I- or O) for each, and how many spans begin or end
    within a word. Words are split at the edges of spans, white space at edges is left out.

    Raises:
        DataError: a span lies outside the text, is empty, overlaps another one, or does not hold
            the characters that it declares.
    """
    spans = _spans(value)
    if spans is None:
        raise _wrong(part, row, f"has no spans that can be read: {json.dumps(value)[:80]}")
    words: list[str] = []
    tags: list[str] = []
    within = begun = ended = 0
    for first, end, label, declared in spans:
        if not 0 <= first < end <= len(text):
            what = f"has a span {first} to {end} ({label})"
            raise _wrong(part, row, f"{what}, and a text of {len(text)} characters")
        inside = text[first:end]
        start = first + len(inside) - len(inside.lstrip())
        stop = end - (len(inside) - len(inside.rstrip()))
        if start >= stop:
            raise _wrong(part, row, f"has a span {first} to {end} of white space")
        if declared is not None and inside.strip() != declared.strip():
            what = f"has a span {first} to {end}, which holds {inside!r} and not {declared!r}"
            raise _wrong(part, row, f"{what}, its text")
        if start < ended:
            what = f"{text[begun:ended]!r} and {text[start:stop]!r}"
            raise _wrong(part, row, f"has spans that overlap: {what}")
        # A letter on both sides, of a script with two cases, whose words are separated by spaces.
        neighbours = [text[max(0, edge - 1) : edge + 1] for edge in (start, stop)]
        within += any(
            len(pair) == 2 and all(letter.lower() != letter.upper() for letter in pair)
            for pair in neighbours
        )
        between, named = _WORD.findall(text[ended:start]), _WORD.findall(text[start:stop])
        words += [*between, *named]
        tags += [*["O"] * len(between), f"B-{label}", *[f"I-{label}"] * (len(named) - 1)]
        begun, ended = start, stop
    rest = _WORD.findall(text[ended:])
    return [*words, *rest], [*tags, *["O"] * len(rest)], within


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


def _wrong(part: Part, row: int, what: str) -> DataError:
    return DataError(
        f"{part.where(row)} {what}.",
        'Write {"text": "Ada sat", "entities": [{"start": 0, "end": 3, "label": "PER"}]}: '
        "characters from 0, the end excluded (from Label Studio, export JSON-MIN); or the words of "
        'a sentence: {"tokens": ["Ada", "sat"], "ner_tags": ["B-PER", "O"]}.',
    )
