"""Hundreds of data sets that are made up: layouts x formats x names x types, each with its truth.

A case either gives exactly the rows that it was made of, each in its split with its label, or is
refused by a message that names what it must.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.data_files import DataFilesDict, get_data_patterns

from recipe.data import classification
from recipe.data.classification import Splits
from recipe.data.files.formats import FORMATS as FORMAT_ROWS
from recipe.data.layout import channels
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from tests.support.paths import ROOT

SEED = 20261122
Row = dict[str, Any]
Truth = dict[str, set[tuple[Any, ...]]]

NOWHERE = "nowhere"
"""The split of rows that are in no named split, and must be left out."""


# ---- formats: rows to a file ----


Write = Callable[[Path, Sequence[Row]], Any]


def as_delimited(delimiter: str, encoding: str = "utf-8") -> Write:
    return lambda path, rows: pd.DataFrame(rows).to_csv(
        path, sep=delimiter, encoding=encoding, index=False
    )


def as_json(shape: Callable[[list[Row]], Any], indent: int | None = None) -> Write:
    return lambda path, rows: path.write_text(json.dumps(shape(list(rows)), indent=indent))


def as_arrow(new: Callable[..., Any]) -> Write:
    def write(path: Path, rows: Sequence[Row]) -> None:
        table = pa.Table.from_pylist(list(rows))
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)

    return write


def columns(rows: list[Row]) -> Row:
    return {name: [row[name] for row in rows] for name in rows[0]}


@dataclass(frozen=True)
class Format:
    suffix: str
    write: Write
    typed: bool = True
    """Whether a value may be a list or a struct."""


FORMATS = {
    "csv": Format(".csv", as_delimited(","), typed=False),
    "semicolon": Format(".csv", as_delimited(";"), typed=False),
    "bar": Format(".csv", as_delimited("|"), typed=False),
    "csv with a byte order mark": Format(".csv", as_delimited(",", "utf-8-sig"), typed=False),
    "csv in UTF-16": Format(".csv", as_delimited(",", "utf-16"), typed=False),
    "csv in UTF-32": Format(".csv", as_delimited(",", "utf-32"), typed=False),
    "tsv": Format(".tsv", as_delimited("\t"), typed=False),
    "csv.gz": Format(".csv.gz", as_delimited(","), typed=False),
    "jsonl": Format(
        ".jsonl", lambda path, rows: path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    ),
    "json": Format(".json", as_json(lambda rows: rows, indent=1)),
    "json below data": Format(".json", as_json(lambda rows: {"version": "1", "data": rows})),
    "parquet": Format(
        ".parquet", lambda path, rows: pq.write_table(pa.Table.from_pylist(list(rows)), path)
    ),
    "arrow": Format(".arrow", as_arrow(pa.ipc.new_stream)),
    "arrow file": Format(".arrow", as_arrow(pa.ipc.new_file)),
    "save_to_disk": Format(
        "", lambda path, rows: datasets.Dataset.from_list(list(rows)).save_to_disk(str(path))
    ),
}


# ---- layouts: where the rows of each split lie ----


@dataclass(frozen=True)
class Layout:
    name: str
    files: Mapping[str, str]
    """Path below the channels, without a suffix, to the split of its rows: `train/a`."""
    refused: Sequence[str] = ()
    """What the refusal names, where there is one."""
    column: str | None = None
    """A column that says which split a row is of; all rows then lie in all files' place."""
    card: str | None = None
    """The front matter of a README.md in the first channel."""


def train_folder(**of_split: str) -> dict[str, str]:
    return {f"train/{path}": split for split, path in of_split.items()}


def keyword_layouts() -> list[Layout]:
    """The words that name a split, at the start, the end and in the middle of names."""
    words = {
        "validation": ["validation", "valid", "val", "eval", "evaluation", "dev", "devset"],
        "test": ["test", "testing", "holdout", "held-out", "testset"],
    }
    shapes = ["{}", "my_{}", "{}-00000-of-00001", "imdb.{}.v2", "data/{}", "{}/part-0", "x/{}/y"]
    results = []
    for number, (split, word) in enumerate((s, w) for s, row in words.items() for w in row):
        shape = shapes[number % len(shapes)]
        files = {f"data/{shape.format('train')}": "train", f"data/{shape.format(word)}": split}
        results.append(Layout(f"{shape} {word}", files))
    return results


LAYOUTS = [
    Layout("a channel for each", {"train/a": "train", "test/b": "test"}),
    Layout("three channels", {"train/a": "train", "validation/b": "validation", "test/c": "test"}),
    Layout("one channel, no split", {"reviews/a": "train"}),
    Layout("two files, no split", {"training/a": "train", "training/b": "train"}),
    Layout("hub, data/", train_folder(train="data/train-00000-of-00001", test="data/test-00000-of-00001",
                                  validation="data/validation-00000-of-00001")),
    Layout("hub, default/", train_folder(train="default/train/0000", test="default/test/0000")),
    Layout("hub, plain_text/", {**train_folder(train="plain_text/train-00000-of-00001",
                                           test="plain_text/test-00000-of-00001"),
                                "train/plain_text/unsupervised-00000-of-00001": NOWHERE}),
    Layout("below the root", train_folder(train="downloads/v1/data/train-00000-of-00001",
                                      test="downloads/v1/data/test-00000-of-00001")),
    Layout("shards", {"train/train-00000-of-00002": "train", "train/train-00001-of-00002": "train",
                      "train/test-00000-of-00001": "test"}),
    Layout("folders in data/", train_folder(train="data/train/part-0", test="data/test/part-0")),
    Layout("suffixed", train_folder(train="sst2_train", validation="sst2_dev")),
    Layout("unnamed beside test", train_folder(train="reviews", test="test"), refused=["may be of any split"]),
    Layout("unnamed folder beside test", train_folder(train="reviews/part-0", test="test/part-0"),
           refused=["may be of any split"]),
    Layout("all beside train", {**train_folder(train="train", test="test"), "train/everything": NOWHERE}),
    Layout("MNLI", {**train_folder(train="train", validation="dev_matched", test="test_matched")}),
    Layout("dev within train", train_folder(train="train/a", validation="train/dev")),
    Layout("test channel of the whole", {"train/train": "train", "train/test": NOWHERE,
                                         "test/train": NOWHERE, "test/test": "test"}),
    Layout("test file in the eval channel", {"train/a": "train", "validation/test": "validation"}),
    Layout("only test", {"train/test": "test"}, refused=["mention test data", "Name the training"]),
    Layout("both in a name", {"train/train_test": "train"}, refused=["several splits", "Rename"]),
    Layout("train within test", {"train/a/train": "train", "train/test/train": "test"},
           refused=["'test'", "Rename"]),
    Layout("configurations", {"train/mrpc/train-0": "train", "train/mrpc/test-0": "test",
                              "train/cola/train-0": NOWHERE, "train/cola/test-0": NOWHERE},
           refused=["cola, mrpc", "S3 prefix"]),
    Layout("a default configuration", {"train/default/train": "train", "train/other/train": NOWHERE,
                                       "train/default/test": "test"}, refused=["default, other"]),
    Layout("split column", {"train/a": "train"}, column="split"),
    Layout("split column in train.x", {"train/train": "train"}, column="split"),
    Layout("ml_use", {"data/all": "train"}, column="ml_use"),
    Layout("a column of splits of an unknown name", {"data/all": "train"}, column="belongs_to",
           refused=["belongs_to", "a column called split"]),
    Layout("both in a name, and a column", {"data/train_test": "train"}, column="partition"),
    Layout("card", train_folder(train="x/train-0", test="x/test-0"),
           card="configs:\n- config_name: default\n  data_files:\n  - split: train\n"
                "    path: x/train-*\n  - split: test\n    path: x/test-*\n"),
    Layout("card against names", {"train/x/test-0": "train", "train/x/train-0": "test"},
           card="configs:\n- config_name: default\n  data_files:\n  - split: train\n"
                "    path: x/test-*\n  - split: test\n    path: x/train-*\n",
           refused=["README.md calls", "test-0", "train data", "test data"]),
    Layout("card of two", {"train/en": "train", "train/de": "train"},
           card="configs:\n- config_name: en\n  data_files: en*\n- config_name: de\n"
                "  data_files: de*\n", refused=["configurations de, en", "called train"]),
    *keyword_layouts(),
]  # fmt: skip


# ---- columns: what a row looks like ----


@dataclass(frozen=True)
class Kind:
    name: str
    row: Callable[[int, str, str], Row]
    """Of a row's number, its text and its class (pos or neg)."""
    shown: Callable[[str], str] = str
    """How a class is shown."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    refused: Sequence[str] = ()
    typed: bool = False
    """Whether it needs a format of lists and structs."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What lies beside the data."""
    pair: bool = False


def code(label: str) -> int:
    return int(label == "pos")


def named(text: str, label: str) -> Kind:
    return Kind(f"{text}, {label}", lambda n, t, c: {text: t, label: c})


def paired(first: str, second: str, label: str) -> Kind:
    return Kind(
        f"{first}, {second}, {label}",
        lambda n, t, c: {"idx": n, first: t, second: f"and that {n}, {t}", label: c},
        pair=True,
    )


KINDS = [
    *itertools.starmap(
        named,
        [
            ("text", "label"), ("sentence", "label"), ("review", "sentiment"), ("Tweet", "Target"),
            ("content", "category"), ("Review Body", "Stars"), ("utterance", "intent"),
            ("headline", "class"), ("comment_text", "topic"), ("body", "labels"),
        ],
    ),
    *itertools.starmap(
        paired,
        [("sentence1", "sentence2", "label"), ("premise", "hypothesis", "label"),
         ("question1", "question2", "is_duplicate"), ("text_a", "text_b", "label")],
    ),
    Kind("integers", lambda n, t, c: {"text": t, "label": code(c)}, lambda c: str(code(c))),
    Kind("a date beside", lambda n, t, c: {"id": n, "date": "2020-01-02", "text": t, "label": c}),
    Kind("score", lambda n, t, c: {"id": n, "text": t, "score": code(c)}, lambda c: str(code(c))),
    Kind("class_names", lambda n, t, c: {"text": t, "label": code(c)},
         hyperparameters={"class_names": "neg,pos"}, files={"classes.txt": "neg\npos\n"}),
    Kind("class_names from 1", lambda n, t, c: {"text": t, "label": code(c) + 1},
         hyperparameters={"class_names": '["neg", "pos"]'}),
    Kind("too many class_names", lambda n, t, c: {"text": t, "label": code(c) + 1},
         hyperparameters={"class_names": "a,neg,pos"}, refused=["class_names has 3 names", "1, 2"]),
    Kind("class_names and -1", lambda n, t, c: {"text": t, "label": code(c) if n % 3 else -1},
         hyperparameters={"class_names": "neg,pos"}, refused=["-1, 0, 1", "missing_labels=-1"]),
    Kind("class_names of names", lambda n, t, c: {"text": t, "label": c},
         hyperparameters={"class_names": "neg,pos"}, refused=["class_names", "have names already"]),
    Kind("one-hot, named", lambda n, t, c: {"x": n % 3, "text": t, "neg": 1 - code(c), "pos": code(c)},
         hyperparameters={"label_column": "neg,pos"}),
    Kind("lists as strings", lambda n, t, c: {"text": t, "label": f"['{c}']"},
         refused=["'label'", "written as strings", "JSON Lines"]),
    Kind("struct", lambda n, t, c: {"review": {"body": t, "lang": "en"}, "label": c}, typed=True,
         hyperparameters={"text_column": "review.body"}),
    Kind("label lists", lambda n, t, c: {"text": t, "labels": [c]}, typed=True),
    Kind("dates", lambda n, t, c: {"text": f"2020-01-{n % 28 + 1:02}", "label": c},
         refused=["'text'", "dates"]),
    Kind("a;b", lambda n, t, c: {"text": t, "label": c if n % 3 else "neg;pos"},
         refused=["'neg;pos'", "label_separator=';'"]),
    Kind("BIO tags", lambda n, t, c: {"word": t, "tag": ["O", "B-PER", "I-PER"][n % 3], "id": n},
         refused=["known by name as the text and the label", "'tag'"]),
    Kind("tags", lambda n, t, c: {"tokens": t.split(), "ner_tags": [0] * len(t.split())},
         refused=["token classification", "'ner_tags'"], typed=True),
    Kind("words", lambda n, t, c: {"text": t.split(), "label": c},
         refused=["'text'", "holds lists"], typed=True),
]  # fmt: skip

SIDE_FILES = {
    "README.md": "# Data\n", "LICENSE": "MIT", ".gitattributes": "*.parquet lfs", "_SUCCESS": "",
    "sample_submission.csv": "id,label\n1,pos\n2,neg\n", "notes.pdf": "%PDF",
    "manifest": '[{"prefix": "s3://bucket/"}]', "train.manifest": '[{"prefix": "s3://b/"}, "a"]',
    "requirements.txt": "torch\n", "stats.json": '{"rows": 3}', "part.crc": "0",
}  # fmt: skip


# ---- cases ----

Case = tuple[Layout, str, Kind]


def cases() -> list[Case]:
    """Each layout in each format, with kinds that are read; each kind in each format that can hold
    it, in layouts that are read. What is drawn is drawn from a seed."""
    draw = random.Random(SEED)
    read_kinds = [kind for kind in KINDS if not kind.refused]
    read_layouts = [layout for layout in LAYOUTS if not layout.refused]
    results: list[Case] = []
    pairs = [(layout, name) for layout in LAYOUTS[:-12] for name in draw.sample(sorted(FORMATS), 3)]
    for layout, name in pairs:
        fit = [kind for kind in read_kinds if FORMATS[name].typed or not kind.typed]
        results.append((layout, name, draw.choice(fit)))
    for layout in LAYOUTS[-12:]:
        for name in draw.sample(sorted(FORMATS), 1):
            results.append((layout, name, draw.choice(read_kinds[:15])))
    for kind in KINDS:
        fit_formats = [name for name in FORMATS if FORMATS[name].typed or not kind.typed]
        for name in draw.sample(fit_formats, 2):
            results.append((draw.choice(read_layouts), name, kind))
    return results


def make(folder: Path, case: Case, draw: random.Random) -> tuple[dict[str, Path], Truth]:
    """The channels of a case, and the rows of each split: (text ..., class)."""
    layout, name, kind = case
    folders: dict[str, Path] = {}
    truth: Truth = {}
    hyphens = itertools.count()
    for path, split in layout.files.items():
        splits = ["train"] * 12 + ["test"] * 4 if layout.column else [split] * 12
        rows = []
        for index, of_row in enumerate(splits):
            number = next(hyphens)
            text = f'{of_row} row {number}, said "so" ; and it was {draw.choice(["fine", "bad"])}'
            label = ("pos", "neg")[index % 2]
            row = kind.row(number, text, label)
            if layout.column:
                row[layout.column] = draw.choice(
                    {"train": ["train", "TRAIN"], "test": ["test"]}[of_row]
                )
            rows.append(row)
            second = (f"and that {number}, {text}",) if kind.pair else ()
            truth.setdefault(of_row, set()).add((text, *second, kind.shown(label)))
        target = folder / f"{path}{FORMATS[name].suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        FORMATS[name].write(target, rows)
        channel = path.partition("/")[0]
        folders[channel] = folder / channel
    first = next(iter(folders.values()))
    for side, content in {**dict(draw.sample(sorted(SIDE_FILES.items()), 3)), **kind.files}.items():
        (first / side).write_text(content)
    if layout.card:
        (first / "README.md").write_text(f"---\n{layout.card}---\n")
    truth.pop(NOWHERE, None)
    return folders, truth


def rows_of(splits: Splits, name: str) -> set[tuple[Any, ...]]:
    split = getattr(splits, name)
    texts = [split[column][:] for column in ("text", "text_pair") if column in split.column_names]
    labels = [splits.labels.show(label) for label in split["label"][:]]
    rows = list(zip(*texts, labels, strict=True))
    assert len(set(rows)) == len(rows)
    return set(rows)


def judge(folders: Mapping[str, Path], truth: Truth, case: Case) -> str | None:
    """What is wrong with how a case is read."""
    layout, _, kind = case
    refused = [*layout.refused, *kind.refused]
    try:
        splits = classification.load(folders, Hyperparameters(**kind.hyperparameters))
    except DataError as error:
        if not refused:
            return f"refused: {error}"
        missing = [word for word in (layout.refused or kind.refused) if word not in str(error)]
        return f"{missing} are not in: {error}" if missing else None
    if refused:
        return f"read, and should be refused by {refused}: {splits.notes}"
    train, evaluation = rows_of(splits, "train"), rows_of(splits, "evaluation")
    test = None if splits.test is None else rows_of(splits, "test")
    last = truth.get("test") if "validation" in truth else None
    held_in = truth.get("validation", truth.get("test"))
    if held_in is None:
        right = train | evaluation == truth["train"] and not train & evaluation
    else:
        right = train == truth["train"] and evaluation == held_in
    if right and test == last:
        return None
    return f"train {sorted(train)[:3]}, evaluation {sorted(evaluation)[:3]}: {splits.notes}"


@pytest.mark.filterwarnings("ignore:.*Saving the dataset")
def test_made_up_data_is_read_as_it_is_or_refused(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    wrong = []
    made = cases()
    assert len(made) >= 160
    datasets.disable_progress_bars()
    for number, case in enumerate(made):
        folder = tmp_path / str(number)
        channel_folders, truth = make(folder, case, draw)
        if mistake := judge(channel_folders, truth, case):
            wrong.append(f"{number}: {case[0].name} | {case[1]} | {case[2].name}: {mistake[:600]}")
    assert not wrong, f"{len(wrong)} of {len(made)}:\n" + "\n".join(wrong)


DIFFERS = {
    *("unnamed beside test", "unnamed folder beside test", "dev within train"),
    *("both in a name", "configurations", "a default configuration"),
    *("only test", "train within test"),
    *("imdb.{}.v2 eval", "data/{} evaluation", "x/{}/y devset", "imdb.{}.v2 held-out"),
    *("{}-00000-of-00001 holdout", "data/{} testset"),
}
"""Layouts that the datasets library resolves otherwise; docs/DATA.md says where."""


def test_names_say_what_they_say_to_the_datasets_library(tmp_path: Path) -> None:
    unlike = set()
    for number, layout in enumerate(LAYOUTS):
        one_channel = len({path.partition("/")[0] for path in layout.files}) == 1
        if layout.card or layout.column or not one_channel:
            continue
        for path in layout.files:
            file = tmp_path / str(number) / f"{path}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text('{"text": "a", "label": 1}\n')
        root = (tmp_path / str(number) / path.partition("/")[0]).resolve()
        theirs = DataFilesDict.from_patterns(get_data_patterns(str(root)), base_path=str(root))
        expected = {str(split): {Path(row) for row in files} for split, files in theirs.items()}
        try:
            ours = channels.find({root.name: root}).files
        except DataError:
            unlike.add(layout.name)
            continue
        if {split: set(files) for split, files in ours.items()} != expected:
            unlike.add(layout.name)
    assert unlike == DIFFERS


def test_the_table_of_formats_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "DATA.md").read_text()
    for row in FORMAT_ROWS:
        assert f"| {row.name} | {row.suffixes} | {row.what} |" in text
