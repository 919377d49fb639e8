"""Delimited text read by Arrow: what `csv` reads, row for row, or nothing."""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.data.files import delimited, formats, spool
from recipe.data.files.part import Part
from recipe.errors import DataError

WORDS = [
    "good",
    "",
    "a b",
    'say ""x""',
    "x,y",
    "é 中文",
    "1.5",
    " lead",
    "it's",
    "semi;colon",
    "\\n",
]
Write = Callable[[random.Random], str]


def plain(draw: random.Random) -> str:
    return draw.choice([word for word in WORDS if '"' not in word and "," not in word])


def quoted_word(draw: random.Random) -> str:
    word = draw.choice([*WORDS, "two\nlines", "two\r\nlines", '""', '""""'])
    return f'"{word}"' if draw.random() < 0.6 or '"' in word or "," in word else word


def odd(draw: random.Random) -> str:
    """Now and then what `csv` takes as it stands, or refuses."""
    rare = ['a"b', 'a"', '"a" ', '"a"b', ' "a"', "a\rb", '"a\rb"', "a\0b", '""x']
    word = quoted_word(draw)
    return draw.choice(rare) if draw.random() < 1e-4 else word.replace("\n", " ")


def read(
    path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> tuple[list[object], list[int]]:
    with monkeypatch.context() as patch:
        if not quick:

            def refuse(*given: object) -> None:
                raise delimited.NotPlain

            patch.setattr(delimited, "_read_quickly", refuse)
        part = formats.read(path)
    return part.table.to_pylist(), list(map(int, part.lines if part.lines is not None else []))


@pytest.mark.parametrize("write", [plain, quoted_word, odd])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_and_lines_are_those_of_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write, end: str, seed: int
) -> None:
    """Blocks of a few kilobytes, so that rows and quotes lie across them."""
    monkeypatch.setattr(delimited, "_BLOCK", 1 << 12)
    draw = random.Random(f"{write.__name__} {end} {seed}")
    path = tmp_path / "train.csv"
    rows = [f"{write(draw)},{number % 2},{write(draw)}" for number in range(1_500)]
    blank = 700 if seed == 1 else None
    if blank is not None:
        rows[blank] = "" if write is odd else ",,"
    text = end.join(["text,label,note", *rows]) + end * (seed != 2)
    path.write_text(("\ufeff" if seed == 2 else "") + text, encoding="utf-8", newline="")
    quick: list[bool] = []
    before = delimited._read_quickly

    def watched(*given: object) -> Iterator[object]:
        yield from before(*given)  # type: ignore[arg-type]
        quick.append(True)

    monkeypatch.setattr(delimited, "_read_quickly", watched)
    try:
        expected = read(path, monkeypatch, quick=False)
    except DataError as error:
        with pytest.raises(DataError) as caught:
            read(path, monkeypatch, quick=True)
        assert str(caught.value) == str(error)
        return
    assert read(path, monkeypatch, quick=True) == expected
    assert len(expected[0]) == 1_500 - (blank is not None)
    if write is not odd:
        assert quick == [True], "it was read quickly"


@pytest.mark.parametrize(
    "row", ['a,"open', "a,b,c", '"a"b,c', "a,b\xff"], ids=["open", "fields", "behind", "bytes"]
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "train.csv"
    rows = [f"text {number},{number % 2}" for number in range(1_500)]
    rows[1_200] = row
    path.write_bytes("\n".join(["text,label", *rows]).encode("latin-1"))
    with pytest.raises(DataError, match="line 1202 "):
        formats.read(path)


def test_tabs_without_quoting(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    rows = [f'the "{number}\t{number % 2}' if number % 2 else f'"{number} inch\t0' for number in
            range(1_500)]  # fmt: skip
    path.write_text("\n".join(["text\tlabel", *rows]))
    part = formats.read(path)
    assert part.table.num_rows == 1_500
    assert part.table["text"].to_pylist()[:2] == ['"0 inch', 'the "1']
    assert part.where(3) == f"{path} line 5"


def test_many_rows_are_a_mapped_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(spool, "_IN_MEMORY", 10_000)
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["n", "y"])}
    )
    table = pa.table({"text": [f"text {index}" for index in range(5_000)],
                      "label": [index % 2 for index in range(5_000)]})  # fmt: skip
    table = table.cast(features.arrow_schema)
    with (tmp_path / "train.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [["text", "label"], *zip(*table.to_pydict().values(), strict=True)]
        )
    pq.write_table(table, tmp_path / "train.parquet")
    read: list[Part] = []
    before = pa.total_allocated_bytes()
    for name in ("train.csv", "train.parquet"):
        read.append(formats.read(tmp_path / name))
    # Arrow's own threads give back what they read ahead when they come to it.
    deadline = time.monotonic() + 60
    while pa.total_allocated_bytes() - before > 10_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pa.total_allocated_bytes() - before < 10_000, "the rows are in no memory"
    assert not list((tmp_path / "cache").iterdir())
    texts, classes = table.to_pydict().values()
    assert read[0].table.to_pydict() == {"text": texts, "label": list(map(str, classes))}
    assert read[1].table.to_pydict() == table.to_pydict()
    assert read[1].class_names == {"label": ["n", "y"]}
    some = read[0].select([3, 2])
    assert some.where(0).endswith("line 5") and some.table["text"].to_pylist() == texts[3:1:-1]
