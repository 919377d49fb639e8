"""Texts and CoNLL files are read some at a time: the rows and places of all read together; and so
are the rows of data sets."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from recipe.data import values
from recipe.data.files import conll, formats


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conll, "_AT_ONCE", 3)
    monkeypatch.setattr(formats, "_TEXTS_AT_ONCE", 4)
    monkeypatch.setattr(formats, "_CHARACTERS_AT_ONCE", 7)


PIECES = ["a", "é 🙂", "b c", "\n", "\n", "\r\n", "\r", " ", "\n\n", "\t"]


@pytest.mark.parametrize("seed", range(30))
def test_texts_are_those_of_the_whole_file(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    whole = "".join(draw.choices(PIECES, k=draw.choice([0, 1, 5, 40, 200])))
    path = tmp_path / "texts.txt"
    path.write_bytes(whole.encode(draw.choice(["utf-8", "utf-8-sig", "utf-16"])))
    lines = whole.replace("\r\n", "\n").split("\n")
    numbered = list(enumerate(lines, 1))
    by_blank = itertools.groupby(numbered, key=lambda line: bool(line[1].strip()))
    paragraphs = [list(group) for _, group in by_blank]
    for sample_by, groups in {
        "line": [[line] for line in numbered], "paragraph": paragraphs, "document": [numbered],
    }.items():  # fmt: skip
        texts = [(group[0][0], "\n".join(text for _, text in group)) for group in groups]
        expected = [(number, text.strip("\n")) for number, text in texts if text.strip()]
        part = formats.read_texts(path, sample_by)
        assert part.lines is not None
        assert list(zip(part.lines, part.table["text"].to_pylist(), strict=True)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_sentences_are_those_that_were_written(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    is_counted, width = draw.random() < 0.5, draw.choice([2, 3, 5])
    sentences: list[list[list[str]]] = []
    text, lines = "-DOCSTART- -X- O O\n\n", []
    for _ in range(draw.choice([1, 3, 4, 20])):
        words = [
            [draw.choice(["Ada", "went", "1842", "#"]),
             *draw.choices(["O", "B-X", "I-X"], k=width - 1)]
            for _ in range(draw.randint(1, 5))
        ]  # fmt: skip
        sentences.append(words)
        lines.append(text.count("\n") + 1)
        rows = ([str(at), *row] if is_counted else row for at, row in enumerate(words, 1))
        text += "\n".join(map("\t".join, rows)) + "\n" + "\n" * draw.randint(1, 3)
    (tmp_path / "train.conll").write_text(text)
    part = formats.read(tmp_path / "train.conll")
    columns = part.table.column_names
    assert len(columns) == width and columns[0] == "tokens"
    for at, name in enumerate(columns):
        expected = [[row[at] for row in words] for words in sentences]
        assert part.table[name].to_pylist() == expected, name
    assert [part.where(row).split()[-1] for row in range(len(sentences))] == list(map(str, lines))


def test_one_sentence_that_does_not_count_its_words_tells_for_all(tmp_path: Path) -> None:
    counted = "1 Ada B-X\n2 went O\n\n" * 7
    (tmp_path / "a.conll").write_text(counted)
    assert formats.read(tmp_path / "a.conll").table["tokens"].to_pylist() == [["Ada", "went"]] * 7
    (tmp_path / "b.conll").write_text(counted + "1842 CD B-X\n\n")
    read = formats.read(tmp_path / "b.conll").table["tokens"].to_pylist()
    assert read == [["1", "2"]] * 7 + [["1842"]]


def test_a_file_without_words_and_a_sentence_of_ranges_alone_have_none(tmp_path: Path) -> None:
    (tmp_path / "empty.conllu").write_text("\n# a comment\n")
    assert formats.read(tmp_path / "empty.conllu").table.num_rows == 0
    word = "\t".join(["1", "Ada", "Ada", "PROPN", *("_" * 6)])
    span = "\t".join(["1-2", "zum", *("_" * 8)])
    (tmp_path / "ranges.conllu").write_text(f"{word}\n\n{span}\n\n{word}\n")
    read = formats.read(tmp_path / "ranges.conllu")
    assert read.table["tokens"].to_pylist() == [["Ada"], [], ["Ada"]]
    assert read.where(1).endswith("line 3") and read.where(2).endswith("line 5")


@pytest.mark.parametrize("seed", range(5))
def test_chosen_rows_are_those_of_the_library(seed: int) -> None:
    random_ = np.random.default_rng(seed)
    count, pieces = int(random_.integers(1, 400)), []
    while sum(map(len, pieces)) < count:
        numbers = random_.integers(0, 9, random_.integers(1, 90))
        pieces.append(
            pa.table({
                "text": pa.array([None if n == 8 else "é" * n for n in numbers], pa.large_string()),
                "label": numbers,
                "several": pa.array([[n / 2, 1.0] for n in numbers], pa.list_(pa.float32())),
                "lists": pa.array([["a"] * n for n in numbers], pa.list_(pa.string())),
            })
        )  # fmt: skip
    split = datasets.Dataset(pa.concat_tables(pieces), fingerprint="whole")
    drawn = random_.integers(0, len(split), count)
    for rows in (drawn, np.sort(drawn), np.unique(drawn), drawn[:0], np.arange(len(split))[2:]):
        for chosen in (split, split.select(rows), split.select(rows).select(range(len(rows) // 2))):
            for at_once in (7, 1000):
                wanted = chosen.with_format("arrow").iter(at_once)
                for table, other in zip(values.tables(chosen, at_once), wanted, strict=True):
                    assert table.combine_chunks().equals(other.combine_chunks())
            if len(chosen):
                library = chosen.with_format("numpy")[:]
                for name in ("label", "several"):
                    assert np.array_equal(
                        values.column(chosen, name), np.stack(list(library[name]))
                    )
