"""Words with tags: every format and spelling to the same entities; illegal data names its row."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, IOB1, IOB2, IOBES, IOE1, IOE2, Entities
from transformers import AutoTokenizer

from recipe.arguments import parse
from recipe.data.annotations import word_tags
from recipe.data.annotations.word_tags import Tagged, iob2
from recipe.errors import DataError, HyperparameterError
from recipe.models.sources.tokenizers import reading_words
from recipe.plan import detection
from recipe.tasks.text_classification.task import TextClassification
from recipe.tasks.token_classification import report
from recipe.tokenization.windows import word_windows
from tests.support import causal_kit
from tests.support.jobs import write
from tests.support.refusals import refused

ROWS = [("Ada was here", [(0, 3, "PER")]), ("in New York , Ada", [(3, 11, "LOC"), (14, 17, "PER")])]
WORDS = [["Ada", "was", "here"], ["in", "New", "York", ",", "Ada"]]
TAGS = [["B-PER", "O", "O"], ["O", "B-LOC", "I-LOC", "O", "B-PER"]]
NAMES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def load(folder: Path, *argv: str) -> Tagged:
    return word_tags.load({"train": folder}, parse(["--eval_strategy", "no", *argv]))


def written(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def rows_of(spell: Any) -> str:
    return "\n".join(json.dumps(spell(text, spans)) for text, spans in ROWS)


def conll(columns: Sequence[str] = ("{word}", "{tag}"), between: str = " ") -> str:
    sentences = [
        "\n".join(between.join(columns).format(word=word, tag=tag, at=index)
                  for index, (word, tag) in enumerate(zip(words, tags, strict=True), 1))
        for words, tags in zip(WORDS, TAGS, strict=True)
    ]  # fmt: skip
    return "\n\n".join(sentences) + "\n"


IDS = [[NAMES.index(tag) for tag in row] for row in TAGS]
FILES = {
    "strings": ("a.jsonl", "\n".join(json.dumps({"tokens": w, "ner_tags": t})
                                     for w, t in zip(WORDS, TAGS, strict=True))),
    "written lists": ("a.csv", "tokens,tags\n" + "\n".join(
        f"\"{w}\",\"{t}\"" for w, t in zip(WORDS, TAGS, strict=True))),
    "conll": ("a.conll", conll()),
    "conll 2003": ("a.txt", "-DOCSTART- -X- -X- O\n\n" + conll(("{word}", "NN", "I-NP", "{tag}"))),
    "numbered": ("a.tsv", "# a comment\tx\n" + conll(("{at}", "{word}", "{tag}"), "\t")),
    "bio": ("a.bio", conll(between="\t").replace("\n", "\r\n")),
    "spacy": ("a.json", json.dumps([[t, {"entities": s}] for t, s in ROWS])),
    "doccano": ("a.jsonl", rows_of(lambda t, s: {"id": 1, "text": t, "label": s})),
    "records": ("a.jsonl", rows_of(lambda t, s: {"text": t, "entities": [
        {"start": a, "end": b, "label": c, "text": t[a:b]} for a, b, c in s]})),
    "label studio": ("a.json", json.dumps([{"text": t, "label": [
        {"start": a, "end": b, "labels": [c]} for a, b, c in s]} for t, s in ROWS])),
}  # fmt: skip
NAMED = ("doccano", "label studio")


@pytest.mark.parametrize("kind", FILES)
def test_every_format_is_found_and_read_as_the_same_entities(kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "data", *FILES[kind])
    loaded = load(folder)
    assert loaded.train["tokens"][:] == WORDS
    assert loaded.train["tags"][:] == TAGS
    assert loaded.are_entities
    assert set(loaded.names) == set(NAMES)
    assert detection.find(parse([]), {"train": folder})[0] == "token-classification"
    if kind in NAMED:
        with pytest.raises(DataError, match="task=token-classification"):
            TextClassification({"train": folder}, parse(["--task", "text-classification"]))


@pytest.mark.parametrize(
    ("name", "between", "comment"),
    [
        ("a.bmes", "\t", ""),
        ("a.iob", " ", "#begin document (bc/cctv); part 000"),
        ("a", "\t", "#\tid 1"),
        ("a.txt", " ", "# text = [ O"),
        ("a.train", "\t", "# id 1"),
        ("a.tsv", "\t", "#\thttp://a.b/c\t[2009-10-17]"),
    ],
)
@pytest.mark.parametrize(
    ("tags", "converted"),
    [
        ((["O", "B-PER", "O", "O", "O"], ["O", "O", "O", "B-LOC", "I-LOC"]), ""),
        ((["O", "S-PER", "O", "O", "O"], ["O", "O", "B-LOC", "M-LOC", "E-LOC"]), "E, M, S"),
        ((["(", "NN", "NN", "VB", ")"], ["NN", "IN", "CD", "NN", "NN"]), ""),
    ],
    ids=["IOB2", "BMES", "parts of speech"],
)
def test_a_named_task_reads_every_variant(
    tags: Sequence[list[str]], converted: str, between: str, comment: str, name: str, tmp_path: Path
) -> None:
    words = [["[", "Ada", "#1", "said", "]"], ["#", "in", "10\xa0000", "New", "York"]]
    sentences = [
        "\n".join(map(between.join, zip(*pair, strict=True)))
        for pair in zip(words, tags, strict=True)
    ]
    lines = f"{comment}\n" * bool(comment) + "\n\n".join(sentences * 2) + "\n\n"
    folder = written(tmp_path / "d", name, lines)
    loaded = load(folder, "--task", "token-classification")
    assert loaded.train["tokens"][:] == words * 2
    assert loaded.train["tags"][:2] == [iob2(row) for row in tags]
    assert loaded.are_entities == ("NN" not in tags[0])
    note = f"tags: {converted} are converted to B and I (IOB2)."
    assert [note] * bool(converted) == [line for line in loaded.notes if "IOB2" in line]
    if loaded.are_entities:
        assert detection.find(parse([]), {"train": folder})[0] == "token-classification"


def test_class_labels_and_class_names_name_numbers(tmp_path: Path) -> None:
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")),
        ner_tags=datasets.List(datasets.ClassLabel(names=NAMES)),
    )
    data = datasets.Dataset.from_dict({"tokens": WORDS, "ner_tags": IDS}, features)
    data.save_to_disk(str(tmp_path / "arrow"))
    loaded = load(tmp_path / "arrow")
    assert loaded.names == tuple(NAMES)
    assert loaded.train["tags"][:] == TAGS
    rows = [{"tokens": w, "ner_tags": t} for w, t in zip(WORDS, IDS, strict=True)]
    folder = write(tmp_path / "json", rows)
    assert not load(folder).are_entities
    assert load(folder, "--class_names", ",".join(NAMES)).train["tags"][:] == TAGS
    with pytest.raises(HyperparameterError, match=r"class_names has value '\[\"O\"', which is not"):
        load(folder, "--class_names", '["O"')
    write(folder, [{"tokens": ["a", "b"], "ner_tags": tags} for tags in ([1, -100], [0, 1])])
    assert load(folder, "--class_names", "O,B-X").train["tags"][0] == ["B-X", None]
    with pytest.raises(DataError, match=r"line 1 has the tag 1 for word 0 \('a'\).*1 classes"):
        load(folder, "--class_names", "O")


def test_the_columns_of_parts_of_speech_are_tags(tmp_path: Path) -> None:
    lines = ["1\tAda\tada\tPROPN\tNNP\t_\t2\tnsubj\t_\t_", "2-3\tisn't\t_\t_\t_\t_\t_\t_\t_\t_",
             "2\tis\tbe\tAUX\tVBZ\t_\t0\troot\t_\t_", "3\tnot\tnot\tPART\tRB\t_\t2\tadv\t_\t_"]  # fmt: skip
    folder = written(
        tmp_path / "data", "a.conllu", "# text = Ada isn't\n" + "\n".join(lines) + "\n"
    )
    loaded = load(folder, "--label_column", "xpos")
    assert loaded.train["tokens"][:] == [["Ada", "is", "not"]]
    assert loaded.names == ("NNP", "RB", "VBZ")
    assert not loaded.are_entities
    assert load(folder).names == ("AUX", "PART", "PROPN")


@pytest.mark.parametrize(
    ("name", "text", "argv", "words"),
    [
        # CoNLL-2012's first column names documents; its entities are brackets, which are no tags either.
        ("a.conll", "bc/0 0 Ada (PERSON)\nbc/0 1 sat *\nbc/0 2 here *\n\n" * 3, [],
         ["first column", "is the same in all lines"]),
        ("train.txt", "__label__good __label__film fine work\n" * 24, [], ["fastText"]),
        ("train.txt", "B-PER Ada\nO sat\nB-LOC Rome\n\n" * 12, [], ["first column", "has tags such as 'B-PER'"]),
        ("t.jsonl", "\n".join(json.dumps({"tokens": ["a", "b"], "ner_tags": ["O", tag]})
                              for tag in ("B-PER", "B-Per", "B-ORG")), [],
         ["the classes 'PER' and 'Per', which would be two"]),
        ("train.csv", "Sentence,Word,Tag\n" + "1,Ada,B-PER\n1,sat,O\n" * 12,
         ["--text_column", "Word", "--label_column", "Tag"], ["has a word in each row, in column 'Word'", '{"tokens": ["Ada", "sat"]']),
    ],
)  # fmt: skip
def test_what_is_no_list_of_words_with_tags_is_refused(
    name: str, text: str, argv: list[str], words: list[str], tmp_path: Path
) -> None:
    folder = written(tmp_path / "d", name, text)
    with refused(DataError, *words):
        load(folder, "--task", "token-classification", *argv)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, ["2 words", "1 tags", "line 3"]),
        ({"tokens": ["a", None], "ner_tags": ["O", "O"]}, ["null in place of word 1", "line 3"]),
        ({"tokens": ["a", True], "ner_tags": ["O", "O"]}, ["true in place of word 1", "line 3"]),
        ({"tokens": ["a", "b"], "ner_tags": ["O", None]}, ["the tag null for word 1 ('b')"]),
        ({"tokens": [["a"], "b"], "ner_tags": ["O", "O"]}, ['["a"] in place of word 0', "line 3"]),
        ({"text": "a b", "entities": [[0, 1, "X"], [0, 3, "Y"]]}, ["overlap", "'a'", "line 3"]),
        ({"text": "a b", "entities": [[2, 9, "X"]]}, ["2 to 9", "3 characters", "line 3"]),
        ({"text": "a b", "entities": [[2, 2, "X"]]}, ["2 to 2", "line 3"]),
        ({"text": "a b", "entities": [{"start": 0, "end": 1, "label": "X", "text": "b"}]},
         ["'a' and not 'b'", "line 3"]),
        ({"text": "a b", "entities": [{"result": [{"value": {"start": 0, "end": 1, "labels": ["X"]}}]}]},
         ["no spans that can be read", "from Label Studio, export JSON-MIN", "line 3"]),
    ],
)  # fmt: skip
def test_illegal_rows_are_named(tmp_path: Path, row: dict[str, Any], words: list[str]) -> None:
    right = {"tokens": ["a", "b"], "ner_tags": ["O", "B-X"]}
    if "text" in row:
        right = {"text": "a b", "entities": [[0, 1, "X"]]}  # type: ignore[dict-item]
    with refused(DataError, *words):
        load(write(tmp_path, [right, right, row]))


@pytest.mark.parametrize("counted", ["characters", "last characters", "bytes"])
def test_spans_are_counted_in_characters_or_refused(counted: str, tmp_path: Path) -> None:
    text = "Ada went to Paris, Jos\u00e9 went to Rome and Bob went to Oslo."

    def position_of(position: int) -> int:
        return len(text[:position].encode()) if counted == "bytes" else position

    spans = []
    for name in ("Paris", "Jos\u00e9", "Rome", "Oslo"):
        start = text.index(name)
        end = position_of(start + len(name)) - (counted == "last characters")
        spans.append([position_of(start), end, "X"])
    rows = [{"text": text, "entities": spans}] * 4
    if counted == "characters":
        rows.append({"text": text, "entities": [[12, 15, "X"]]})
        assert "1 of 17 spans" in " ".join(load(write(tmp_path, rows)).notes)
        return
    with pytest.raises(DataError, match=r"of 16 spans .* within a word"):
        load(write(tmp_path, rows))


def test_one_of_two_columns_of_entities_must_be_named(tmp_path: Path) -> None:
    """GermEval's: the last column has the entities within others, of which there are few."""
    rows = [("1", "Uni", "B-ORG", "O"), ("2", "Kiel", "I-ORG", "B-LOC"), ("3", "in", "O", "O"),
            ("4", "Ulm", "B-LOC", "O")]  # fmt: skip
    text = "\n".join("\t".join(row) for row in rows) + "\n\n"
    folder = written(tmp_path / "d", "train.conll", text * 3)
    with pytest.raises(DataError, match="label_column=column_3; or label_column=column_4"):
        load(folder)
    tags = load(folder, "--label_column", "column_3").train["tags"][0]
    assert tags == ["B-ORG", "I-ORG", "O", "B-LOC"]


@pytest.mark.parametrize(
    ("scheme", "letters"),
    # Of the only word of an entity, the first one of several, one within, the last one.
    [(IOB1, "IIII"), (IOB2, "BBII"), (IOE1, "IIII"), (IOE2, "EIIE"), (IOBES, "SBIE"),
     (BILOU, "UBIL")],
)  # fmt: skip
def test_every_scheme_is_read_as_seqeval_reads_it(scheme: Any, letters: str) -> None:
    drawn, (single, begin, within, last) = random.Random(0), letters
    for _ in range(200):
        entities, index = [], drawn.randrange(2)
        while index < 10:
            end = min(10, index + drawn.randint(1, 3))
            entities.append((drawn.choice("XY"), index, end))
            index = end + drawn.choice([0, 0, 1, 2])
        tags = ["O"] * 10
        for kind, start, end in entities:
            size = end - start
            prefixes = [single] if size == 1 else [begin, *within * (size - 2), last]
            if scheme is IOB1 and any(item[::2] == (kind, start) for item in entities):
                prefixes[0] = "B"
            if scheme is IOE1 and any(item[:2] == (kind, end) for item in entities):
                prefixes[-1] = "E"
            tags[start:end] = [f"{prefix}-{kind}" for prefix in prefixes]
        read = Entities([tags], scheme).entities[0]
        if scheme is not IOE1:  # of which seqeval loses entities of one word beside each other
            assert [(item.tag, item.start, item.end) for item in read] == entities
        results = [(kind, first, last + 1) for kind, first, last in get_entities(iob2(tags))]
        assert results == entities, tags


@pytest.mark.parametrize(
    ("tags", "counted"),
    [
        (["B-X", "I-X", "O", "I-X", "B-Y", "I-X"], "24 of the 48 entities of"),
        (["I-X", "I-X", "O", "I-X", "B-X"], "24 of the 36 entities of"),
        (["B-X", "I-X", "O", "B-Y"], ""),
        (["NN", "IN", "IN", "CD"], ""),
    ],
)
def test_entities_that_begin_with_i_are_counted(
    tags: list[str], counted: str, tmp_path: Path
) -> None:
    words = [f"w{index}" for index in range(len(tags))]
    loaded = load(write(tmp_path, [{"tokens": words, "ner_tags": tags}] * 12))
    lines = [note for note in loaded.notes if "begin with I-" in note]
    assert [line.startswith(counted) for line in lines] == [True] * bool(counted)


def test_each_word_is_learned_in_one_window_that_fits(tiny_model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    draw = random.Random(0)
    for count, length in itertools.product(range(1, 40, 3), range(3, 30)):
        # Numbers have a token for each digit.
        words = [str(draw.choice([7, 21, 1843])) for _ in range(count)]
        (whole,) = tokenizer([words], is_split_into_words=True)["input_ids"]
        results = list(word_windows(tokenizer, [words], length, True))
        learned = [word for *_, owners in results for word in owners if word is not None]
        assert learned == list(range(count))
        for _, ids, owners in results:
            assert len(ids) == len(owners) <= length
            for token, word in zip(ids, owners, strict=True):
                assert word is None or tokenizer.decode([token]) == words[word][0]
        ((_, ids, owners),) = word_windows(tokenizer, [words], length, False)
        assert ids == [*whole[:-1][: length - 1], whole[-1]]
        assert [word for word in owners if word is not None] == [*range(max(
            word for word in owners if word is not None) + 1)]  # fmt: skip


def test_words_are_read_by_themselves_as_within_a_text(tmp_path: Path, tiny_model: Path) -> None:
    """Of a tokenizer of GPT-2's kind, a space stands before each of them."""
    generic = causal_kit.make_tokenizer()
    generic.save_pretrained(tmp_path)
    alone = generic(["was", "here"], is_split_into_words=True)["input_ids"]
    within = generic(" was here")["input_ids"]
    assert alone != within
    mended: Any = reading_words(generic, str(tmp_path), {})
    assert mended(["was", "here"], is_split_into_words=True)["input_ids"] == within
    mended.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again(["was", "here"], is_split_into_words=True)["input_ids"] == within
    bert = AutoTokenizer.from_pretrained(tiny_model)
    assert reading_words(bert, str(tiny_model), {}) is bert


def test_tags_without_positions_are_said_to_be_of_words(tmp_path: Path) -> None:
    row = {"tokens": ["New", "York"], "ner_tags": ["LOC", "O"]}
    folder = write(tmp_path, [row])
    write(folder, [{**row, "ner_tags": [-100, -100]}], "test")
    notes = load(folder).notes
    assert "an entity of two words gives two answers" in notes[-1]
    assert "test.jsonl has no value in 'ner_tags'" in notes[0]


@pytest.mark.parametrize("name", ["1.ann", "train.tsv"])
def test_files_of_annotations_are_refused_with_a_row_that_is_read(
    name: str, tmp_path: Path
) -> None:
    text = "#FORMAT=WebAnno TSV 3.3\n" if name == "train.tsv" else "T1\tPER 0 3\tAda\n"
    folder = written(tmp_path / "train", name, text)
    with pytest.raises(DataError) as refusal:
        load(folder)
    (folder / name).unlink()
    row = str(refusal.value).partition(".jsonl: ")[2]
    written(folder, "rows.jsonl", f"{row}\n" * 12)
    assert load(folder).train["tags"][0] == ["B-PER", "O"]


def test_right_tags_have_each_score_of_their_kind() -> None:
    right = report.Sentence(number=0, predicted=["B-X"], sure=[1.0], true=["B-X"])
    for are_entities, names in ((True, report.ENTITY_SCORES), (False, report.TAG_SCORES)):
        assert report.scores([right], are_entities) == dict.fromkeys(names, 1.0)
