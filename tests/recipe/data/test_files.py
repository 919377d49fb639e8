"""Files to rows: as they were written, some rows at a time, or refused with the file and the line."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from recipe.data import classification
from recipe.data.files import delimited, formats, json_rows, spool
from recipe.data.files import part as parts
from recipe.data.files.part import Part
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from tests.support.paths import CODE

PIECES = ['"', '""', "'", ",", ";", "\t", "|", "\n", "\r\n", "\r", " ", "a", "1", "é", "中", "🙂", "\u2028", "\x85",
          "\x0c", "\x1c", "\\", "\\n", "#", "{", "[", "\ufeff", "null", "text", "label"]  # fmt: skip
# What cuts rows and cells is drawn most.
CELLS = some.lists(some.sampled_from(PIECES) | some.sampled_from('"\n\t,'), max_size=5).map("".join)
ROWS = some.lists(some.tuples(CELLS, CELLS), min_size=1, max_size=12)
ENCODINGS = some.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "cp1252"])


def write(path: Path, text: str, encoding: str, packed: bool) -> None:
    """Write a text, with a mark of its byte order where the encoding has none."""
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    data = mark + text.encode(encoding, "xmlcharrefreplace" if encoding == "cp1252" else "strict")
    path.write_bytes(gzip.compress(data) if packed else data)


def check(
    path: Path, expected: list[tuple[Any, Any]], lines: list[int], encoding: str, text: str
) -> None:
    """See that a file is read as `expected`, with these lines, or refused with its name and a line."""
    try:
        part = formats.read(path)
    except DataError as error:
        assert re.search(
            rf"{re.escape(str(path))}.* line \d+|{re.escape(str(path))} has two columns", str(error)
        ), error
        # Only what is in doubt is refused: another encoding, or rows that repeat the header.
        doubts = encoding == "cp1252" and not text.isascii()
        assert doubts or "repeats the header" in str(error) or "either way" in str(error), error
        return
    assert encoding != "cp1252" or text.isascii()
    assert part.table.column_names == ["text", "label"]
    assert (
        list(zip(*(column.to_pylist() for column in part.table.columns), strict=True)) == expected
    )
    assert part.lines is not None and [int(line) for line in part.lines] == lines


@settings(max_examples=60)
@given(
    ROWS, some.sampled_from([",", ";", "|", "\t"]), some.sampled_from(["\n", "\r\n"]), ENCODINGS, some.booleans(),
    some.booleans(), some.booleans(), some.integers(1, 40),
)  # fmt: skip
@example([("a\tb\nc", "x"), ("d", "y")], "\t", "\n", "utf-8", False, False, True, 9)
def test_cells_of_csv_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], delimiter: str, end: str,
    encoding: str, packed: bool, all_quoted: bool, last_end: bool, block: int,
) -> None:  # fmt: skip
    path = tmp_path_factory.getbasetemp() / ("train.tsv" if delimiter == "\t" else "train.csv")

    def cell(value: str) -> str:
        is_plain = not re.search(rf"[\"\r\n{re.escape(delimiter)}]", value)
        return value if is_plain and not all_quoted else '"' + value.replace('"', '""') + '"'

    if encoding == "cp1252":
        rows = [
            tuple(value.encode("cp1252", "ignore").decode("cp1252") for value in row)
            for row in rows
        ]  # type: ignore[misc]
    written = [delimiter.join(map(cell, row)) for row in [("text", "label"), *rows]]
    lines = [1]
    for row in written:
        lines.append(lines[-1] + len(re.findall("\r\n|\r|\n", row)) + 1)
    write(path, end.join(written) + end * last_end, encoding, packed)
    kept = [(row, line) for row, line in zip(rows, lines[1:], strict=False) if any(row)]
    with pytest.MonkeyPatch.context() as patch:
        # Small, so that Arrow reads some of it, in several blocks.
        patch.setattr(delimited, "_SAMPLE_ROWS", 2)
        patch.setattr(delimited, "_BLOCK", block)
        check(
            path, [row for row, _ in kept], [line for _, line in kept], encoding, "".join(written)
        )


@settings(max_examples=40)
@given(
    some.lists(some.tuples(some.text(max_size=6) | CELLS, CELLS), min_size=1, max_size=6),
    some.sampled_from(["\n", "\r\n", "\n\n"]), ENCODINGS, some.booleans(), some.booleans(), some.integers(1, 40),
)  # fmt: skip
def test_strings_of_json_lines_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], end: str, encoding: str, packed: bool,
    escaped: bool, block: int,
) -> None:  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "train.jsonl"
    if encoding == "cp1252" and not escaped:
        rows = [
            tuple(value.encode("cp1252", "ignore").decode("cp1252") for value in row)
            for row in rows
        ]  # type: ignore[misc]
    written = [
        json.dumps(dict(zip(("text", "label"), row, strict=True)), ensure_ascii=escaped)
        for row in rows
    ]
    write(path, end.join(written), encoding, packed)
    lines = [1 + number * end.count("\n") for number in range(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK_CHARACTERS", block)
        check(path, rows, lines, encoding, "".join(written))


@settings(max_examples=80)
@given(
    ROWS, some.lists(some.tuples(some.integers(0), some.sampled_from(PIECES)), max_size=2), some.booleans(),
    some.integers(1, 40),
)  # fmt: skip
def test_arrow_reads_what_csv_reads_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]],
    inserted: list[tuple[int, str]], all_quoted: bool, block: int,
) -> None:  # fmt: skip
    """Rows, their lines and errors; also of text with pieces where no writer puts them."""
    out = io.StringIO()
    quoting = csv.QUOTE_ALL if all_quoted else csv.QUOTE_MINIMAL
    csv.writer(out, quoting=quoting, lineterminator="\n").writerows([("text", "label"), *rows])
    text = out.getvalue()
    for offset, piece in inserted:
        text = text[: offset % len(text)] + piece + text[offset % len(text) :]
    path = tmp_path_factory.getbasetemp() / "train.csv"
    path.write_text(text, encoding="utf-8", newline="")

    def refuse(*given: object) -> None:
        raise delimited.NotPlain

    outcomes = []
    for is_quick in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delimited, "_SAMPLE_ROWS", 2)
            patch.setattr(delimited, "_BLOCK", block)
            if not is_quick:
                patch.setattr(delimited, "_read_quickly", refuse)
            try:
                part = formats.read(path)
                lines = list(map(int, part.lines if part.lines is not None else []))
                outcomes.append((part.table.to_pydict(), lines))
            except DataError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_large_plain_file_is_read_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Also if the end of a block falls between \\r and \\n."""
    finished: list[bool] = []
    before = delimited._read_quickly

    def watched(*given: Any) -> Iterator[object]:
        yield from before(*given)
        finished.append(True)

    monkeypatch.setattr(delimited, "_read_quickly", watched)
    text = "text,label\n" + 'good,1\n"two\nlines, ""x""",0\n' * 750
    (tmp_path / "a.csv").write_bytes(text.replace("\n", end).encode())
    for block in range(1 << 12, (1 << 12) + 8 * len(end)):
        monkeypatch.setattr(delimited, "_BLOCK", block)
        assert formats.read(tmp_path / "a.csv").table.num_rows == 1_500
        assert finished.pop()


def test_quotes_of_glue_s_files_are_characters(tmp_path: Path) -> None:
    def write(*columns: Sequence[str]) -> Path:
        """Write rows as GLUE's files have them: nothing is quoted."""
        rows = [("label", "sentence1", "sentence2"), *zip(labels, *columns, strict=True)]
        path = tmp_path / "b.tsv"
        path.write_text("\n".join(map("\t".join, rows)) + "\n", encoding="utf-8-sig")
        return path

    labels, plain = ["0", "1"] * 20, [f"the film was number {n}" for n in range(40)]
    quoted = [f'"He said it" on day {n} , and then the {n} came back" again' for n in range(40)]
    open_ended = [*quoted[:3], '"open', *quoted[4:20], 'closed"', *quoted[21:]]
    table = formats.read(write(quoted, open_ended)).table
    assert table.column_names[0] == "label"
    assert table["sentence1"].to_pylist() == quoted
    assert table["sentence2"].to_pylist() == open_ended
    in_doubt = [*plain[:3], '"open', *plain[4:7], 'shut"', *plain[8:]]
    with pytest.raises(DataError, match=r"b\.tsv line 5 begins a cell of several lines in quotes"):
        formats.read(write(plain, in_doubt))
    swallowed = write(['a "b" c', *plain[1:]], in_doubt)
    assert formats.read(swallowed).table["sentence2"].to_pylist() == in_doubt
    (tmp_path / "c.tsv").write_text("label\ttext\n" + '0\t"two\nlines"\n1\t"two\nothers"\n' * 20)
    texts = formats.read(tmp_path / "c.tsv").table["text"].to_pylist()
    assert texts == ["two\nlines", "two\nothers"] * 20


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
    rows = [{"text": f"text {n}", "label": n % 2 if n < 4_900 else "odd"} for n in range(5_000)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(json_rows, "_CHUNK_ROWS", 100)
    read: list[Part] = []
    before = pa.total_allocated_bytes()
    for name in ("train.csv", "train.parquet", "train.jsonl"):
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
    assert read[2].table["label"].to_pylist()[-101:-99] == ["1", "odd"], "of types that come last"
    some = read[0].select([3, 2])
    assert some.where(0).endswith("line 5") and some.table["text"].to_pylist() == texts[3:1:-1]


@settings(max_examples=60)
@given(
    some.lists(
        some.fixed_dictionaries({"text": some.sampled_from(["x", "", "2020-01-01", None])}, optional={
            "label": some.sampled_from([1, 1, 1, 2.5, None, 2**53 + 1]),
            "more": some.dictionaries(some.sampled_from("abcd"), some.just(1), max_size=3),
            "turns": some.sampled_from([[{"role": "user"}] * 2, [{"role": "user", "name": "n"}] * 2]),
            "x": some.recursive(
                some.sampled_from([None, 1, 0, -5, 2**53 + 1, 2**63, 2**70, 0.5, 1.0, True, float("nan"),
                                   "x", "", "2020-01-01T00:00:00Z", "é🙂"]),
                lambda inner: some.lists(inner, max_size=3)
                | some.dictionaries(some.sampled_from("abc"), inner, max_size=3),
                max_leaves=6,
            ),
        }), min_size=2, max_size=30,
    ),
    some.sampled_from([7, 60, 1_000]), some.sampled_from([",", " ,", ", "]), some.booleans(),
)  # fmt: skip
def test_rows_of_json_are_those_of_all_together(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], block: int, comma: str, escaped: bool
) -> None:  # fmt: skip
    expected = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        try:
            expected[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # no common type: as texts
            as_texts = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
            expected[name] = pa.array(as_texts)
    texts = [json.dumps(row, ensure_ascii=escaped) for row in rows]
    folder = tmp_path_factory.getbasetemp()
    lines, document, within = (folder / name for name in ("a.jsonl", "a.json", "within.json"))
    lines.write_text("".join("\n" * (n % 3 == 1) + text + "\n" for n, text in enumerate(texts)))
    document.write_text(f" [{comma.join(texts)} ]\n")
    within.write_text(f'{{ "data":{document.read_text().strip()}}}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK_ROWS", 3)
        patch.setattr(json_rows, "_CHUNK_CHARACTERS", block)
        several = [
            json_rows.read_json_objects(lines, "utf-8-sig"),
            json_rows.read_json(document, "utf-8-sig"),
            json_rows.read_json_objects(within, "utf-8-sig"),
        ]
    for read in several:
        assert read.table.schema == pa.table(expected).schema
        assert repr(read.table.to_pylist()) == repr(
            pa.table(expected).to_pylist()
        )  # NaN is not equal
        for name, column in expected.items():
            first = next(
                (n for n, row in enumerate(rows) if isinstance(row.get(name), (list, dict))), None
            )
            is_mixed = pa.types.is_string(column.type) and first is not None
            assert read.mixed.get(name) == (read.where(first or 0) if is_mixed else None)
    assert several[0].lines is not None
    assert list(map(int, several[0].lines)) == [
        n + 1 + (n + 1) // 3 + (n % 3 == 1) for n in range(len(rows))
    ]


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.mark.parametrize(
    ("name", "document", "rows", "indent"),
    [
        (name, document, rows, indent)
        for name, document, rows in [
    ("a.jsonl", {"messages": MESSAGES}, 1),
    ("a.json", {"messages": MESSAGES}, 1),
    ("a.json", {"text": "Ada", "entities": [{"start": 0}, {"start": 1}]}, 1),
    ("a.jsonl", {"tokens": ["a", "b"], "tags": ["O", "O"]}, 1),
    ("a.ndjson", {"text": "x", "turns": MESSAGES}, 1),
    ("a.json", {"version": 2, "data": MESSAGES}, 2),
    ("a.jsonl", {"data": MESSAGES}, 2),
    ("a.json", {"articles": MESSAGES}, 2),
]
        # Lines hold an object each.
        for indent in ([None, 1] if name.endswith(".json") else [None])
    ],
)  # fmt: skip
def test_an_object_alone_is_a_row_or_holds_rows(
    name: str, document: dict[str, Any], rows: int, indent: int | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(document, indent=indent))
    assert formats.read(tmp_path / name).table.num_rows == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"a": 1},]', "not valid JSON"),
        ('[{"a": 1}', "not valid JSON"),
        ('[{"a": 1}] {"a": 1}', "not valid JSON: Extra data"),
        ('[{"a": 1} {"a": 2}]', "not valid JSON"),
        ('[{"a": 1}, 5]', "row 1 is not an object, but 5"),
        ('[{"a": "b"}, {"a": "\\ud83d"}]', "row 1 holds half of a surrogate pair"),
    ],
)
def test_what_is_wrong_in_a_list_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(DataError, match=says):
        formats.read(tmp_path / "train.json")


def test_batches_come_with_the_numbers_of_their_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_CHUNK_ROWS", 2)
    read = Part(path=Path("a"), format="parquet", table=pa.table({"a": range(5)}))
    assert [(first, rows.num_rows) for first, rows in read.batches(["a"])] == [
        (0, 2),
        (2, 2),
        (4, 1),
    ]


def test_labels_read_in_pieces_are_those_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn_columns(draw: random.Random) -> dict[str, Any]:
        """Texts beside labels of one of many kinds, some of them wrong."""
        rows = draw.randint(3, 40)
        values = draw.choice([
            ["a", "b", "c"], [0, 1, 2], [0.0, 1.0, 2.0], ["1", "1.0", "0"], ["0", "1", "-"],
            [-1, 0, 1, 2], [0.25, 1.5, 3.0, 4.0, -2.0], ["0.25", "1.5", "3", "7", "9"],
            [[0], [1, 2], []], [["x"], ["x", "y"], ["z"]], ['["x"]', '["x", "y"]', '["z"]'],
            ["O", "B-X", "I-X"], ["a;b", "b", "a"], [1.5, 2.5, float("nan"), 3.25, 8.5],
            [0.5, 1.5, float("inf"), 2.5], ["0.5", "1.5", "much", "2.5", "3.5"], [True, False],
        ])  # fmt: skip
        cells = [draw.choice(values) for _ in range(rows)]
        if draw.random() < 0.2:
            cells[draw.randrange(rows)] = None
        texts: list[Any] = [f"text {draw.randrange(1000)} of {n}" for n in range(rows)]
        if draw.random() < 0.2:
            texts = [text.split() for text in texts]
        table = {"text": texts, draw.choice(["label", "labels"]): cells}
        if draw.random() < 0.2:
            table["split"] = [draw.choice(["train", "train", "test"]) for _ in range(rows)]
        if draw.random() < 0.1:
            del table[next(name for name in table if "label" in name)]
            table |= {
                name: [draw.choice([0, 1]) for _ in range(rows)] for name in ("red", "blue", "x")
            }
        return table

    def outcome(folder: Path, more: dict[str, Any]) -> Any:
        try:
            splits = classification.load({"train": folder}, Hyperparameters(**more))
        except DataError as error:
            return str(error)
        rows = [
            [(row.get("text"), np.asarray(row["label"]).tolist()) for row in split]
            for split in (splits.train, splits.evaluation)
        ]
        return splits.labels, rows, splits.notes

    differing = 0
    for seed in range(60):
        draw = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        columns = drawn_columns(draw)
        for index in range(draw.choice([1, 1, 2])):
            table = pa.table(columns)
            pq.write_table(
                table, folder / f"{index}.parquet", row_group_size=draw.choice([2, 7, 100])
            )
        more = draw.choice([{}, {}, {"problem_type": "multi_label_classification"},
                            {"label_separator": ";"}])  # fmt: skip
        at_once = outcome(folder, more)
        with monkeypatch.context() as patch:
            patch.setattr(parts, "_CHUNK_ROWS", draw.choice([1, 2, 3, 5]))
            patch.setattr(classification, "_FEW_NUMBERS", 2)
            patch.setattr(formats, "_CHUNK_ROWS", 4)
            in_pieces = outcome(folder, more)
        assert in_pieces == at_once, (seed, columns, more)
        differing += not isinstance(at_once, str)
    assert differing > 10


def test_rows_of_many_small_files_do_not_all_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pa.total_allocated_bytes()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(spool, "_MANY", before + 2_000_000)
    monkeypatch.setattr(spool, "_FEWER", 200_000)
    (tmp_path / "data").mkdir()
    for index in range(12):
        texts = [f"a text number {n} of file {index} {'and more ' * 80}" for n in range(1_000)]
        table = pa.table({"text": texts, "label": [n % 2 for n in range(1_000)]})
        pq.write_table(table, tmp_path / "data" / f"{index}.parquet")
    del texts, table
    splits = classification.load({"train": tmp_path / "data"}, Hyperparameters())
    assert pa.total_allocated_bytes() - before < 6e6 < splits.train.data.nbytes
    assert len(set(splits.train["text"])) == len(splits.train) == 10_800


def test_a_row_that_is_wrong_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    labels = ["a"] * 6 + ["b", None, "b", "a"]
    table = pa.table({"text": [f"text {n}" for n in range(10)], "label": labels})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"1 of \d+ rows has no label .*rows\.parquet row 7"):
        classification.load({"train": tmp_path}, Hyperparameters())
    split = pa.array(["test", "train"] * 5)
    pq.write_table(table.append_column("split", split), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"1 of \d+ rows has no label .*rows\.parquet row 7"):
        classification.load({"train": tmp_path}, Hyperparameters())


def test_numbers_of_which_few_are_told_are_refused_where_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "_FEW_NUMBERS", 5)
    numbers = [f"{n}.5" for n in range(50)]
    table = pa.table({"text": [f"text {n}" for n in range(50)], "label": numbers})
    pq.write_table(table, tmp_path / "rows.parquet")
    read = formats.read(tmp_path / "rows.parquet")
    assert classification.distinct_labels(read, "label").table.num_rows == 5
    splits = classification.load({"train": tmp_path}, Hyperparameters())
    assert splits.labels.problem == "regression"
    assert sorted([*splits.train["label"], *splits.evaluation["label"]]) == [
        n + 0.5 for n in range(50)
    ]
    numbers[40] = "many"
    pq.write_table(table.set_column(1, "label", pa.array(numbers)), tmp_path / "rows.parquet")
    with pytest.raises(
        DataError, match=r"row 0 has '0\.5' in column 'label', which is not a class"
    ):
        classification.load({"train": tmp_path}, Hyperparameters())


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["train.parquet", "train.arrow", "train.csv.gz", "train.json.gz"])
def test_a_small_file_of_gigabytes_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Within the memory that is free, of which the host's is replaced by less."""
    program = """if True:
        import resource, sys
        from pathlib import Path
        from recipe.data.files import formats
        from recipe.errors import DataError
        from recipe.runtime import memory
        memory.available = lambda: 1 << 30
        before = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            print(formats.read(Path(sys.argv[1])))
        except DataError as error:
            print(error)
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    """

    def read() -> tuple[str, int]:
        """Return what is said of a file, and the most memory that reading it took, in bytes."""
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], cwd=CODE, capture_output=True,
            text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        *output, peak = done.stdout.splitlines()
        return "\n".join(output), int(peak)

    path = tmp_path / name
    if name == "train.parquet":  # one text of 1 MB, as the value of 40,000 rows
        values = pa.DictionaryArray.from_arrays(pa.array([0] * 40_000, pa.int32()), ["a" * 2**20])
        table = pa.table({"text": values, "label": [0] * 40_000})
        pq.write_table(table, path, store_schema=False, dictionary_pagesize_limit=1 << 24)
    elif name == "train.arrow":  # 20 batches of 128 MB
        zeros = pa.array(memoryview(bytes(1 << 27)).cast("q"), pa.int64())
        batch = pa.record_batch({"number": zeros})
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(str(path), batch.schema, options=options) as stream:
            for _ in range(20):
                stream.write(batch)
    else:  # one line, or one string, of 5 GB
        begin = b"text,label\n" if name == "train.csv.gz" else b'[{"text": "'
        path.write_bytes(gzip.compress(begin) + gzip.compress(b"a" * (1 << 27)) * 40)
    assert path.stat().st_size < 20 << 20
    output, peak = read()
    assert str(path) in output
    assert "takes more memory than the 1.07 GB that are free" in output
    assert peak < 3 << 30  # the process itself, what was free, and what is reserved
