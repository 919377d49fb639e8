"""Make a row of each sentence of a table that has a word in each row."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import SPLIT_COLUMNS, plain_name, word_columns
from recipe.data.files.part import Part
from recipe.data.proposing import proposals
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.task_table import TASKS

TASK = "token-classification"
_NUMBERED = re.compile(r"\S*\d\S*|sentence:? ?#?\d+", re.IGNORECASE)
_DOCUMENTS = re.compile(
    r"(doc(ument)?|text|article|file|chapter|page)([_ ]?(id|idx|no|name|number))?", re.IGNORECASE
)


def gather_sentences(part: Part, settings: DataSettings, notes: list[str]) -> Part:
    """Return a row of lists for each sentence, where columns are called as those of words and of
    their sentences. Other parts are returned unchanged, as for other tasks. Raise DataError if the
    rows of a sentence are not together, or of several splits."""
    table, (sentence, word) = part.table, word_columns(part.table.column_names)
    is_named = sentence in {*settings.named_columns, *settings.ignored_columns}
    if is_named or settings.task not in (None, TASK):
        return part
    if sentence is None or word != proposals.lone_words(part):
        return part
    numbers = ["" if cell is None else str(cell).strip() for cell in table[sentence].to_pylist()]
    if not all(map(_NUMBERED.fullmatch, {*numbers} - {""})):
        return part  # these may be texts
    others = [table[name] for name in table.column_names if _DOCUMENTS.fullmatch(plain_name(name))]
    keys = [*zip(numbers, *(cells.to_pylist() for cells in others), strict=True)]
    # Only the first row of a sentence may name it.
    begins = [n != m for n, m in itertools.pairwise(keys)] if all(numbers) else numbers[1:]
    starts = [0, *(row for row, is_first in enumerate(begins, 1) if is_first)]
    if len(starts) in (1, len(keys)):
        return part  # the column names something else
    seen = set[Any]()
    for row in starts:
        if keys[row] in seen or not numbers[row]:
            raise DataError(
                f"{part.where(row)} has {numbers[row]!r} in column {sentence!r}"
                f"{', as have rows before another sentence' if numbers[row] else ''}.",
                "Keep the rows of a sentence together, and name it in all of them or in the first.",
            )
        seen.add(keys[row])
    offsets, made = pa.array([*starts, len(keys)], pa.int64()), part.select(starts)
    within, tags = {*range(len(keys))} - {*starts}, TASKS[TASK].forms[1]["tags"].names
    for name in table.column_names:
        cells = table[name].to_pylist()
        # Others, such as a document's name or a split, belong to the sentence.
        varied = [row for row in sorted(within) if cells[row] not in (None, "", cells[row - 1])]
        if varied and plain_name(name) in SPLIT_COLUMNS:
            raise DataError(
                f"{part.where(varied[0])} has {cells[varied[0]]!r} in column {name!r}, and other "
                f"rows of its sentence {cells[varied[0] - 1]!r}.",
                f"Give the rows of a sentence the same split, or ignore_columns={name}.",
            )
        if name == word or plain_name(name) in tags or varied:
            lists = pa.LargeListArray.from_arrays(offsets, table[name].combine_chunks())
            made = made.with_column(name, lists)
    notes.append(
        f"{part.path}: the {len(keys)} rows, with a word each in column {word!r}, are the "
        f"{len(starts)} sentences that column {sentence!r} names."
    )
    return dataclasses.replace(made, table=made.table.drop_columns(sentence))
