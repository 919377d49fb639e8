"""Report properties of a job's rows before it trains: classes, empty and repeated rows, rows in
both training and evaluation data (leaks), equal rows with different labels, and lengths.

Rows are compared by a hash of 64 bits of each.
"""

from __future__ import annotations

import random
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset

from recipe.data import classification, values
from recipe.data.column_names import LABEL, TOKEN_IDS
from recipe.data.files.part import is_string
from recipe.data.labels import NUMBER, Labels
from recipe.reports.section import Section
from recipe.tasks.base import (
    OK,
    SHOWN_CHARS,
    WARNING,
    Finding,
    Task,
    Tokenizer,
    named_splits,
    strings_within,
)

_NOT_COMPARED = ("id", "file", "place", "bytes")
"""Columns that identify a row, and images, which are not opened here."""
_MEASURED_ROWS, _CHECKED_ROWS = 2_000, 10_000
_DAMAGE = r"\x{FFFD}|\x{C3}[\x{80}-\x{BF}]|\x{E2}\x{20AC}"
"""U+FFFD, and how accents and quotation marks look if UTF-8 is read as Windows-1252."""
_TRUNCATED_SHARE = 0.05
_CLASSES_SHOWN = 30


@dataclass(frozen=True, kw_only=True)
class _Split:
    inputs: values.Hashes
    """[rows]: of the columns that the model reads."""
    rows: values.Hashes
    """[rows]: of the targets, too."""
    is_empty: npt.NDArray[np.bool_]
    """[rows]"""


def inspect(
    task: Task, tokenizer: Tokenizer, lengths: Sequence[int], max_length: int
) -> tuple[list[Finding], list[Section]]:
    """Return findings on all rows, the important ones as warnings, and sections of the report.
    In a sharded job, they cover this host's rows.

    Args:
        lengths: Tokens of texts of `sampled_rows`, before truncation.
        max_length: Most tokens of a sample.
    """
    splits = _used_splits(task)
    findings = [*row_findings(task), *_lengths(task, sorted(lengths), max_length)]
    left_out = (*(() if task.generates else task.targets), *_NOT_COMPARED)
    findings += find_unknown_tokens(task, tokenizer, sampled_rows(task), left_out)
    labels: Labels | None = getattr(task.data, "labels", None)
    classes = []
    if labels is not None and labels.problem != NUMBER and LABEL in splits["train"].column_names:
        counts = {
            name: classification.rows_of_classes(labels, values.read_column(split, LABEL))
            for name, split in splits.items()
        }
        largest = sorted(labels.names, key=lambda name: -counts["train"][name])[:_CLASSES_SHOWN]
        classes = [[name, *(of_split[name] for of_split in counts.values())] for name in largest]
    sections = [Section(title="Rows of the classes", columns=("class", *splits), rows=classes)]
    return findings, sections if classes else []


def _used_splits(task: Task) -> dict[str, Dataset]:
    """Return the splits that are trained or evaluated. Without an evaluation, a job may have a row
    in place of its data, and without training the evaluation data in place of its own."""
    splits, settings = named_splits(task.data), task.data_settings
    is_used = settings.trains and (settings.evaluates or settings.predicts)
    return splits if is_used else {"train": splits["train"]}


def row_findings(task: Task) -> Iterator[Finding]:
    """Yield findings on empty, repeated, leaked and contradicting rows, with their files and
    lines."""
    known: dict[int, _Split] = {}
    splits, targets, where = _used_splits(task), task.targets, task.data.where
    names = {*splits["train"].column_names}
    if not names - {*targets, *_NOT_COMPARED}:
        return
    hashed = {name: _hashes(split, targets, known) for name, split in splits.items()}
    train = hashed.pop("train")
    if not len(train.rows):
        return
    empty = [(name, int(row)) for name, split in {"train": train, **hashed}.items()
             for row in np.flatnonzero(split.is_empty)]  # fmt: skip
    if empty:
        yield Finding(
            level=WARNING,
            what="empty rows",
            detail=f"{len(empty)} rows have no text: remove them, or name another column",
            example=f"such as {where(*empty[0])}",
        )
    yield from _damaged(task)
    in_order = np.sort(train.rows)
    repeated = int((in_order[1:] == in_order[:-1]).sum())
    if repeated:
        share = repeated / len(train.rows)
        detail = f"{repeated} of {len(train.rows)} training rows repeat another one ({share:.1%})"
        detail += ", and count several times: remove them if that is not intended"
        order = np.argsort(train.rows, kind="stable")
        position = int(np.flatnonzero(in_order[1:] == in_order[:-1])[0])
        one, other = (where("train", int(order[position + step])) for step in (0, 1))
        example = f"such as {one} and {other}"
        yield Finding(level=OK, what="repeated rows", detail=detail, example=example)
    # Generated texts may begin with one prompt, such as "Translate.", which identifies no row.
    has_prompts = task.generates and 2 * len(np.unique(train.inputs)) <= len(train.rows)
    for name, split in hashed.items():
        compared = (split.rows, train.rows) if has_prompts else (split.inputs, train.inputs)
        leaked = np.flatnonzero(np.isin(*compared))
        if not len(leaked):
            continue
        row = int(leaked[0])
        yield Finding(
            level=WARNING,
            what="leak",
            detail=f"{len(leaked)} of {len(split.inputs)} {name} rows are in the training data, "
            "too: their scores are too good. Remove them from one of the two",
            example=f"such as {where(name, row)}: {_shown(splits[name], row)}",
        )
    if task.generates or not names.intersection(targets):
        return  # a prompt may have several answers
    order = np.argsort(train.inputs, kind="stable")
    inputs, rows = train.inputs[order], train.rows[order]
    is_same = inputs[1:] == inputs[:-1]
    differing = np.flatnonzero(is_same & (rows[1:] != rows[:-1]))
    if not len(differing):
        return
    groups = np.concatenate([[0], np.cumsum(~is_same)])
    count = int(np.isin(groups, groups[differing]).sum())
    first, second = (int(order[differing[0] + step]) for step in (0, 1))
    yield Finding(
        level=WARNING,
        what="contradiction",
        detail=f"{count} of {len(rows)} training rows have the text of another row and a different "
        "label: correct the labels, or remove the rows",
        example=f"such as {where('train', first)} and {where('train', second)}: "
        f"{_shown(splits['train'], first)}",
    )


def _damaged(task: Task) -> Iterator[Finding]:
    """Yield a finding on texts that were read by a wrong encoding before they came here."""
    train = task.data.train
    some = train.select(range(min(_CHECKED_ROWS, len(train))))
    names = [name for name in train.column_names if name not in _NOT_COMPARED]
    rows: list[int] = []
    for first, table in enumerate(values.tables(some.select_columns(names))):
        is_damaged = np.zeros(len(table), bool)
        for column in filter(lambda column: is_string(column.type), table.columns):
            marks = pc.fill_null(pc.match_substring_regex(column, _DAMAGE), False)
            is_damaged |= marks.to_numpy(zero_copy_only=False)
        rows += (first * values.CHUNK_ROWS + np.flatnonzero(is_damaged)).tolist()
    if rows:
        yield Finding(
            level=WARNING,
            what="encoding",
            detail=f"{len(rows)} of {len(some)} training rows have U+FFFD, or UTF-8 that was read "
            "as Windows-1252: write the file again as UTF-8",
            example=f"such as {task.data.where('train', rows[0])}: {_shown(train, rows[0])}",
        )


def _hashes(split: Dataset, targets: Collection[str], known: dict[int, _Split]) -> _Split:
    """Return the hashes of a split's rows, and which rows have no text.

    Args:
        targets: The columns that the model does not read.
        known: The same of whole tables, of which splits select rows, by their `id`.
    """
    table = split.data.table
    if id(table) not in known:
        names = [name for name in split.column_names if name not in _NOT_COMPARED]
        names.sort(key=targets.__contains__)  # they come last
        parts = [(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, bool))]
        for batch in table.select(names).to_batches(values.CHUNK_ROWS):
            inputs = rows = np.zeros(len(batch), np.uint64)
            has_text = np.full(len(batch), not any(is_string(field.type) for field in batch.schema))
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                rows = values.chain_hashes(column, rows)
                if name in targets:
                    continue
                inputs = rows
                if is_string(column.type):
                    has_text |= values.has_text(column).to_numpy(zero_copy_only=False)
                else:
                    has_text |= True
            parts.append((inputs, rows, ~has_text))
        inputs, rows, is_empty = map(np.concatenate, zip(*parts, strict=True))
        known[id(table)] = _Split(inputs=inputs, rows=rows, is_empty=is_empty)
    whole = known[id(table)]
    if split._indices is None:
        return whole
    chosen = split._indices.column(0).to_numpy()
    return _Split(
        inputs=whole.inputs[chosen], rows=whole.rows[chosen], is_empty=whole.is_empty[chosen]
    )


def _shown(split: Dataset, row: int) -> str:
    """Return the beginning of a row's first text."""
    values_of_row = (value for name, value in split[row].items() if name not in _NOT_COMPARED)
    texts_of_row = (value for value in values_of_row if isinstance(value, (str, list)))
    first = next(texts_of_row, "")
    text = first if isinstance(first, str) else " ".join(map(str, first))
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}...")


def sampled_lengths(task: Task, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of `sampled_rows` before truncation."""
    rows = sampled_rows(task)
    with task.locating("train", rows):
        return task.lengths(tokenizer, rows)


def sampled_rows(task: Task) -> list[int]:
    """Return the training rows whose lengths are counted."""
    rows = len(task.train)
    drawn = random.Random(task.data_settings.seed).sample(range(rows), min(_MEASURED_ROWS, rows))
    return sorted(drawn)


def _lengths(task: Task, counts: Sequence[int], longest: int) -> Iterator[Finding]:
    """Yield percentiles of the lengths, and how many are truncated."""
    if not counts:
        return
    percentiles = {
        share: counts[min(len(counts) - 1, int(share * len(counts)))] for share in (0.5, 0.9, 0.99)
    }
    detail = (
        f"half {percentiles[0.5]}, 90 % {percentiles[0.9]}, 99 % {percentiles[0.99]}, longest "
        f"{counts[-1]} tokens"
    )
    yield Finding(level=OK, what="lengths", detail=f"{detail} (of {len(counts)} texts)")
    is_split = task.pieces(longest + 1, longest) > 1
    cut = sum(length > longest for length in counts) / len(counts)
    is_lossy = cut > _TRUNCATED_SHARE and not is_split
    detail = f"{cut:.1%} of the texts are longer than {longest} tokens"
    detail += " and are split" if is_split else " (raise max_length)" if is_lossy else ""
    yield Finding(level=WARNING if is_lossy else OK, what="truncation", detail=detail)


_ROWS, _CHARACTERS, _BATCH = 500, 2_000, 64
_MANY = 0.03
"""The share of unknown tokens from which the model loses what texts say."""
_SHOWN = 3


def find_unknown_tokens(
    task: Task, tokenizer: Tokenizer, rows: Sequence[int], left_out: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding if texts of the training data have tokens that are unknown to the tokenizer.

    Args:
        rows: Rows of the training data.
        left_out: Columns without texts that the model reads.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    names = [name for name in task.train.column_names if name not in left_out]
    if unknown is None or not tokenizer.is_fast or not rows or not names:
        return
    rows = rows[:: -(-len(rows) // _ROWS)]
    total, words = 0, Counter[str]()
    for first in range(0, len(rows), _BATCH):
        some = task.train.select_columns(names)[rows[first : first + _BATCH]]
        texts = [text[:_CHARACTERS] for text in strings_within(some)]
        if not texts:
            continue
        encoded = tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for text, ids, offsets in zip(
            texts, encoded[TOKEN_IDS], encoded["offset_mapping"], strict=True
        ):
            total += len(ids)
            words.update(
                text[start:end].strip()
                for number, (start, end) in zip(ids, offsets, strict=True)
                if number == unknown
            )
    if not words:
        return
    share = words.total() / total
    scripts = Counter(
        unicodedata.name(character, "").split(" ")[0].split("-")[0].capitalize()
        for word in words.elements()
        for character in word
        if character.isalpha()
    )
    script, count = scripts.most_common(1)[0] if scripts else ("", 0)
    script = {"Cjk": "Chinese"}.get(script, script)
    detail = f"{share:.1%} of the tokens of {len(rows)} rows are {tokenizer.unk_token}"
    if count > scripts.total() / 2:
        detail += f", most of them {script}"
    if share > _MANY:
        detail += (
            ": the model reads all of them alike. Give a model for the language of the texts, or a "
            "multilingual one"
        )
    shown = ", ".join(repr(word[:20]) for word, _ in words.most_common(_SHOWN))
    yield Finding(
        level=WARNING if share > _MANY else OK,
        what="unknown tokens",
        detail=detail,
        example=f"such as {shown}",
    )
