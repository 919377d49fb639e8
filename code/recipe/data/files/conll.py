"""Read CoNLL files: a word and its tags on each line, empty lines between sentences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import TOKENS
from recipe.data.files.part import OUTSIDE, TAG, Part
from recipe.data.files.spool import spool_tables
from recipe.data.files.text_files import first_lines, open_text
from recipe.errors import DataError

SUFFIXES = (".conll", ".conllu", ".iob", ".iob2", ".bio", ".bioes", ".bmes")
_SAMPLE_LINES = 200
_DOCUMENT = ("-DOCSTART-", "#begin document", "#end document")
_PUNCTUATION = re.compile(r"[.,:;!?。、،؟।]")
_COMMENT, _KEYED = ("# ", "#\t", "## ", "##\t"), re.compile(r"#[ \t][^\s=]+ =")
_BARRED = re.compile(r"(?!.* (?:O|[BI]-\S+)\|)[^\t]+\|(O|[BI][-_][^|\s]+)")
"""A word, a bar and a tag, as in PEYMA; no word and two tags."""
_WORDS = {"word", "words", "token", "tokens", "form", "text"}
_HEADER = {
    *("tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "pos", "pos_tag", "pos_tags"),
    *("chunk", "chunk_tag", "lemma", "sentence", "sentence_id", "sent_id", "id", "entity", "iob"),
}
"""Names of the first and of the other columns, in a line that has no word."""
_SPACE = re.compile(r"[\t ]+")
"""Other white space of Unicode may be a word, or part of one."""
_UNIVERSAL = ("upos", "xpos", "feats", "head", "deprel", "deps", "misc")
"""The columns of CoNLL-U after number, word and lemma."""
_COLUMNS_2003 = ("pos_tags", "chunk_tags", "ner_tags")
_CHUNK_SENTENCES = 1_000  # sentences
_MOST_TAGS = 1_000
_Row = tuple[int, list[str]]


def is_conll(path: Path) -> bool:
    """Return whether a file has a suffix of CoNLL, or a word and a tag (B-PER) on each line.

    Other tags (PER) are known by `O`, in sentences that have punctuation on lines of its own: texts
    with classes have none. The tags may stand before other columns of sentences.
    """
    if path.suffix.lower() in SUFFIXES or _is_barred(path):
        return True
    cells = [cells for _, cells in _lines(first_lines(path, _SAMPLE_LINES)) if cells]
    widths = set(map(len, cells))
    if not widths or 1 in widths:
        return False
    last = {row[-1] for row in cells}
    columns = [last] if len(widths) <= 2 else [{cell for row in cells for cell in row[1:]}]
    if has_sentences(path) and not any(" " in cell for row in cells for cell in row):
        columns += map(set, zip(*(row[1:] for row in cells), strict=True))
        if OUTSIDE in last and any(map(_PUNCTUATION.fullmatch, {row[0] for row in cells})):
            return True
    return any(tags > {OUTSIDE} and all(map(TAG.fullmatch, tags)) for tags in columns)


def has_sentences(path: Path) -> bool:
    """Return whether lines begin with a word, have the same number of cells, and form sentences
    between empty lines."""
    rows = [cells for _, cells in _lines(first_lines(path, _SAMPLE_LINES))]
    lengths = [len([*group]) for has_cells, group in itertools.groupby(rows, bool) if has_cells]
    widths = {len(cells) for cells in rows if cells}
    are_words = not any(" " in cells[0] for cells in rows if cells)
    return are_words and len(widths) == 1 < max(widths) and len(lengths) > 1 < max(lengths)


def _is_barred(path: Path) -> bool:
    """Return whether a bar stands between words and tags, and empty lines between sentences."""
    lines = [line.strip("\r\n ") for line in first_lines(path, _SAMPLE_LINES)]
    matches = [_BARRED.fullmatch(line) for line in lines if line]
    tags = {match[1] for match in matches if match}
    return "" in lines[1:-1] and all(matches) and tags > {OUTSIDE}


def read_conll(path: Path, encoding: str) -> Part:
    """Return a row for each sentence: the column `tokens`, and a column for each kind of tags.

    Three kinds are named as in CoNLL-2003, and the ten columns of CoNLL-U as in its specification.
    Otherwise they are `column_2` ..., and `tags` is the last one, or the only one with several
    values and none empty; one of nested entities must be named. A column of word numbers is left
    out. Raise DataError if lines have different numbers of cells, other than tags of nested
    entities, or the first column holds no words.
    """
    count = counted = named = several = 0
    values: dict[int, set[str]] = {}
    widths: set[int] = set()
    are_numbers = True
    for rows in _sentences(path, encoding):
        columns = itertools.zip_longest(*(cells for _, cells in rows), fillvalue=OUTSIDE)
        for index, column in enumerate(columns):
            if len(known := values.setdefault(index, set())) < _MOST_TAGS:
                known.update(column)
        widths.update(len(cells) for _, cells in rows)
        if not count:
            _check_header(path, *rows[0])
        are_numbers = are_numbers and all(cells[-1].isdigit() for _, cells in rows)
        # The first column may number the words; CoNLL-U also has 1-2 and 1.1.
        numbers = [cells[0] for _, cells in rows if cells[0].isdigit()]
        is_counted = numbers and numbers == [str(n) for n in range(1, len(numbers) + 1)]
        count, counted = count + 1, counted + bool(is_counted)
        several += len(rows) > 1
        named += len(rows) > 1 and len({cells[0] for _, cells in rows}) == 1
    width = len(values)
    kind, missing = pa.list_(pa.string()), [OUTSIDE] * (width - min(widths, default=0))
    if not count:
        return Part(path=path, format="CoNLL", table=pa.table({TOKENS: pa.array([], kind)}))
    if width > 2 and named == several > 1:
        raise DataError(
            f"The first column of {path} is the same in all lines of a sentence, as the document's "
            "name in CoNLL-2012 (OntoNotes).",
            "Write a file with the columns of words and tags only.",
        )
    if all(map(TAG.fullmatch, values[0])) and not any(map(TAG.fullmatch, values[width - 1])):
        raise DataError(
            f"The first column of {path} has tags such as {rows[0][1][0]!r}, not words.",
            "Write the word first on each line, then its tags.",
        )
    is_counted = counted == count
    is_universal = width == 10 and (path.suffix.lower() == ".conllu" or is_counted)
    if is_universal:
        names = dict(zip([TOKENS, "lemmas", *_UNIVERSAL], range(1, 10), strict=True))
    else:
        names = _name_columns(values, is_counted, are_numbers, is_even=len(widths) == 1)
    starts: list[npt.NDArray[np.int64]] = []

    def tables() -> Iterator[pa.Table]:
        """Yield the rows in pieces: as Python objects, all of them take ten times the file."""
        again = _sentences(path, encoding)
        while some := list(itertools.islice(again, _CHUNK_SENTENCES)):
            starts.append(np.array([rows[0][0] for rows in some], np.int64))
            if is_universal:
                some = [[row for row in rows if row[1][0].isdigit()] for rows in some]
            if missing:
                some = [[(line, [*cells, *missing]) for line, cells in rows] for rows in some]
            yield pa.table({
                name: pa.array([[cells[column_index] for _, cells in rows] for rows in some], kind)
                for name, column_index in names.items()
            })  # fmt: skip

    table = spool_tables(pa.schema([(name, kind) for name in names]), tables())
    lines = np.concatenate([np.empty(0, np.int64), *starts])
    return Part(path=path, format="CoNLL", table=table, lines=lines)


def _name_columns(
    values: Mapping[int, set[str]], is_counted: bool, are_numbers: bool, is_even: bool
) -> dict[str, int]:
    """Return the names of columns and their places.

    Args:
        values: Those of each column.
        is_counted: Whether the first column numbers the words.
        are_numbers: Whether the last column holds numbers only.
        is_even: Whether all lines have equally many cells.
    """
    first = 1 if len(values) > 2 and is_counted else 0
    others = range(first + 1, len(values))
    last = others[-1]
    tagged = [index for index in others
              if values[index] != {OUTSIDE} and all(map(TAG.fullmatch, values[index]))]  # fmt: skip
    possible = [index for index in others if len(values[index]) > 1 and "" not in values[index]]
    # One of nested entities, as in GermEval, must be named, or of entities and tags behind them.
    is_unclear = tagged not in ([], [last]) or (are_numbers and len(values) > 2)
    names = {index: f"column_{index + 1}" for index in others}
    if len(tagged) == 1 and tagged == possible:
        names[tagged[0]] = "tags"
    elif is_even and len(others) == len(_COLUMNS_2003) and others[0] not in tagged:
        names = dict(zip(others, _COLUMNS_2003, strict=True))
    elif not is_unclear:
        names[last] = "tags"
    return {TOKENS: first, **{name: index for index, name in names.items()}}


def _check_header(path: Path, line: int, cells: Sequence[str]) -> None:
    """Raise DataError if the first line names the columns."""
    if cells[0].lower() in _WORDS and {*cells[1:]} <= _HEADER:
        raise DataError(
            f"{path} line {line} names its columns: {', '.join(cells)}.",
            "Remove that line, and end each sentence by an empty line.",
        )


def _sentences(path: Path, encoding: str) -> Iterator[list[_Row]]:
    """Yield the lines of each sentence. Raises DataError if their numbers of cells differ, and some
    are no tags of nested entities."""
    width, are_tags = 0, False
    with open_text(path, encoding) as stream:
        rows_of_file = _lines(stream, _is_barred(path))
        for has_words, lines in itertools.groupby(rows_of_file, key=lambda row: bool(row[1])):
            if not has_words:
                continue
            rows = list(lines)
            for number, cells in rows:
                if not width:
                    width, are_tags = len(cells), all(map(TAG.fullmatch, cells[1:]))
                is_wrong = len(cells) != width and not (
                    are_tags and len(cells) > 1 and all(map(TAG.fullmatch, cells[1:]))
                )
                if is_wrong or width < 2:
                    why = f", the lines before it {width}" if width > 1 else ": a word and no tag"
                    raise DataError(
                        f"{path} line {number} has {len(cells)} columns{why}.",
                        "Write a word and its tags on each line, an empty line after each "
                        "sentence.",
                    )
            yield rows


def _lines(stream: Iterable[str], is_barred: bool = False) -> Iterator[_Row]:
    """Yield the number and cells of each line, without cells between sentences.

    Comments before a sentence are left out. A line that begins with # is no comment within a
    sentence, or if it ends with a tag of this file: `#` is its word.
    """
    by_tabs: bool | None = None
    is_within = False
    ends: set[str] = set()
    for number, line in enumerate(stream, 1):
        text = line.strip("\r\n ")
        if not is_within and text.startswith(_COMMENT) and not is_barred:
            last = _SPACE.split(text)[-1]
            if _KEYED.match(text) or not (TAG.fullmatch(last) or last in ends):
                continue
        is_within = bool(text.strip("\t")) and not text.startswith(_DOCUMENT)
        if not is_within:
            yield number, []
            continue
        if by_tabs is None:
            by_tabs = "\t" in text
        # A word may contain a space if tabs separate the cells.
        cells = text.split("\t") if by_tabs else _SPACE.split(text)
        if is_barred:
            *cells, tag = text.rsplit("|", 1)
            cells.append(re.sub(r"^([BI])_", r"\1-", tag))
        if len(ends) < _MOST_TAGS:
            ends.add(cells[-1])
        yield number, [cell.strip(" ") for cell in cells]
