from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.data_files import DataFilesDict, get_data_patterns

from recipe import paths
from recipe.data import classification, held_out, labels
from recipe.data.classification import Splits
from recipe.data.files.formats import FORMATS, read
from recipe.data.layout import channels as layout
from recipe.data.layout import model_channel
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.workbooks import workbook

ROWS = [("good, very good", "pos"), ("bad; very bad", "neg"), ('a "fine" film', "pos")] * 10
Rows = Sequence[tuple[str, Any]]


def load(channels: dict[str, Path], **hyperparameters: Any) -> Splits:
    return classification.load(channels, Hyperparameters(**hyperparameters))


def texts_and_names(splits: Splits, which: str = "train") -> list[tuple[str, str]]:
    split = getattr(splits, which)
    names = [splits.labels.names[number] for number in split["label"]]
    return list(zip(split["text"], names, strict=True))


def lines(template: str, header: str = "", count: int = 12) -> str:
    """Numbered lines; `{c}` is 0 or 1, `{d}` 1 or 2, `{k}` pos or neg, `{n}` the number."""
    rows = [
        template.format(n=n, c=n % 2, d=1 + n % 2, k=("pos", "neg")[n % 2]) for n in range(count)
    ]
    return "\n".join([header] * bool(header) + rows) + "\n"


def jsonl(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def delimited(rows: Rows, delimiter: str, header: str = "text,label") -> str:
    def quote(cell: object) -> str:
        return '"' + str(cell).replace('"', '""') + '"'

    lines = [delimiter.join(map(quote, row)) for row in rows]
    return "\n".join([header.replace(",", delimiter), *lines]) + "\n"


def arrow_table(rows: Rows) -> pa.Table:
    text, label = zip(*rows, strict=True)
    return pa.table({"text": text, "label": label})


def test_files_of_several_formats_are_one_split(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "part").write_text(delimited(ROWS[:10], ";"))
    rows = [json.dumps({"text": text, "label": label}) for text, label in ROWS[10:]]
    (tmp_path / "deep" / "a.json").write_text("\n\n".join(rows))
    splits = load({"train": tmp_path, "test": tmp_path})
    assert sorted(texts_and_names(splits)) == sorted(ROWS)
    assert "train data: 30 rows" in splits.notes[0] and "csv (semicolon), jsonl" in splits.notes[0]


RARE = {
    "strings of views": (pa.string_view(), lambda text: text),
    "bytes of views": (pa.binary_view(), str.encode),
    "an extension": (pa.json_(), lambda text: text),
}


@pytest.mark.parametrize("kind", RARE)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow"])
def test_rare_types_of_arrow_are_read(tmp_path: Path, name: str, kind: str) -> None:
    arrow_type, spell = RARE[kind]
    table = arrow_table(ROWS)
    pairs = pa.array([[("a", 1)]] * len(ROWS), pa.map_(pa.string_view(), pa.int64()))
    texts = pa.array([spell(text) for text, _ in ROWS], arrow_type)
    table = table.set_column(0, "text", texts).append_column("pairs", pairs)
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        new = pa.ipc.new_file if name == "a.arrow" else pa.ipc.new_stream
        with pa.OSFile(str(tmp_path / name), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    assert sorted(texts_and_names(load({"train": tmp_path, "test": tmp_path}))) == sorted(ROWS)


def test_a_type_without_a_usual_one_and_a_column_twice_are_named(tmp_path: Path) -> None:
    views = pa.array([["a"]] * len(ROWS), pa.list_view(pa.string()))
    pq.write_table(arrow_table(ROWS).append_column("views", views), tmp_path / "a.parquet")
    twice = arrow_table(ROWS).append_column("text", pa.nulls(len(ROWS)))
    pq.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(DataError) as caught:
        load({"train": tmp_path})
    for words in ("Column 'views' of", "list_view<element: string>, which is not read", "leave it"):
        assert words in str(caught.value)
    assert "b.parquet has two columns called 'text'" in str(caught.value)


def test_a_column_of_empty_values_that_are_not_texts_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [0] * 4, "label": ["a", "b"] * 2}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"'text' of .*a.parquet is not text: it is of type int64"):
        load({"train": tmp_path})


def test_a_column_without_a_text_is_refused(tmp_path: Path) -> None:
    """One was learned as 35 empty texts."""
    (tmp_path / "a.csv").write_text("id,text,label\n1,,a\n2,,b\n3,,a\n")
    with pytest.raises(DataError, match=r"a\.csv has no text in any row of 'text'"):
        load({"train": tmp_path})


@pytest.mark.parametrize("value", ["eval-harness", "Test Kitchen", {"name": "imdb"}])
def test_a_column_called_dataset_leaves_rows(tmp_path: Path, value: Any) -> None:
    rows = [{"dataset": value, "text": text, "label": name} for text, name in ROWS]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert sorted(texts_and_names(load({"train": tmp_path, "test": tmp_path}))) == sorted(ROWS)


def test_integers_and_floats_in_different_files_are_the_same_labels(tmp_path: Path) -> None:
    train, test = tmp_path / "a.csv", tmp_path / "b.jsonl"
    train.write_text(delimited([("a", "1.0"), ("b", "0.0")] * 5, ","))
    test.write_text('{"text": "c", "label": 1}')
    splits = load({"train": train, "test": test})
    assert texts_and_names(splits, "evaluation") == [("c", "1")]


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_numbers_of_few_bits_are_the_decimals_that_were_written(kind: str, tmp_path: Path) -> None:
    whole = 8208 if kind == "float16" else 99999992  # their shortest decimals are of others
    numbers = pa.array(np.array([3.1, 401.9, 2.5, whole], kind))
    table = pa.table({"label": pa.StructArray.from_arrays([numbers], ["code"])})
    pq.write_table(table, tmp_path / "train.parquet")
    decimals = [3.1, 402.0 if kind == "float16" else 401.9, 2.5, whole]
    assert read(tmp_path / "train.parquet").table["label.code"].to_pylist() == decimals


def test_tokenized_data_without_text_is_taken_and_its_padding_dropped(tmp_path: Path) -> None:
    rows = {
        "input_ids": [[2, 7, 3, 0], [2, 8, 9, 3]] * 5,
        "attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]] * 5,
        "labels": [0, 1] * 5,
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "a"))
    splits = load({"train": tmp_path / "a", "test": tmp_path / "a"})
    assert list(splits.train["input_ids"])[:2] == [[2, 7, 3], [2, 8, 9, 3]]
    assert "not read" not in "\n".join(splits.notes)


@pytest.mark.parametrize("name", ["test", "testing", "validation", "valid", "eval", "dev"])
def test_evaluation_channels(tmp_path: Path, name: str) -> None:
    train, other = tmp_path / "train.csv", tmp_path / "other.csv"
    train.write_text(delimited(ROWS, ","))
    other.write_text(delimited(ROWS[:7], ","))
    splits = load({"train": train, name: other, "model": tmp_path})
    assert [len(splits.train), len(splits.evaluation)] == [30, 7]


def test_what_is_no_data_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(delimited(ROWS, ","))
    for name in (".hidden", "_SUCCESS", "x.manifest", "README.md", "a.csv.metadata", "a.csv.bak",
                 "a.csv~", "Thumbs.db", "LICENSE", ".gitattributes", "notes.pdf", "manifest", "part.crc",
                 "requirements.txt", "a.csv.tmp", "a.csv.part", "a.csv.crdownload", "a.csv.old", "a.csv.save",
                 "~$a.csv", "#a.csv#", "a.csv_manifest"):  # fmt: skip
        (tmp_path / name).write_text("not data")
    (tmp_path / "sample_submission.csv").write_text("id,label\n1,pos\n2,neg\n")
    (tmp_path / "empty.csv").touch()
    splits = load({"train": tmp_path})
    assert len(splits.train) + len(splits.evaluation) == 30
    assert [line for line in splits.notes if "empty.csv is empty" in line]


@pytest.mark.parametrize("name", [
    *("a (1).csv", "a - Copy.csv", "a copy 2.csv", "a(2).csv", "a_old.csv", "a.csv.1", "a-backup.csv"),
    *("a.old.csv", "a_copy (2).csv", "a Original.csv", "old_a.csv", "Copy of a.csv"),
    *("a - Kopie.csv", "Kopie von a.csv", "a (copy).csv", "a.csv.2024-05-01", "a.csv.rej", "a~.csv"),
    *("a_backup_2024.csv", "a.csv:Zone.Identifier", "backup/a.csv"),
])  # fmt: skip
def test_a_copy_is_refused_and_a_part_is_not(tmp_path: Path, name: str) -> None:
    for index, file in enumerate((name, "part (2).csv", "part (3).csv")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(delimited(ROWS[index:], ","))
    assert len(load({"train": tmp_path}).train) > 60, "no file is called as the copied one"
    (tmp_path / "a.csv").write_text(delimited(ROWS, ","))
    with pytest.raises(DataError, match=rf"{re.escape(name)} seems to be a copy of a.csv"):
        load({"train": tmp_path})


def test_a_file_with_the_bytes_of_another_is_read_once(tmp_path: Path) -> None:
    firsts = {"train/a.csv": 0, "train/b.csv": 9, "train/more/a.csv": 0, "train/z.csv": 0}
    for name, first in {**firsts, "test.csv": 0}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(delimited(ROWS[first:], ","))
    splits = load({"train": tmp_path})
    assert [len(splits.train), len(splits.evaluation)] == [51, 30], "the test data is whole"
    lines = [note for note in splits.notes if "the same bytes as" in note]
    assert [line.split(" is not used")[0] for line in lines] == [
        str(tmp_path / "train" / name) for name in ("more/a.csv", "z.csv")
    ]


def test_the_hold_out_is_stratified_and_seeded() -> None:
    classes = [0] * 80 + [1] * 15 + [2] * 4 + [3]
    kept, out = held_out.hold_out(classes, seed=5, share=0.1)
    assert sorted([*kept, *out]) == list(range(100))
    assert Counter(classes[row] for row in out) == {0: 8, 1: 2}
    assert held_out.hold_out(classes, seed=5, share=0.1)[1].tolist() == out.tolist()
    assert held_out.hold_out(classes, seed=6, share=0.1)[1].tolist() != out.tolist()
    kept, out = held_out.hold_out([0, 0, 1], seed=0, share=0.1)
    assert len(out) == 1, "a row, and every class is left"
    assert {[0, 0, 1][row] for row in kept} == {0, 1}


GOOD = delimited(ROWS, ",")
NUMBERS = "text,label\n" + "a,1\nb,2\n" * 9


def test_rows_without_a_text_are_counted(tmp_path: Path) -> None:
    rows = [{"text": [None, " ", "fine"][n % 3], "label": n % 2} for n in range(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    notes = load({"train": tmp_path}).notes
    assert any(line.startswith("20 rows of") and "have no text" in line for line in notes)


def test_letters_and_blanks_around_names_are_classes_as_they_are(tmp_path: Path) -> None:
    letters = [f"{letter}{index},{letter}\n" for index in range(3) for letter in "abcdefABCDEF"]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.csv").write_text("text,label\n" + "".join(letters))
    assert load({"train": tmp_path / "letters"}).labels.names == tuple("ABCDEFabcdef")
    (tmp_path / "blanks").mkdir()
    (tmp_path / "blanks" / "a.csv").write_text(GOOD + "text, pos \n")
    assert load({"train": tmp_path / "blanks"}).labels.names == ("neg", "pos")


@pytest.mark.parametrize(("content", "hyperparameters", "words"), [
    (GOOD + "one,two,three\n", {}, ["a.csv line 32", "3 fields", "has 2", "double quotes"]),
    (GOOD + '"never closed,pos\n', {}, ["a.csv", "starts on line 32", "quote"]),
    (GOOD + '"two\nlines",pos\n"x,pos\n', {}, ["a.csv", "starts on line 34"]),
    (GOOD + "text,\n", {}, ["a.csv line 32", "no label", "'label'"]),
    (GOOD + "text,POS\n", {}, ["'label'", "'POS' and 'pos'", "Write them alike"]),
    (GOOD + "text,cafe\u0301\ntext,caf\u00e9\n", {}, ["would be two", "Write them alike"]),
    ("text,label\n" + "a,01\nb,1\nc,2\n" * 9, {}, ["'01' and '1', which would be two"]),
    (GOOD + "text,0.5\n", {}, ["a.csv line 32", "'0.5'", "not a class"]),
    (GOOD.encode() + b"caf\xe9,pos\n", {}, ["a.csv line 32", "utf-8", "Give encoding=windows-1252, which"]),
    (GOOD.encode() + "café crème,pos\n".encode() + b"caf\xe9,pos\n", {}, ["line 33", "correct the line"]),
    (GOOD.encode() + "привет,pos\n".encode("cp1251"), {}, ["line 32", "Give encoding=windows-1251"]),
    (GOOD.encode() + "привет это очень хороший фильм,pos\n".encode("cp1251") * 9, {"encoding": "latin-1"}, ["is not cp1252", "windows-1251"]),
    (GOOD.encode() + "привет,pos\n".encode(), {"encoding": "cp1251"}, ["is not cp1251", "Leave out encoding"]),
    (GOOD, {"encoding": "utf-16"}, ["is not utf-16-le, which the hyperparameter encoding names"]),
    (GOOD.encode() + b"\0\0,pos\n", {"encoding": "cp1251"}, ["binary file"]),
    (GOOD.encode() + b"caf\xe9 \x81,pos\n", {"encoding": "cp1252"}, ["Give its encoding"]),
    (GOOD.encode() + "produkt dotarł uszkodzony i proszę o zwrot pieniędzy bo nie działa ładowarka,pos\n".encode("cp1250") * 20, {"encoding": "cp1252"}, ["is not cp1252", "Give encoding=windows-1250"]),
    (GOOD.encode() + "商品が壊れて届きました,pos\n".encode("shift_jis"), {}, ["Give encoding=cp932"]),
    (GOOD.encode() + "产品收到时已经损坏,pos\n".encode("gb18030"), {}, ["Give encoding=gb18030"]),
    ("text,label\n", {}, ["no rows", "a.csv"]),
    ("", {}, ["no training data", "a.csv is empty"]),
    (";", {}, ["no rows", "a.csv"]),
    ("text,label\na,x\nb,x\n", {}, ["'label'", "one class only", "'x'"]),
    (GOOD, {"label_column": "lable"}, ["label_column", "'lable'", "text, label", "mean label"]),
    (GOOD, {"text_column": "body"}, ["text_column", "'body'", "text, label"]),
    ("just words\nand more\n", {}, ["a.csv", "delimiter", "'just words'"]),
    ("number,value\n1,2\n3,4\n", {}, ["'number, value'", "no column of texts"]),
    (
        "words,more\nxx,aa\nyy,bb\nzz,cc\n",
        {},
        ["'words'", "'more'", "text_column=words label_column=more"],
    ),
    ("text,label,label\na,b,c\n", {}, ["two columns", "'label'"]),
    (GOOD.replace("neg", "neg;pos"), {}, ["'neg;pos'", "label_separator=';'"]),
    (GOOD, {"class_names": "neg,pos"}, ["class_names", "have names already"]),
    (NUMBERS, {"class_names": "a,neg,pos"}, ["class_names has 3 names", "1, 2"]),
    (NUMBERS + "c,-1\nd,0\n", {"class_names": "neg,pos"}, ["-1, 0, 1", "missing_labels=-1"]),
    ("text,label\n" + "2020-01-01,a\n2020-01-02,b\n" * 9, {}, ["'text'", "dates"]),
    ("text,label\n" + "a,2020-01-01\nb,2020-01-02\n" * 9, {}, ["'label'", "dates"]),
    ("word,tag\n" + "a,O\nb,B-PER\n" * 9, {}, ["known by name as the text", "'tag'"]),
    ("text,labels\n" + "Ada sits,B-PER O\nshe sits,O O\n" * 9, {}, ["token classification", "'B-PER O'"]),
    ("image_id,label\n" + "0.jpg,0\n1.jpg,1\n" * 9, {}, ["known by name as the text", "0.jpg"]),
    ("text,label\n" + "b'a text',0\nb'b text',1\n" * 9, {}, ["repr of bytes", "b'a text'"]),
    ("text;label\n" + "a;0,5\nb;1,5\n" * 9, {}, ["points", "'0,5'"]),
])  # fmt: skip
def test_broken_delimited_data_is_named(
    tmp_path: Path, content: str | bytes, hyperparameters: dict[str, str], words: list[str]
) -> None:
    content = content.encode() if isinstance(content, str) else content
    (tmp_path / "a.csv").write_bytes(content)
    with refused(DataError, *words):
        load({"train": tmp_path}, **hyperparameters)


SHEET: list[list[object]] = [
    ["text", "label"],
    *[[f"row, {n}\nof two lines", n % 3] for n in range(24)],
]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"\n', ["line 2", "valid JSON"]),
        ("a.jsonl", b'{"text": "a", "label": 1\n{"text": "b"}\n', ["line 1", "valid JSON"]),
        ("a.jsonl", b'{"text": "a", "label": 1}\n"b"\n', ["line 2", "not an object", '"b"']),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}\n', ["line 2", "no label"]),
        ("a.jsonl", b'{"text": "a", "label": {"a": 1}}\n', ["'label.a'", "label_column=label.a"]),
        ("a.json", b'[{"text": "a",\n "label": }]', ["line 2", "valid JSON"]),
        ("a.parquet", b"PAR1 and nothing more", ["a.parquet", "parquet"]),
        ("a.arrow", b"ARROW1 and nothing more", ["a.arrow", "arrow"]),
        ("a.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:40], ["a.csv.gz", "gzip"]),
        (
            "a.csv.gz",
            gzip.compress(GOOD.encode(), mtime=0)[:9] + b"\xff" * 50,
            ["a.csv.gz", "gzip"],
        ),
        ("a.json", b"[" * 100_000, ["a.json line 1", "valid JSON"]),
        ("a.json", b'[{"text": "a", "label": ' + b"9" * 5000 + b"}]", ["line 1", "valid JSON"]),
        (
            "a.jsonl",
            b'{"text": "a", "label": [null, 1' + b"0" * 30 + b"]}",
            ["'label'", "10000"],
        ),
        ("a.jsonl", b'{"text": "\\ud83d", "label": "b"}\n', ["a.jsonl line 1", "surrogate"]),
        ("a.arrow", b"\xff\xff\xff\xff\x10\0\0\0" + b"\x10\0" * 20, ["a.arrow", "arrow"]),
        ("a.avro", b"Obj\x01\x04\x14avro.codec\xff\0", ["an Avro file", "Parquet", "CSV"]),
        ("a.orc", b"ORC\x0a\x03\0\xff", ["an ORC file", "Parquet"]),
        ("a.rec", b"\x0a\x23\xd7\xce\x10\0\0\0text", ["a RecordIO file", "Parquet"]),
        ("a.sqlite", b"SQLite format 3\0\x10\0\x01", ["an SQLite database", "Parquet"]),
        (
            "a.csv.gz",
            gzip.compress(gzip.compress(b"text,label\na,b\n", mtime=0), mtime=0),
            ["packed by gzip twice"],
        ),
        (
            "a.jsonl",
            b'{"text": "a", "label": 1}\n{"text": {"b": "c"}, "label": 0}\n',
            ["a.jsonl line 2", "'text'"],
        ),
        ("a.jsonl", b'{"text": ["a", "b"], "label": 1}\n', ["'text'", "holds lists"]),
        ("train.csv.zip", b"PK\x03\x04", ["is packed"]),
        ("a.xlsx", b"PK\x03\x04", ["a.xlsx is packed"]),
        ("a.xls", b"\xd0\xcf\x11\xe0", ["a.xls cannot be read as a workbook", "as CSV"]),
        ("a.xlsx", workbook({"A": SHEET, "B": SHEET}), ["2 sheets with rows: A, B", "as CSV"]),
        (
            "a.xlsx",
            workbook({"A": [["Answers of May"], *SHEET]}),
            ["line 1 has one cell, 'Answers of May'", "Remove the rows above"],
        ),
        (
            "a.xlsx",
            workbook({"A": [*SHEET[:9], ["the end", None], *SHEET[9:]]}),
            ["a.xlsx line 10", "no label"],
        ),
        *(
            (
                "a.csv",
                f"{first}\ntext;label\na;x\nb;y\n".encode(),
                ["names the delimiter for Excel"],
            )
            for first in ("sep=;", '"sep=;"', "SEP=;")
        ),
        (
            "a.jsonl",
            b'{"text": "a", "label": 0.5}\n{"text": "b", "label": null}\n',
            ["1 of 2 rows has no label in column 'label', the first at", "a.jsonl line 2"],
        ),
        (
            "a.jsonl",
            b'{"dataset": "dev", "text": "a", "label": "b"}\n' * 30,
            ["no rows", "column 'dataset'", "30 validation", "rename"],
        ),
        ("a.dat", b"\x05\0\0\0\x08\0text\xff", ["a binary file of a format that is not known"]),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(DataError, *words):
        load({"train": tmp_path})


def test_links_that_lead_back_or_to_nothing_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "back").symlink_to(".")
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "nowhere").symlink_to("/nowhere")
    assert layout.find({"train": tmp_path}).files == {"train": [tmp_path / "a.csv"]}


def test_a_label_that_training_never_saw_is_named_with_its_line(tmp_path: Path) -> None:
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text(GOOD)
    test.write_text(delimited([("a", "pos"), ("b", "mixed")], ","))
    with pytest.raises(DataError, match=r"test\.csv line 3 .*'mixed'.*\(neg, pos\)"):
        load({"train": train, "test": test})


def test_a_missing_channel_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Channel train does not exist: .*nowhere"):
        load({"train": tmp_path / "nowhere"})
    with pytest.raises(DataError, match="channels are: none"):
        load({})
    (tmp_path / "a.csv").write_text(GOOD)
    with pytest.raises(DataError, match=r"channels are: test .*channel called train"):
        load({"test": tmp_path})


def test_a_model_channel_holds_files_or_a_folder_or_an_archive(tmp_path: Path) -> None:
    import tarfile

    for name in ("plain", "deep/inner", "packed"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("plain", "deep/inner"):
        (tmp_path / name / "config.json").write_text("{}")
    with tarfile.open(tmp_path / "packed" / "model.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "plain" / "config.json", "config.json")
    assert model_channel.model_folder({"model": tmp_path / "plain"}) == tmp_path / "plain"
    assert (
        model_channel.model_folder({"pretrained": tmp_path / "deep"}) == tmp_path / "deep" / "inner"
    )
    unpacked = model_channel.model_folder({"x": tmp_path / "packed"}, "x")
    assert unpacked is not None
    assert (unpacked / "config.json").is_file()
    assert model_channel.model_folder({"train": tmp_path / "plain"}) is None


def test_a_channel_offered_under_two_spellings_is_one() -> None:
    environ = {
        "SM_CHANNELS": '["my-data"]',
        "SM_CHANNEL_MY-DATA": "/data/my-data",
        "SM_CHANNEL_MY_DATA": "/data/my-data",
    }
    assert dict(paths.from_environment(environ).channels) == {"my-data": Path("/data/my-data")}


def write_labels(path: Path, values: Sequence[Any]) -> dict[str, Path]:
    rows = [{"text": f"text {n}", "label": value} for n, value in enumerate(values)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"train": path}


@pytest.mark.parametrize(
    ("values", "problem", "names", "first"),
    [
        ([0.5, 2, 1.25], "regression", ("label",), 0.5),
        (["0.5", "2"], "regression", ("label",), 0.5),
        ([2.0, 1.0], "single_label_classification", ("1", "2"), 1),
        ([["b", "a"], ["a"], []], "multi_label_classification", ("a", "b"), [1, 1]),
        ([[10, 9], [9]], "multi_label_classification", ("9", "10"), [1, 1]),
        ([[1, 0, 1], [1, 1, 1]], "multi_label_classification", ("0", "1", "2"), [1, 0, 1]),
        ([[1, 0], [0, 1]], "multi_label_classification", ("0", "1"), [1, 0]),
        # Labels have one spelling and order.
        *(
            (values, "single_label_classification", names, 0)
            for values, names in [
                ([1, 0], ("0", "1")), ([10, 9], ("9", "10")), (["10", "9"], ("9", "10")),
                ([1.0, 0.0], ("0", "1")), (["1.0", "0.0"], ("0", "1")), ([-1, 1], ("-1", "1")),
                ([True, False], ("False", "True")), (["pos", " neg "], ("neg", "pos")), (["b", 1], ("1", "b")),
            ]
        ),
    ],
)  # fmt: skip
def test_the_labels_shape_decides_what_is_predicted(
    tmp_path: Path, values: list[Any], problem: str, names: tuple[str, ...], first: Any
) -> None:
    splits = load(write_labels(tmp_path / "a.jsonl", values * 8))
    assert (splits.labels.problem, splits.labels.names) == (problem, names)
    whole = [*splits.train["label"][:], *splits.evaluation["label"][:]]
    assert first in whole
    assert len(splits.evaluation) == round(len(values) * 0.8)


def test_numbers_without_fractions_in_one_of_two_files_are_numbers(tmp_path: Path) -> None:
    write_labels(tmp_path / "a.jsonl", [0.5, 1.25] * 10)
    write_labels(tmp_path / "b.jsonl", [1, 2] * 10)
    assert load({"train": tmp_path}).labels.problem == "regression"


RATED = [{"text": f"text {n}", "valence": n % 4 / 2, "arousal": n % 3} for n in range(24)]


def write_rated(path: Path, *changed: dict[str, Any]) -> dict[str, Path]:
    path.mkdir()
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, [*RATED, *changed])))
    return {"train": path}


def test_columns_of_numbers_are_several_numbers(tmp_path: Path) -> None:
    channels = write_rated(tmp_path / "train")
    (tmp_path / "v.csv").write_text("text,valence,arousal\na,0,1\nb,1,1\n")  # as flags are
    splits = load({**channels, "validation": tmp_path / "v.csv"}, label_column="valence,arousal")
    assert splits.labels == labels.Labels(("valence", "arousal"), "regression")
    assert splits.train["label"][:][:3] == [[0.0, 0.0], [0.5, 1.0], [1.0, 2.0]]
    assert splits.evaluation["label"][:] == [[0.0, 1.0], [1.0, 1.0]]
    notes = "\n".join(splits.notes)
    assert "valence: a number from 0 to 1.5, 0.75 on average" in notes
    assert "arousal: a number from 0 to 2, 1 on average" in notes
    # The order of the hyperparameter is that of the outputs.
    assert load(channels, label_column="arousal,valence").labels.names == ("arousal", "valence")


@pytest.mark.parametrize(
    ("changed", "given", "message"),
    [
        ({"arousal": None}, {}, r"1 of 25 rows has no label in column 'arousal'.* line 25"),
        ({"arousal": "NA"}, {}, r"line 25 has 'NA' in column 'arousal', and other rows have numbers"),
        ({"valence": "inf"}, {}, r"line 25 has 'inf' in column 'valence'"),
        ({"arousal": "loud"}, {"problem_type": "regression"}, r"line 25 has 'loud' in column 'arousal'"),
        ({"arousal": [1]}, {"problem_type": "regression"}, r"in column 'arousal'"),
    ],
)  # fmt: skip
def test_a_row_without_one_of_its_numbers_is_refused(
    changed: dict[str, Any], given: dict[str, str], message: str, tmp_path: Path
) -> None:
    row = {"text": "last", "valence": 0.5, "arousal": 1, **changed}
    channels = write_rated(tmp_path / "train", row)
    with pytest.raises(DataError, match=message):
        load(channels, label_column="valence,arousal", **given)
    if changed in ({"arousal": None}, {"arousal": "NA"}):
        left = load(channels, label_column="valence,arousal", missing_labels="empty,NA")
        assert len(left.train) + len(left.evaluation) == 24


def test_a_column_of_one_number_beside_another_is_refused(tmp_path: Path) -> None:
    rows = [{**row, "arousal": 2} for row in RATED]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"'arousal' of .* has the same number in every row"):
        load({"train": tmp_path / "a.jsonl"}, label_column="valence,arousal")


def test_a_separator_makes_several_labels_of_one_cell(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "one,a; b\ntwo,b\nthree,\n" * 5)
    splits = load({"train": tmp_path}, label_separator=";")
    assert splits.labels.names == ("a", "b")
    assert "2 labels (any number per row): a (" in "\n".join(splits.notes)
    assert [0.0, 0.0] in splits.train["label"][:]


def test_lists_of_class_labels_keep_their_names(tmp_path: Path) -> None:
    features = datasets.Features(
        text=datasets.Value("string"),
        labels=datasets.List(datasets.ClassLabel(names=["joy", "anger", "fear"])),
    )
    rows = {"text": ["a", "b"] * 10, "labels": [[2, 0], [1]] * 10}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    splits = load({"train": tmp_path})
    assert splits.labels.names == ("joy", "anger", "fear")
    assert [1.0, 0.0, 1.0] in splits.train["label"][:]


def test_balanced_weights_are_scikit_learns() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    ids = [0] * 6 + [1] * 3 + [2]
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 2]), y=np.array(ids))
    assert labels.balanced_weights(ids, 3) == pytest.approx(list(expected))


@pytest.mark.parametrize("rows", [40, 1500])
@pytest.mark.parametrize("header", ["text,label", "remark,verdict"])
def test_files_with_headers_put_end_to_end_are_refused(
    tmp_path: Path, header: str, rows: int
) -> None:
    """The header further down was a row of a class of its own."""
    body = "".join(f"film number {row},{'good' if row % 2 else 'bad'}\n" for row in range(rows))
    (tmp_path / "a.csv").write_text(f"{header}\n{body}{header}\n{body}{header}\n{body}")
    named = dict(zip(("text_column", "label_column"), header.split(","), strict=True))
    with pytest.raises(DataError) as refused:
        load({"train": tmp_path}, **named)
    assert f"a.csv line {rows + 2} repeats the header" in str(refused.value)
    assert "2 rows in all" in str(refused.value)
    # A text that is called as its column is a text.
    (tmp_path / "a.csv").write_text(f"{header}\n{body}{header.partition(',')[0]},good\n")
    splits = load({"train": tmp_path}, **named)
    assert len(splits.train) + len(splits.evaluation) == rows + 1


def test_class_names_of_one_file_and_numbers_of_another_are_refused(tmp_path: Path) -> None:
    rows = [{"text": f"a film of {n}", "label": n % 2} for n in range(12)]
    classes = datasets.ClassLabel(names=["bad", "good"])
    names = datasets.Features({"text": datasets.Value("string"), "label": classes})
    datasets.Dataset.from_list(rows, features=names).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        DataError, match=r"has the class names bad, good in .*a\.parquet, and others"
    ):
        load({"train": tmp_path})
    # What a file without labels lacks is not called another class.
    unlabelled = [{"text": row["text"], "label": None} for row in rows]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, unlabelled)))
    with pytest.raises(DataError, match=r"rows have no label .*b\.jsonl line 1"):
        load({"train": tmp_path})


def test_decimals_are_numbers(tmp_path: Path) -> None:
    kind = pa.decimal128(5, 2)
    numbers = pa.array([n % 2 for n in range(12)], kind)
    texts = [f"a film of {n}" for n in range(12)]
    pq.write_table(pa.table({"text": texts, "label": numbers}), tmp_path / "a.parquet")
    assert load({"train": tmp_path}).labels.names == ("0", "1")


REVIEWED = [{"text": answer, "answer": answer, "_input_hash": 1} for answer in ("accept", "reject")]


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("a.csv", "text,label\n" + "a,\"['x', 'y']\"\nb,[]\n" * 9, ["x, y", "(none)"]),
    ("a.csv", "text,label\n" + 'a,"[1, 2]"\nb,[2]\n' * 9, ["1, 2", "2"]),
    ("a.csv", "text,label\n" + 'a,"[0, 1, 1]"\nb,"[1, 0, 0]"\n' * 9, ["1, 2", "0"]),
    ("a.csv", "text,label\n" + 'a,"{""choices"": [""x"", ""y""]}"\nb,x\n' * 9, ["x, y", "x"]),
    ("a.json", json.dumps([{"text": "a", "label": {"choices": [*"xy"]}}, {"text": "b", "label": "x"}] * 9), ["x, y", "x"]),
    # Orders of all items, and NumPy's, whose items Python would join; records; lists in some rows only.
    ("a.csv", "text,label\n" + "a,\"[2, 0, 1]\"\nb,\"[0, 1, 2]\"\n" * 9, "written as strings"),
    ("a.csv", "text,label\n" + "a,['x' 'y']\nb,['x']\n" * 9, "written as strings"),
    ("a.csv", "text,label\n" + 'a,"{""x"": 1}"\nb,x\n' * 9, "written as strings"),
    ("a.csv", "text,label\n" + "a,\"['x', 'y']\"\nb,x\n" * 9, "written as strings"),
])  # fmt: skip
def test_lists_of_labels_in_strings(
    tmp_path: Path, name: str, content: str, expected: list[str] | str
) -> None:
    (tmp_path / name).write_text(content)
    if isinstance(expected, str):
        with refused(DataError, expected):
            load({"train": tmp_path})
        return
    read = load({"train": tmp_path})
    shown = {
        text: read.labels.show(label)
        for text, label in read.train.select_columns(["text", "label"]).to_pandas().values
    }
    assert [shown["a"], shown["b"]] == expected


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"marked/train.txt": "\ufeff__label__a text 1, here\n__label__b, __label__a and 2\n"},
         [{"label": "a", "text": "text 1, here"}, {"label": "b;a", "text": "and 2"}]),
        ({"train/neg/1.txt": "a neg text", "train/pos/1.txt": "a pos text"},
         [{"text": "a neg text", "label": "neg"}, {"text": "a pos text", "label": "pos"}]),
        ({"data/train.jsonl": "\n".join(map(json.dumps, REVIEWED))},
         [{"text": "accept", "_input_hash": 1}]),
    ],
)  # fmt: skip
def test_the_lines_that_convert_files_work(
    tmp_path: Path, content: dict[str, str], expected: list[Any]
) -> None:
    write(tmp_path, content)
    channel = tmp_path / next(iter(content)).partition("/")[0]
    with pytest.raises(DataError) as caught:
        load({"train": channel})
    (line,) = {*re.findall(r"(?:python -c|jq -c) '[^\n]*?'(?: [\w.<]+)* > [\w-]+.jsonl"
                           r"|python -c '[^\n]*lines=True\)'", str(caught.value))}  # fmt: skip
    folder = tmp_path if channel.name == "train" else channel
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", line], cwd=folder, check=True, env={**os.environ, "PATH": path})
    converted = folder / re.findall(r"[\w-]+\.jsonl", line)[-1]
    rows = [json.loads(row) for row in converted.read_text().splitlines()]
    assert sorted(rows, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(("files", "words", "is_alike"), [
    # The split of the rows of each file; words of a refusal; whether the datasets library agrees.
    ({"train/a": "train", "test/b": "test"}, [], None),
    ({"train/a": "train", "validation/b": "validation", "test/c": "test"}, [], None),
    ({"reviews/a": "train"}, [], True),
    ({"train/train-00000-of-00002": "train", "train/train-00001-of-00002": "train",
      "train/test-00000-of-00001": "test"}, [], True),
    ({"train/default/train/0000": "train", "train/default/test/0000": "test"}, [], True),
    ({"train/plain_text/train-00000-of-00001": "train", "train/plain_text/test-00000-of-00001": "test",
      "train/plain_text/unsupervised-00000-of-00001": ""}, [], True),
    ({"train/v1/data/train-00000-of-00001": "train", "train/v1/data/test-00000-of-00001": "test"}, [], True),
    ({"train/sst2_train": "train", "train/sst2_dev": "validation"}, [], True),
    ({"train/train": "train", "train/test": "test", "train/everything": ""}, [], True),
    ({"train/train": "train", "train/dev_matched": "validation", "train/test_matched": "test"}, [], True),
    ({"train/train/a": "train", "train/train/dev": "validation"}, [], False),
    ({"train/train": "train", "train/test": "", "test/train": "", "test/test": "test"}, [], None),
    ({"train/a": "train", "validation/test": "validation"}, [], None),
    ({"train/reviews": "train", "train/test": "test"}, ["may be of any split"], False),
    ({"train/reviews/part-0": "train", "train/test/part-0": "test"}, ["may be of any split"], False),
    ({"train/test": "test"}, ["mention test data", "Name the training"], False),
    ({"train/train_test": "train"}, ["several splits", "Rename"], False),
    ({"train/a/train": "train", "train/test/train": "test"}, ["'test'", "Rename"], False),
    ({"train/mrpc/train-0": "train", "train/cola/train-0": ""}, ["cola, mrpc", "S3 prefix"], False),
    ({"train/default/train": "train", "train/other/train": "", "train/default/test": "test"},
     ["default, other"], False),
    ({"train/split=train/label=neg/part-0": "train"}, ["label=neg", "Write 'neg' into a column 'label'"], None),
    *(({f"data/{shape.format('train')}": "train", f"data/{shape.format(word)}": split}, [], is_alike)
      for split, word, shape, is_alike in [
        ("validation", "validation", "{}", True), ("validation", "valid", "my_{}", True),
        ("validation", "val", "{}-00000-of-00001", True), ("validation", "eval", "imdb.{}.v2", False),
        ("validation", "evaluation", "data/{}", False), ("validation", "dev", "{}/part-0", True),
        ("validation", "devset", "x/{}/y", False), ("test", "test", "{}", True),
        ("test", "testing", "my_{}", True), ("test", "holdout", "{}-00000-of-00001", False),
        ("test", "held-out", "imdb.{}.v2", False), ("test", "testset", "data/{}", False),
    ]),
])  # fmt: skip
def test_rows_are_in_the_split_that_their_files_are_named_for(
    tmp_path: Path, files: dict[str, str], words: list[str], is_alike: bool | None
) -> None:
    expected: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set(), "": set()}
    for path, split in files.items():
        texts = [f"{path} row {n}" for n in range(12)]
        expected[split] |= set(texts)
        write(
            tmp_path,
            {
                f"{path}.jsonl": jsonl(
                    {"text": t, "label": "ab"[n % 2]} for n, t in enumerate(texts)
                )
            },
        )
    channels = {path.partition("/")[0]: tmp_path / path.partition("/")[0] for path in files}
    if is_alike is not None:
        (root,) = (str(path) for path in channels.values())
        theirs = DataFilesDict.from_patterns(get_data_patterns(root), base_path=root)
        library = {str(split): {Path(file) for file in paths} for split, paths in theirs.items()}
        ours = {} if words else layout.find({Path(root).name: Path(root)}).files
        assert ({split: set(paths) for split, paths in ours.items()} == library) == is_alike
    if words:
        with refused(DataError, *words):
            load(channels)
        return
    splits = load(channels)
    held_out = expected["validation"] or expected["test"]
    train, evaluation = set(splits.train["text"]), set(splits.evaluation["text"])
    assert evaluation == held_out if held_out else train | evaluation == expected["train"]
    assert train == expected["train"] - (set() if held_out else evaluation)
    last = expected["test"] if expected["validation"] else set()
    assert set(splits.test["text"] if splits.test else []) == last


@pytest.mark.parametrize(("files", "config", "words"), [
    ("x/train-0 x/test-0", "default x/train-* x/test-*", []),
    ("x/test-0 x/train-0", "default x/test-* x/train-*",
     ["README.md calls", "test-0", "train data", "test data"]),
    ("en de", "en en*, de de*", ["configurations de, en", "called train"]),
])  # fmt: skip
def test_the_card_of_a_data_set_names_its_splits(
    tmp_path: Path, files: str, config: str, words: list[str]
) -> None:
    card = "---\nconfigs:\n"
    for name, *patterns in map(str.split, config.split(",")):
        card += f"- config_name: {name}\n  data_files:\n"
        for split, pattern in zip(("train", "test"), patterns, strict=False):
            card += f"  - split: {split}\n    path: {pattern}\n"
    rows = {
        f"{name}.jsonl": jsonl({"text": f"{name} {n}", "label": n % 2} for n in range(8))
        for name in files.split()
    }
    write(tmp_path, {**rows, "README.md": card + "---\n"})
    if words:
        with refused(DataError, *words):
            load({"train": tmp_path})
    else:
        assert {text.split()[0] for text in load({"train": tmp_path}).evaluation["text"]} == {
            "x/test-0"
        }


@pytest.mark.parametrize(("name", "column"), [
    ("train", "split"), ("all", "ml_use"), ("train_test", "partition"), ("all", "belongs_to"),
])  # fmt: skip
def test_a_column_names_the_split_of_each_row(tmp_path: Path, name: str, column: str) -> None:
    kinds = ["train", "TRAIN", "train", "test"]
    rows = [{"text": f"text {n}", "label": n // 4 % 2, column: kinds[n % 4]} for n in range(32)]
    write(tmp_path, {f"{name}.jsonl": jsonl(rows)})
    if column == "belongs_to":
        with refused(DataError, "belongs_to", "a column called split"):
            load({"train": tmp_path})
        return
    splits = load({"train": tmp_path})
    assert sorted(splits.evaluation["text"]) == sorted(f"text {n}" for n in range(3, 32, 4))
    assert len(splits.train) == 24


@pytest.mark.parametrize(("files", "hyperparameters", "rows", "classes", "notes"), [
    # files, hyperparameters, (train, evaluation) rows, classes, words of the notes
    ({"SST-2/train.tsv": lines("it 's number {n}\t{c}", "sentence\tlabel"),
      "SST-2/dev.tsv": lines("it is number {n}\t{c}", "sentence\tlabel", 6),
      "SST-2/test.tsv": lines("{n}\twas number {n}", "index\tsentence"),
      "SST-2/original/datasetSentences.txt": "sentence_index\tsentence\n1\tA sentence .\n"},
     {}, (12, 6), ["0", "1"], ["test.tsv has no value in 'label'", "datasetSentences.txt"]),
    ({"CoLA/train.tsv": lines("gj04\t{c}\t\tSentence number {n} , it goes .", count=40),
      "CoLA/dev.tsv": lines("gj04\t{c}\t\tAnother one {n} is held .", count=8),
      "CoLA/test.tsv": lines("{n}\tBill whistled {n} .", "index\tsentence")},
     {"text_column": "column_3", "label_column": "column_1"},
     (40, 8), ["0", "1"], ["test.tsv has no value in 'column_1'"]),
    ({"train.csv": lines("{n},comment {n} here,{c},1,0", "id,comment_text,toxic,obscene,threat")
                   + lines("{n},comment y{n} here,1,0,1"),
      "test.csv": lines("{n},comment {n} there", "id,comment_text"),
      "test_labels.csv": lines("{n},-1,-1,-1", "id,toxic,obscene,threat"),
      "sample_submission.csv": lines("{n},0.5,0.5,0.5", "id,toxic,obscene,threat")},
     {"label_column": "toxic,obscene,threat"}, (22, 2), ["toxic", "obscene", "threat"], ["test_labels.csv"]),
    ({"spam.csv": lines("{k},Go until {n} point,,,", "v1,v2,,,")}, {"text_column": "v2", "label_column": "v1"},
     (11, 1), ["neg", "pos"], ["text 'v2', label 'v1'"]),
    ({"a.csv": lines("{n},some text {n},{k}", ",text,label")}, {}, (11, 1), ["neg", "pos"], []),
    ({"a.csv": lines("text {n},{c}", "text,stars"), "classes.txt": "1 star\n2 stars\n",
      "categories.json": '{"a": {"b": ["c"]}}'}, {}, (11, 1), ["0", "1"], ["categories.json, classes.txt"]),
    ({"train.csv": lines('"{d}","Title {n} of it","The text {n} said, at length"'),
      "test.csv": lines('"{d}","Title t{n} of it","The text t{n} said"', count=4), "classes.txt": "World\nSports\n"},
     {"text_column": "column_1,column_2", "label_column": "column_0", "class_names": "World,Sports"},
     (12, 4), ["World", "Sports"], ["classes.txt"]),
    ({"a.jsonl": jsonl({"review": {"body": f"text {n}"}, "label": n % 2 + 1} for n in range(12))},
     {"text_column": "review.body", "class_names": '["neg", "pos"]'}, (11, 1), ["neg", "pos"], []),
])  # fmt: skip
def test_a_public_layout_is_read(
    tmp_path: Path, files: dict[str, str], hyperparameters: dict[str, Any], rows: tuple[int, int],
    classes: list[str], notes: list[str],
) -> None:  # fmt: skip
    write(tmp_path, files)
    splits = load({"train": tmp_path}, **hyperparameters)
    assert (len(splits.train), len(splits.evaluation), splits.test) == (*rows, None), splits.notes
    assert list(splits.labels.names) == classes, splits.notes
    for word in notes:
        assert word in "\n".join(splits.notes)


@pytest.mark.parametrize(("files", "words"), [
    ({"train.tsv": lines("My favourite is {n}\t{c}\tid{n}") + "So\t0,1\tidx\nWell\t0,1\tidy\n"},
     ["'column_1' ('0')", "label_column="]),
    ({"eng.train": "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n",
      "eng.testa": "CRICKET NNP B-NP O\nKent NNP B-NP B-ORG\n"}, ["token classification", "eng.train"]),
    ({"rt-polarity.pos": lines("a film number {n} that works"),
      "rt-polarity.neg": lines("a film number {n} that fails")}, ["rt-polarity.pos", "a text and a label"]),
    ({"train_text.txt": lines("tweet {n} at @user"), "train_labels.txt": lines("{c}")},
     ["train_text.txt", "train_labels.txt"]),
    ({"20news/alt.atheism/4996": "Subject: it\n\nText\n", "20news/sci.med/4997": "Subject: it\n\nText\n"},
     ["is a plain text"]),
    ({"a.jsonl": '{"text": "a"\n', "b.csv": 'text,label\n"a,b\n', "c.csv": "x\n"},
     ["3 problems", "a.jsonl line 1", "b.csv", "c.csv"]),
])  # fmt: skip
def test_a_public_layout_is_refused(
    tmp_path: Path, files: dict[str, str], words: list[str]
) -> None:
    write(tmp_path, files)
    with refused(DataError, *words):
        load({"train": tmp_path})


@pytest.mark.parametrize(("rows", "labels"), [
    (SHEET, ["0", "1"]),
    ([["text", "label"], [None, None], *[[f"row {n}", n % 2 == 0] for n in range(24)]], ["True", "False"]),
    ([["text", "label"], *[[f"row {n}", n / 4 + 0.5] for n in range(24)]], ["0.5", "0.75"]),
    ([["text", None, "label"], ["row", 7, 0], *[[f"row {n}", n, n % 2] for n in range(24)]], ["0", "0"]),
])  # fmt: skip
def test_a_workbook_is_read(
    tmp_path: Path, rows: Sequence[Sequence[object]], labels: list[str]
) -> None:
    content = workbook({"Notes": [["a", "b"]], "Data": rows, "Empty": []}, hidden="Notes")
    (tmp_path / "train.xlsx").write_bytes(content)
    read = load({"train": tmp_path})
    shown = {
        text: read.labels.show(label)
        for text, label in read.train.select_columns(["text", "label"]).to_pandas().values
    }
    first = [row for row in rows[1:] if row[0]][:2]
    assert [shown[str(row[0])] for row in first if row[0] in shown] == [
        label for row, label in zip(first, labels, strict=True) if row[0] in shown
    ]
    assert "train.xlsx, workbook" in "\n".join(read.notes)


def test_the_table_of_formats_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "DATA.md").read_text()
    for row in FORMATS:
        assert f"| {row.name} | {row.suffixes} | {row.what} |" in text


def test_hidden_labels_are_not_evaluated_and_rows_without_one_are_left_out(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
    string = datasets.Value("string")
    features = datasets.Features({"premise": string, "hypothesis": string, "label": names})
    labels = {"train": [0, 1, 2, -1] * 10, "validation": [2, 1, 0], "test": [-1] * 9}
    whole = {}
    for split, values in labels.items():
        texts = {
            name: [f"{name} {n}" for n in range(len(values))] for name in ("premise", "hypothesis")
        }
        whole[split] = datasets.Dataset.from_dict({**texts, "label": values}, features=features)
    datasets.DatasetDict(whole).save_to_disk(str(tmp_path / "snli"))
    splits = load({"train": tmp_path / "snli"})
    assert (len(splits.train), len(splits.evaluation), splits.test) == (30, 3, None)
    assert set(splits.train["label"]) == {0, 1, 2}
    assert splits.train["text"][2:4] == ["premise 2", "premise 4"]
    assert "10 rows of" in "\n".join(splits.notes)
    assert "test has no value in 'label'" in "\n".join(splits.notes)
    header = "sentence1\tsentence2\tgold_label"
    rows = [f"first {n}\tsecond {n}\t{'ab-c'[n % 4]}" for n in range(40)]
    write(tmp_path / "tsv", {"train.tsv": "\n".join([header, *rows]),
                             "test.tsv": lines("first {n}\tsecond {n}\t-1", header)})  # fmt: skip
    splits = load({"train": tmp_path / "tsv"})
    assert splits.labels.names == ("a", "b", "c")
    assert len(splits.train) + len(splits.evaluation) == 30
    assert any("test.tsv has no value in" in line for line in splits.notes)
