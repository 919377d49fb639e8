"""The layouts of public data sets, recreated with rows of our own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipe.data import classification
from recipe.data.classification import Splits
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from tests.support.refusals import refused

N = 12


def lines(template: str, split: str = "", count: int = N, header: str = "") -> str:
    """Numbered lines; `{c}` is 0 or 1, `{k}` pos or neg, `{n}` the number."""
    made = [
        template.format(n=f"{split}{n}", c=n % 2, d=1 - n % 2, k=("pos", "neg")[n % 2])
        for n in range(count)
    ]
    return "\n".join([header] * bool(header) + made) + "\n"


def folders(root: str, split: str, classes: Sequence[str], suffix: str = ".txt") -> dict[str, str]:
    return {
        f"{root}/{name}/{split}{n}{suffix}": f"Subject: {name}\n\nText {n}, of {split}, is {name}.\n"
        for name in classes
        for n in range(4)
    }


def jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


GLUE = "sentence\tlabel"
JIGSAW = "id,comment_text,toxic,obscene,threat"
TWEET_ROWS = [{"text": f"tweet {n}", "label": n % 2} for n in range(N)]
TWEETS = {"README.md": "---\ntask_categories: [text-classification]\n---\n",
          "irony/train.jsonl": jsonl(TWEET_ROWS), "irony/test.jsonl": jsonl(TWEET_ROWS[:4]),
          "hate/train.jsonl": jsonl(TWEET_ROWS), "hate/test.jsonl": jsonl(TWEET_ROWS)}  # fmt: skip


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def load(folder: Path, **hyperparameters: Any) -> Splits:
    return classification.load({"train": folder}, Hyperparameters(**hyperparameters))


@pytest.mark.parametrize(
    ("files", "hyperparameters", "rows", "classes", "notes"),
    [pytest.param(*case[1:], id=case[0]) for case in [
    # name, files, hyperparameters, (train, evaluation, test) rows, classes, words of the notes
    ("SST-2 of GLUE", {
        "SST-2/train.tsv": lines("it 's number {n}\t{c}", header=GLUE),
        "SST-2/dev.tsv": lines("it is number {n}\t{c}", header=GLUE, count=6),
        "SST-2/test.tsv": lines("{n}\twas number {n}", header="index\tsentence"),
        "SST-2/original/datasetSentences.txt": "sentence_index\tsentence\n1\tA sentence .\n",
        "SST-2/original/README.txt": "Stanford Sentiment Treebank V1.0"},
     {}, (12, 6, 0), ["0", "1"], ["test.tsv has no value in 'label'", "datasetSentences.txt"]),
    ("CoLA of GLUE", {
        "CoLA/train.tsv": lines("gj04\t{c}\t\tSentence number {n} , it goes .", count=40),
        "CoLA/dev.tsv": lines("gj04\t{c}\t\tAnother one {n} is held .", count=8),
        "CoLA/test.tsv": lines("{n}\tBill whistled {n} .", header="index\tsentence")},
     {"text_column": "column_3", "label_column": "column_1"},
     (40, 8, 0), ["0", "1"], ["test.tsv has no value in 'column_1'"]),
    ("Kaggle's disaster tweets", {
        "train.csv": lines("{n},fire,Paris,tweet {n} on it,{c}",
                           header="id,keyword,location,text,target"),
        "test.csv": lines("{n},flood,Rome,tweet {n} on that", header="id,keyword,location,text"),
        "sample_submission.csv": lines("{n},0", header="id,target")},
     {}, (11, 1, 0), ["0", "1"], ["sample_submission.csv", "test.csv has no value in 'target'"]),
    ("Kaggle's Jigsaw", {
        "train.csv": lines("{n},comment {n} here,{c},{d},0", header=JIGSAW)
                     + lines("{n},comment y{n} here,1,0,1"),
        "test.csv": lines("{n},comment {n} there", header="id,comment_text"),
        "test_labels.csv": lines("{n},-1,-1,-1", header="id,toxic,obscene,threat"),
        "sample_submission.csv": lines("{n},0.5,0.5,0.5", header="id,toxic,obscene,threat")},
     {"label_column": "toxic,obscene,threat"},
     (22, 2, 0), ["toxic", "obscene", "threat"], ["test_labels.csv"]),
    ("SMS spam", {"SMSSpamCollection": lines("{k}\tGo until {n} point, crazy.. ok"),
                  "readme": "SMS Spam Collection v.1"},
     {"text_column": "column_1", "label_column": "column_0"}, (11, 1, 0), ["neg", "pos"], ["readme"]),
    ("SMS spam of Kaggle", {"spam.csv": lines("{k},Go until {n} point,,,", header="v1,v2,,,")},
     {"text_column": "v2", "label_column": "v1"},
     (11, 1, 0), ["neg", "pos"], ["text 'v2', label 'v1'"]),
    ("pandas's index", {"a.csv": lines("{n},some text {n},{k}", header=",text,label")},
     {}, (11, 1, 0), ["neg", "pos"], []),
    ("stars", {"a.csv": "text,stars\n" + lines("text {n},{c}").replace(",0", ",2"),
               "classes.txt": "1 star\n2 stars\n", "categories.json": '{"a": {"b": ["c"]}}'},
     {}, (11, 1, 0), ["1", "2"], ["categories.json, classes.txt"]),
    ("AG News, named columns", {
        "train.csv": lines('"{c}","Title {n} of it","The text {n} said, at length"').replace('"0"', '"2"'),
        "test.csv": lines('"{c}","Title t{n} of it","The text t{n} said"', count=4).replace('"0"', '"2"'),
        "classes.txt": "World\nSports\n", "readme.txt": "AG's News Topic Classification Dataset"},
     {"text_column": "column_1,column_2", "label_column": "column_0", "class_names": "World,Sports"},
     (12, 4, 0), ["World", "Sports"], ["classes.txt"]),
]],
)  # fmt: skip
def test_a_public_layout_is_read(
    tmp_path: Path,
    files: dict[str, str],
    hyperparameters: dict[str, Any],
    rows: tuple[int, int, int],
    classes: list[str],
    notes: list[str],
) -> None:
    splits = load(write(tmp_path, files), **hyperparameters)
    sizes = [len(splits.train), len(splits.evaluation), len(splits.test) if splits.test else 0]
    assert sizes == list(rows), splits.notes
    assert list(splits.labels.names) == classes, splits.notes
    for word in notes:
        assert word in "\n".join(splits.notes)


@pytest.mark.parametrize(
    ("files", "words"), [pytest.param(*case[1:], id=case[0]) for case in [
    ("TweetEval of the hub", TWEETS, ["hate, irony", "S3 prefix"]),
    ("aclImdb", {**folders("aclImdb/train", "a", ["pos", "neg", "unsup"]), "aclImdb/imdb.vocab": "the\nand\n"},
     ["pos/a0.txt is a plain text", "path.parent.name"]),
    ("20 Newsgroups", folders("20news-bydate-train", "4996", ["alt.atheism", "sci.med"], ""), ["is a plain text"]),
    ("Spark's partitions", {f"split=train/label={k}/part-0.jsonl": jsonl(TWEET_ROWS) for k in ("pos", "neg")},
     ["label=neg", "Write 'neg' into a column 'label'"]),
    ("GoEmotions", {"train.tsv": lines("My favourite is {n}\t{c}\tid{n}") + "So\t0,1\tidx\n"
                                 + "Well then\t0,1\tidy\n"}, ["'column_1' ('0')", "label_column="]),
    ("CoNLL 2003", {"eng.train": "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n",
                    "eng.testa": "CRICKET NNP B-NP O\nKent NNP B-NP B-ORG\n"}, ["token classification", "eng.train"]),
    ("Kaggle's NER", {"ner_dataset.csv": "Sentence #,Word,POS,Tag\nSentence: 1,Thousands,NNS,O\n"
                                         ",of,IN,O\n,London,NNP,B-geo\n,to,TO,O\n"},
     ["Word"]),
    ("CLINC150", {"data_full.json": json.dumps({"train": [["what is it", "translate"]] * 9,
                                                "test": [["say it", "translate"]] * 9})}, ["data_full"]),
    ("tags of words in one string", {"a.csv": lines("Ada sits,B-PER O", header="text,labels")
                                              + lines("she sits,O O")},
     ["token classification", "'B-PER O'"]),
    ("names of pictures", {"train.csv": lines("{n}.jpg,{c}", header="image_id,label")},
     ["text_column=image_id", "0.jpg"]),
    ("Python's repr of bytes", {"a.csv": lines("b'a text {n}',{c}", header="text,label")},
     ["repr of bytes", "b'a text 0'"]),
    ("a zip of Kaggle's", {"train.csv.zip": "PK\x03\x04", "test.csv.zip": "PK\x03\x04"}, ["is packed"]),
    ("MR", {"rt-polarity.pos": lines("a film number {n} that works"),
            "rt-polarity.neg": lines("a film number {n} that fails")},
     ["rt-polarity.pos", "a text and a label"]),
    ("TweetEval's files", {"train_text.txt": lines("tweet {n} at @user"),
                           "train_labels.txt": lines("{c}")}, ["train_text.txt", "train_labels.txt"]),
    ("one file for each class", {"pos/a.txt": lines("good {n}"), "neg/a.txt": lines("bad {n}")},
     ["a.txt is a plain text"]),
    ("part files of plain text", {f"part-0000{n}.txt": "some words\nmore words\n" for n in range(3)},
     ["part-00000.txt"]),
    ("dates as labels", {"a.csv": "text,label\n" + lines("text {n},2020-01-0{c}")}, ["dates", "'label'"]),
    ("decimal commas", {"a.csv": "text;label\n" + lines("text {n};{c},5")}, ["points", "'0,5'"]),
    ("records beside texts", {"a.jsonl": jsonl([{"text": "a b", "label": 1}, {"text": {"b": "c"},
                                                                            "label": 0}] * 9)},
     ["a.jsonl line 2", "'text'"]),
    ("files of all rows beside a test file", {
        "all.csv": lines("text {n},{k}", header="text,label", count=30),
        "test.csv": lines("text {n},{k}", header="text,label", count=12)}, ["all.csv may be of any split", "test data"]),
]]
)  # fmt: skip
def test_a_public_layout_is_refused(
    tmp_path: Path, files: dict[str, str], words: list[str]
) -> None:
    with refused(DataError, *words):
        load(write(tmp_path, files))


def test_all_files_that_cannot_be_read_are_in_one_message(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": '{"text": "a"\n', "b.csv": 'text,label\n"a,b\n', "c.csv": "x\n"})
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert "3 problems" in str(caught.value)
    for name in ("a.jsonl line 1", "b.csv", "c.csv"):
        assert name in str(caught.value)
