"""Read CoNLL files: a word and its tags on each line, empty lines between sentences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import TOKENS
from recipe.data.files.part import TAG, Part, first_lines, open_text
from recipe.data.files.spool import spool_tables
from recipe.errors import DataError

SUFFIXES = (".conll", ".conllu", ".iob", ".iob2", ".bio", ".bioes", ".bmes")
_SAMPLE_LINES = 200
_DOCUMENT = ("-DOCSTART-", "#begin document", "#end document")
_COMMENT, _KEYED = ("# ", "#\t", "## ", "##\t"), re.compile(r"#[ \t][^\s=]+ =")
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
    """Return whether a file has a suffix of CoNLL, or a word and a tag (B-PER) on each line."""
    if path.suffix.lower() in SUFFIXES:
        return True
    cells = [cells for _, cells in _lines(first_lines(path, _SAMPLE_LINES)) if cells]
    tags = {row[-1] for row in cells}
    widths = set(map(len, cells))
    return 1 not in widths and len(widths) <= 2 and all(map(TAG.fullmatch, tags)) and tags > {"O"}


def has_sentences(path: Path) -> bool:
    """Return whether lines begin with a word, have the same number of cells, and form sentences
    between empty lines."""
    rows = [cells for _, cells in _lines(first_lines(path, _SAMPLE_LINES))]
    lengths = [len([*group]) for has_cells, group in itertools.groupby(rows, bool) if has_cells]
    widths = {len(cells) for cells in rows if cells}
    are_words = not any(" " in cells[0] for cells in rows if cells)
    return are_words and len(widths) == 1 < max(widths) and len(lengths) > 1 < max(lengths)


def read_conll(path: Path, encoding: str) -> Part:
    """Return a row for each sentence: the column `tokens`, and a column for each kind of tags.

    Three kinds are named as in CoNLL-2003, and the ten columns of CoNLL-U as in its specification.
    Otherwise they are `column_2` ..., and the last one is `tags`, unless the one before it has the
    same entity types (nested entities: one must be named). A column of word numbers is left out.
    Raise DataError if lines have different numbers of cells, or the first column holds no words.
    """
    width = count = counted = named = several = tag_words = 0
    kinds: tuple[set[str], set[str]] = set(), set()  # of entities, in the last columns
    are_numbers = True
    for rows in _sentences(path, encoding):
        width = len(rows[0][1])
        if not count:
            _check_header(path, *rows[0])
        are_numbers = are_numbers and all(cells[-1].isdigit() for _, cells in rows)
        # The first column may number the words; CoNLL-U also has 1-2 and 1.1.
        numbers = [cells[0] for _, cells in rows if cells[0].isdigit()]
        is_counted = numbers and numbers == [str(n) for n in range(1, len(numbers) + 1)]
        tag_words += all(TAG.fullmatch(cells[0]) for _, cells in rows)
        count, counted = count + 1, counted + bool(is_counted)
        several += len(rows) > 1
        named += len(rows) > 1 and len({cells[0] for _, cells in rows}) == 1
        for index, known_kinds in zip((-2, -1), kinds, strict=True):
            known_kinds.update(cells[index][2:] for _, cells in rows if TAG.fullmatch(cells[index]))
    kind = pa.list_(pa.string())
    if not count:
        return Part(path=path, format="CoNLL", table=pa.table({TOKENS: pa.array([], kind)}))
    if width > 2 and named == several > 1:
        raise DataError(
            f"The first column of {path} is the same in all lines of a sentence, as the document's "
            "name in CoNLL-2012 (OntoNotes).",
            "Write a file with the columns of words and tags only.",
        )
    if tag_words == count and not kinds[1]:
        raise DataError(
            f"The first column of {path} has tags such as {rows[0][1][0]!r}, not words.",
            "Write the word first on each line, then its tags.",
        )
    is_counted = counted == count
    is_universal = width == 10 and (path.suffix.lower() == ".conllu" or is_counted)
    if is_universal:
        names = dict(zip([TOKENS, "lemmas", *_UNIVERSAL], range(1, 10), strict=True))
    else:
        names = _name_columns(width, is_counted, are_numbers, kinds)
    starts: list[npt.NDArray[np.int64]] = []

    def tables() -> Iterator[pa.Table]:
        """Yield the rows in pieces: as Python objects, all of them take ten times the file."""
        again = _sentences(path, encoding)
        while some := list(itertools.islice(again, _CHUNK_SENTENCES)):
            starts.append(np.array([rows[0][0] for rows in some], np.int64))
            if is_universal:
                some = [[row for row in rows if row[1][0].isdigit()] for rows in some]
            yield pa.table({
                name: pa.array([[cells[column_index] for _, cells in rows] for rows in some], kind)
                for name, column_index in names.items()
            })  # fmt: skip

    table = spool_tables(pa.schema([(name, kind) for name in names]), tables())
    lines = np.concatenate([np.empty(0, np.int64), *starts])
    return Part(path=path, format="CoNLL", table=table, lines=lines)


def _name_columns(
    width: int, is_counted: bool, are_numbers: bool, kinds: tuple[set[str], set[str]]
) -> dict[str, int]:
    """Return the names of columns and their places.

    Args:
        is_counted: Whether the first column numbers the words.
        are_numbers: Whether the last column holds numbers only.
        kinds: The entities of the last two columns.
    """
    # Nested entities, as in GermEval: the user must name one of the columns.
    inner, outer = kinds[0] - {""}, kinds[1] - {""}
    is_nested = width > 2 and bool(inner & outer)
    if width == 3 + is_counted:  # GermEval's inner entities may have kinds of their own
        is_nested = bool(inner and outer)
    first = 1 if width > 2 and is_counted else 0
    others = range(first + 1, width)
    last = f"column_{width}" if is_nested or (are_numbers and width > 2) else "tags"
    known: Sequence[str] = [*(f"column_{index + 1}" for index in others[:-1]), last]
    known = _COLUMNS_2003 if len(others) == 3 else known
    return dict(zip([TOKENS, *known], [first, *others], strict=True))


def _check_header(path: Path, line: int, cells: Sequence[str]) -> None:
    """Raise DataError if the first line names the columns."""
    if cells[0].lower() in _WORDS and {*cells[1:]} <= _HEADER:
        raise DataError(
            f"{path} line {line} names its columns: {', '.join(cells)}.",
            "Remove that line, and end each sentence by an empty line.",
        )


def _sentences(path: Path, encoding: str) -> Iterator[list[_Row]]:
    """Yield the lines of each sentence. Raises DataError if their numbers of cells differ."""
    width = 0
    with open_text(path, encoding) as stream:
        for has_words, lines in itertools.groupby(_lines(stream), key=lambda row: bool(row[1])):
            if not has_words:
                continue
            rows = list(lines)
            for number, cells in rows:
                width = width or len(cells)
                if len(cells) != width or width < 2:
                    why = f", the lines before it {width}" if width > 1 else ": a word and no tag"
                    raise DataError(
                        f"{path} line {number} has {len(cells)} columns{why}.",
                        "Write a word and its tags on each line, an empty line after each "
                        "sentence.",
                    )
            yield rows


def _lines(stream: Iterable[str]) -> Iterator[_Row]:
    """Yield the number and cells of each line, without cells between sentences.

    Comments before a sentence are left out. A line that begins with # is no comment within a
    sentence, or if it ends with a tag of this file: `#` is its word.
    """
    by_tabs: bool | None = None
    is_within = False
    ends: set[str] = set()
    for number, line in enumerate(stream, 1):
        text = line.strip("\r\n ")
        if not is_within and text.startswith(_COMMENT):
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
        if len(ends) < _MOST_TAGS:
            ends.add(cells[-1])
        yield number, [cell.strip(" ") for cell in cells]
