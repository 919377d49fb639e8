"""Tell what columns look like, by the first of their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.column_words import split_name
from recipe.data import values
from recipe.data.column_names import split_of
from recipe.data.column_settings import (
    holds_texts,
    is_category,
    is_flag,
    may_be_text,
    sample_cells,
)
from recipe.data.files.part import TAG, Part, is_list, is_number
from recipe.data.labels import is_fraction
from recipe.data.layout.splits import TRAIN
from recipe.data.proposing.name_meanings import is_described
from recipe.spec import name_stem, normalize_name

_SAMPLE_ROWS = 1_000
_LONG, _LONG_CELL, _FEW = 4, 25, 11
"""Words, and characters, above which a cell is a text rather than some words; values of grades."""
_RATERS = {"annotator", "annotation", "coder", "model", "pred", "predicted", "prediction", "rater"}
"""Words in names of columns by one of several people or models."""
_LARGEST = 10
"""The largest number of labels that belong together, as of emotions."""
WHOLE = {"total", "overall"}
"""Words in names of scores of a whole."""


def look_of(part: Part, name: str) -> str:
    """Return what a column looks like: text, words, category, flag, grade, number, list, records,
    codes (single words), constant, or nothing that a role holds."""
    kind = part.table.schema.field(name).type
    cells = sample_cells(part, name)
    if not cells or pa.types.is_binary(kind) or pa.types.is_struct(kind):
        return "nothing"
    if is_list(kind):
        keys = set(cells[0][0]) if pa.types.is_struct(kind.value_type) and cells[0] else {""}
        is_span = len(keys) > 1 and any(key.startswith("start") for key in keys)
        return "spans" if is_span else "list" if keys == {""} else "records"
    if is_flag(part, name):
        return "flag"
    texts = [str(cell) for cell in cells]
    distinct = len({*texts})
    if distinct == 1 and len(texts) > 1:
        count = len(texts[0].split())
        return "text" if count > _LONG else "words" if count > 1 else "constant"
    if not may_be_text(part, name):
        is_grade = distinct <= _FEW and all("." not in text for text in texts)
        return ("grade" if is_grade else "number") if are_numbers(cells) else "nothing"
    parsed = values.container(texts[0])
    if isinstance(parsed, list):
        first = parsed[0] if parsed else None
        if isinstance(first, (list, tuple)) and [*map(type, first)] == [int, int, str]:
            return "spans"
        return "records" if parsed and isinstance(parsed[0], dict) else "list"
    if is_category(part, name):
        splits = {*map(split_of, {*texts})}
        return "nothing" if TRAIN in splits and None not in splits else "category"
    if not holds_texts(part, name):
        return "codes"
    if all(text.startswith(("http://", "https://", "www.")) and " " not in text for text in texts):
        return "codes"
    words = sum(len(text.split()) for text in texts) / len(texts)
    if texts and all(TAG.fullmatch(word.upper()) for text in texts[:_FEW] for word in text.split()):
        return "codes"  # tags of words
    return "text" if words > _LONG or sum(map(len, texts)) / len(texts) > _LONG_CELL else "words"


def alike_labels(part: Part, looks: Mapping[str, str]) -> list[Sequence[str]]:
    """Return the groups of at least three columns that have the same classes, or small fractions,
    as labels of several aspects of a text have, without those of annotators or models."""
    groups: list[tuple[set[object], list[str]]] = []
    numbers: list[str] = []
    for name, look in looks.items():
        is_rated = not _RATERS.isdisjoint(split_name(name)) or is_described(name, look)
        if is_rated or name_stem(name) != normalize_name(name):
            continue
        cells = sample_cells(part, name)
        if look == "number" and any(is_fraction(str(cell)) for cell in cells):
            largest = max(abs(float(cell)) for cell in cells)
            numbers += [name] * (largest <= _LARGEST)
        rows = len(part.table[name].slice(0, _SAMPLE_ROWS))
        is_mark = look == "constant" and len(cells) * 2 < rows  # x, or empty
        if look != "category" and not is_mark:
            continue
        for known, group in groups:
            if len(known & {*cells}) * 2 > len(known | {*cells}):
                known |= {*cells}
                group.append(name)
                break
        else:
            groups.append(({*cells}, [name]))
    large = [(known, group) for known, group in groups if len(group) > 2]
    for known, group in large:
        group += [n for n, look in looks.items() if look in ("category", "constant")
                  and n not in group and known.issuperset(sample_cells(part, n))]  # fmt: skip
    alike = [sorted(group, key=[*looks].index) for _, group in large]
    has_whole = any(not WHOLE.isdisjoint(split_name(name)) for name in looks)
    return [*alike, *([numbers] if len(numbers) > 2 and not has_whole else [])]


def are_numbers(cells: Sequence[object]) -> bool:
    return all(
        isinstance(cell, (int, float)) or (isinstance(cell, str) and is_number(cell))
        for cell in cells
    )
