"""Load queries with relevant and irrelevant texts, for sentence vectors and rerankers."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import held_out
from recipe.data.column_names import ADDRESS
from recipe.data.columns import ColumnSelection
from recipe.data.files.part import Part, is_list
from recipe.data.files.spool import spool_tables
from recipe.data.held_out import DataSets
from recipe.data.reading import ReadFile, describe_files, read_columns
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.spec import TWINS, TaskSpec, normalize_name

TEXT, SCORE, NEGATIVES = "text", "score", "negatives"
"""The roles of columns in files, in addition to QUERY."""
QUERY, TEXTS, SCORES = "query", "texts", "scores"
"""The columns of the data sets: a query, a list of texts, and the relevance of each text."""
PAIRS, SCORED, LISTS = "pairs", "scored", "lists"
"""The kinds of data: a relevant text and maybe irrelevant ones; one text and its score; a list of
texts and their scores."""

_SHOWN = 60
Row = tuple[str, list[str], list[float], int]
Arrange = Callable[[str, pa.Table, list[str]], pa.Table]
SCHEMA = pa.schema([
    (QUERY, pa.large_string()),
    (TEXTS, pa.large_list(pa.large_string())),
    (SCORES, pa.large_list(pa.float64())),
    (ADDRESS, pa.int64()),
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Relevance(DataSets):
    """Data sets with the columns `query`, `texts` and `scores`.

    For PAIRS, the first of `texts` is relevant (1.0), and the others are not (0.0).
    """

    kind: str
    """PAIRS, SCORED or LISTS."""


def load(
    channels: Mapping[str, Path],
    settings: DataSettings,
    spec: TaskSpec,
    arrange: Arrange | None = None,
) -> Relevance:
    """Read and split the data of a job's channels.

    Args:
        arrange: Called with the kind and the rows of a split (SCHEMA). Returns rows as the task
            needs them; it may add notes, the same for each split.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    notes: list[str] = []
    reading = read_columns(channels, spec, settings, notes)
    columns, kind = reading.columns, _kind(reading.files[0].part, reading.columns)
    described: list[str] = []

    def rows(file: ReadFile) -> pa.Table:
        kind_of_file = _kind(file.part, file.columns)
        table = spool_tables(SCHEMA, _rows_of(file.part, file.columns, kind_of_file, notes))
        described.append(describe_files([file], f"{table.num_rows} rows"))
        return table

    built = {}
    for split, tables in reading.converted(rows).items():
        table = pa.concat_tables(tables)
        if not table.num_rows:
            raise DataError(f"The {split} data has no rows with texts.", "Give some.")
        least, most = pc.min_max(pc.list_flatten(table[SCORES])).as_py().values()
        if split == "train" and kind == SCORED and least == most:
            raise DataError(
                f"Every row of the training data has {least:g} in column {columns[SCORE]!r}: "
                "there is nothing to learn.",
                "Leave the column out if all texts are relevant, or add rows with other scores.",
            )
        if kind == SCORED and settings.label_column is None:
            numbers = set(pc.unique(pc.list_flatten(table[SCORES])).to_pylist())
            names = normalize_name(columns[QUERY]), normalize_name(columns[TEXT])
            are_classes = numbers <= {-1.0, 0.0, 1.0, 2.0}
            is_label = normalize_name(columns[SCORE]) in (
                "label",
                "labels",
                "class",
                "y",
                "goldlabel",
            )
            twins = [(normalize_name(first), normalize_name(second)) for first, second in TWINS]
            are_three = is_label and names in twins and {0.0, 1.0, 2.0} <= numbers
            if are_classes and (set(names) == {"premise", "hypothesis"} or are_three):
                raise DataError(
                    f"Column {columns[SCORE]!r} next to {columns[QUERY]!r} and {columns[TEXT]!r} "
                    f"has the numbers {', '.join(f'{number:g}' for number in sorted(numbers))}, "
                    "which may be classes of entailment (0 is entailment).",
                    "Give triplets: anchor, positive (entailed) and negative (contradicted). If "
                    f"higher numbers mean more similar texts, give label_column={columns[SCORE]}.",
                )
        built[split] = held_out.data_set([arrange(kind, table, notes) if arrange else table])
    uses, rule = held_out.assign_groups(built, QUERY, reading, settings)
    return Relevance(
        **uses,
        kind=kind,
        notes=[*dict.fromkeys(notes), *described, rule],
    )


def _kind(part: Part, columns: ColumnSelection) -> str:
    if SCORE not in columns:
        return PAIRS
    return LISTS if is_list(part.table.schema.field(columns[TEXT]).type) else SCORED


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Return rows as a table of SCHEMA."""
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    arrays = [pa.array(cells, kind) for cells, kind in zip(columns, SCHEMA.types, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


def _rows_of(
    part: Part, columns: ColumnSelection, kind: str, notes: list[str]
) -> Iterator[pa.Table]:
    """Yield tables of SCHEMA: a row for each relevant text, or for each row of a part. Rows without
    a query or text are left out and counted in a note."""
    query, text, score = columns[QUERY], columns[TEXT], columns.get(SCORE)
    empty = left_out = 0
    for first, batch in part.batches(list(dict.fromkeys(columns.names))):
        rows: list[Row] = []
        for row, cells in enumerate(batch.to_pylist(), first):
            queries = _texts(part, row, query, cells[query])
            texts = _texts(part, row, text, cells[text])
            if len(queries) > 1:
                raise DataError(
                    f"{part.where(row)} has a list in column {query!r}.", "Give one query a row."
                )
            scores = [] if score is None else _scores(part, row, score, cells[score])
            if kind == LISTS and len(scores) != len(texts):
                raise DataError(
                    f"{part.where(row)} has {len(texts)} texts in {text!r} and {len(scores)} "
                    f"scores in {score!r}.",
                    "Give a score for each text.",
                )
            if not any(queries) or not any(texts):
                empty += 1
                continue
            left_out += texts.count("")
            if kind == LISTS:
                kept = [pair for pair in zip(texts, scores, strict=True) if pair[0]]
                kept_scores = [number for _, number in kept]
                rows.append((queries[0], [one for one, _ in kept], kept_scores, part.address(row)))
                continue
            texts = list(filter(None, texts))
            if kind == SCORED:
                if len(texts) > 1 or len(scores) > 1:
                    raise DataError(
                        f"{part.where(row)} has several texts or scores, and other rows have one.",
                        "Give one text and one score in each row, or lists in all.",
                    )
                rows.append((queries[0], texts, scores, part.address(row)))
                continue
            negatives: list[str] = []
            for name in columns.columns.get(NEGATIVES, ()):
                listed = _texts(part, row, name, cells[name])
                used = [negative for negative in listed if negative and negative not in texts]
                # An empty cell has no negative.
                left_out += (len(listed) - len(used)) * (cells[name] != "")
                negatives += used
            zeros = [0.0] * len(negatives)
            rows += [
                (queries[0], [one, *negatives], [1.0, *zeros], part.address(row)) for one in texts
            ]
        yield table_of(rows)
    if empty:
        notes.append(f"{empty} rows of {part.path} lack a text and are not used.")
    if left_out:
        notes.append(
            f"{left_out} texts in lists of {part.path} are not used: they are empty or null, or "
            "negatives that are also relevant."
        )


def _texts(part: Part, row: int, column: str, value: Any) -> list[str]:
    """Return the text of a cell, or the texts of its list (of texts or `{"title", "text"}`)."""
    if isinstance(value, str) and value.lstrip().startswith("[") and value.rstrip().endswith("]"):
        try:
            listed = json.loads(value)
        except (ValueError, RecursionError):
            listed = None
        if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
            value = listed
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    texts = []
    for item in values:
        if isinstance(item, Mapping) and isinstance(item.get("text"), str):
            item = f"{item.get('title') or ''} {item['text']}".strip()
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            item = str(item)
        if not isinstance(item, (str, type(None))):
            raise DataError(
                f"{part.where(row)} has no text in column {column!r}, but "
                f"{json.dumps(item, default=str)[:_SHOWN]}.",
                'Give a text, a list of texts, or a list of {"title": ..., "text": ...}.',
            )
        texts.append((item or "").strip() and str(item))
    return texts


def _scores(part: Part, row: int, column: str, value: Any) -> list[float]:
    """Return the score of a cell, or the scores of its list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    names = part.class_names.get(column)
    scores = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if names is not None and isinstance(item, int) and 0 <= item < len(names):
            item = names[item]
        try:
            number = float(item)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"{part.where(row)} has {json.dumps(item, default=str)[:_SHOWN]} in column "
                f"{column!r}, which must hold numbers: the relevance of the texts.",
                "Give numbers, name their column in label_column, or leave the column out.",
            )
        scores.append(number)
    return scores
