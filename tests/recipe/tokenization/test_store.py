"""Every task's tokens come from files, some rows at a time: those of the library for each row."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from recipe.data import values
from recipe.data.files import spool
from recipe.errors import DataError, OutputError
from recipe.tasks.masked_lm import tokens as masked_texts
from recipe.tasks.masked_lm.spec import Options
from recipe.tasks.question_answering import tokens as windows
from recipe.tasks.token_classification import tokens as words
from recipe.tokenization import chat, documents, store, texts
from recipe.tokenization.encoding import beginning
from tests.support import causal_kit, serving_kit
from tests.support.mounts import Mount

LETTERS = [*"abc é中\u0301 \n\t,.'", "the ", "film ", "[SEP]", "</s>", "<|im_end|>", "0 ", "🙂"]
ROWS, LONGEST = 90, 12
DRAW = random.Random(7)


def text() -> str:
    return "".join(DRAW.choices(LETTERS, k=DRAW.choice([0, 0, 1, 5, 20, 60, 150])))


def talk(*roles: str) -> str:
    return json.dumps([{"role": role, "content": text()} for role in roles])


def rows_of(**columns: Callable[[], Any]) -> datasets.Dataset:
    """As it comes from a split: not in the order in which it lies in memory."""
    made = {name: [make() for _ in range(ROWS + 10)] for name, make in columns.items()}
    return datasets.Dataset.from_dict(made).shuffle(seed=0).select(range(ROWS))


TURNS = [("user", "assistant"), ("system", "user", "assistant"), ("assistant", "user", "assistant")]
TEXTS = rows_of(text=text)
TALKS = rows_of(messages=lambda: talk(*DRAW.choice(TURNS)))
WORDS = rows_of(tokens=lambda: [text() for _ in range(DRAW.choice([1, 3, 20]))])
TAGGED = WORDS.add_column(
    "tags", [[DRAW.choice([None, "O", "B-X", "I-X"]) for _ in row] for row in WORDS["tokens"]]
)
QUESTIONS = rows_of(
    question=lambda: f"{text()[:9]}?", context=lambda: f"Ada {text()}", answers=lambda: ["Ada"],
    starts=lambda: [0],
)  # fmt: skip
PAIRS = rows_of(source=lambda: f"{text()}s", target=lambda: f"{text()}t")
IDS = rows_of(input_ids=lambda: DRAW.choices(range(5, 20), k=DRAW.choice([1, 4, 40])),
              label=lambda: DRAW.choice([0, 1]))  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(values, "CHUNK_ROWS", 13)
    monkeypatch.setattr(store, "_CHUNK_BYTES", 500)
    return tmp_path / "tokens"


@pytest.mark.parametrize("long_texts", [None, "split", "truncate"])
@pytest.mark.parametrize("kind", ["text", "prompt", "messages", "input_ids"])
def test_documents_are_those_of_each_row(kind: str, long_texts: str | None) -> None:
    splits = {"text": TEXTS, "prompt": rows_of(prompt=text, completion=text), "messages": TALKS,
              "input_ids": IDS.remove_columns("label")}  # fmt: skip
    split, tokenizer = splits[kind], causal_kit.make_tokenizer()
    longest = 60 if kind == "messages" else LONGEST
    actual = documents.tokenize_split("train", split, tokenizer, longest, long_texts)
    end = tokenizer.eos_token_id
    expected: list[tuple[list[int], list[bool]]] = []
    for row in split:
        if kind == "messages":
            (written,) = chat.write(tokenizer, json.loads(row["messages"]))
            assert isinstance(written, chat.Written)
            ids, learned = [], []
            for part, is_learned in written.parts:
                added = tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += added
                learned += [is_learned] * len(added)
        elif kind == "prompt":
            prompt = tokenizer(row["prompt"])["input_ids"]
            prompt = prompt[:-1] if len(prompt) > 1 and prompt[-1] == end else prompt
            after = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
            after = after if after[-1:] == [end] else [*after, end]
            ids, learned = prompt + after, [False] * len(prompt) + [True] * len(after)
        else:
            ids = row["input_ids"] if kind == "input_ids" else tokenizer(row["text"])["input_ids"]
            ids = ids if kind == "input_ids" or ids[-1:] == [end] else [*ids, end]
            learned = [True] * len(ids)
        is_split = long_texts == "split" or (long_texts is None and kind in ("text", "input_ids"))
        firsts = range(0, max(1, len(ids) - 1), longest - 1) if is_split else [0]
        for first in firsts:
            piece = slice(first, first + longest)
            if any(learned[piece][1:]):
                expected.append((ids[piece], [False, *learned[piece][1:]]))
    assert [actual.tokens(index).tolist() for index in range(len(actual))] == [
        ids for ids, _ in expected
    ]
    assert actual.learned.tolist() == [mark for _, marks in expected for mark in marks]
    assert actual.labels.tolist() == [sum(marks) for _, marks in expected]


@pytest.mark.parametrize("truncates", [False, True])
def test_pieces_to_mask_are_those_of_each_row(truncates: bool, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    actual = masked_texts.tokenize_split("train", TEXTS, tokenizer, LONGEST, Options(), truncates)
    room = LONGEST - 2
    expected: list[list[int]] = []
    for row in TEXTS["text"]:
        ids: list[int] = tokenizer(row, add_special_tokens=False)["input_ids"]
        cut = np.array_split(ids, max(1, -(-len(ids) // room)))
        for piece in [ids[:room]] if truncates else [part.tolist() for part in cut]:
            if piece:
                expected.append([tokenizer.cls_token_id, *piece, tokenizer.sep_token_id])
    assert [actual.tokens(index).tolist() for index in range(len(actual))] == expected
    never = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert set(actual.masking.never) == never


@pytest.mark.parametrize("case", [
    pytest.param((IDS, lambda split, tokenizer: texts.samples(split, tokenizer, LONGEST)), id="texts"),
    pytest.param((TALKS, lambda split, tokenizer: documents.tokenize_split(
        "train", split, tokenizer, LONGEST, None)), id="documents"),
    pytest.param((TEXTS, lambda split, tokenizer: masked_texts.tokenize_split(
        "evaluation", split, tokenizer, LONGEST, Options(), False)), id="masked"),
    pytest.param((TAGGED, lambda split, tokenizer: words.tokenize_split(
        "train", split, tokenizer, LONGEST, ("O", "B-X", "I-X"), True)), id="words"),
    pytest.param((QUESTIONS, lambda split, tokenizer: windows.tokenize_split(
        "train", split, tokenizer, LONGEST + 8, 3)), id="windows"),
    pytest.param((PAIRS, lambda split, tokenizer: texts.source_target_samples(
        "train", split, tokenizer, "do: ", {"source": LONGEST, "target": 9})), id="pairs"),
])  # fmt: skip
def test_tokens_are_made_once_whatever_comes_together(
    case: Any, tiny_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, make = case
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    first = make(split, tokenizer)
    (kept,) = cache.iterdir()
    written = (kept / "input_ids").stat()
    assert written.st_size == 4 * len(first.token_ids), "they lie in a file"
    assert make(split, tokenizer).fingerprint() == first.fingerprint()
    assert (kept / "input_ids").stat().st_mtime_ns == written.st_mtime_ns
    monkeypatch.setattr(values, "CHUNK_ROWS", 10_000)
    monkeypatch.setattr(store, "_CHUNK_BYTES", 1 << 30)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "other"))
    again = make(split, tokenizer)
    for field in dataclasses.fields(again):
        one, other = getattr(first, field.name), getattr(again, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, field.name
            assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f"), field.name
    assert again.fingerprint() == first.fingerprint()


def test_token_ids_of_another_tokenizer_are_refused(tiny_model: Path, cache: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for wrong, says in (
        ([len(tokenizer)], f"token id {len(tokenizer)}"),
        ([-1], "token id -1"),
        ([], "row 50 "),
    ):
        rows = [[7]] * 50 + [wrong] + [[7]] * 50
        split = datasets.Dataset.from_dict({"input_ids": rows, "label": [0] * 101})
        with pytest.raises(DataError, match=says):
            texts.samples(split, tokenizer, LONGEST)
        with pytest.raises(DataError, match=says):
            documents.tokenize_split(
                "train", split.remove_columns("label"), tokenizer, LONGEST, None
            )
    assert not list(cache.iterdir()), "of what failed nothing stays"


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_long_questions_leave_room_for_their_context(kind: str, tiny_model: Path) -> None:
    """What a cut leaves of a character or a word may be more tokens than it was."""
    is_bytes = kind == "bytes"
    tokenizer: Any = (
        causal_kit.make_tokenizer() if is_bytes else AutoTokenizer.from_pretrained(tiny_model)
    )
    questions = [
        "🙂" * 9,
        "1234567890" * 3,
        "é东" * 9,
        "the film" * 9,
        *map(str, TEXTS["text"][:20]),
    ]
    for question in questions:
        rows = datasets.Dataset.from_dict(
            {windows.QUESTION: [question], windows.CONTEXT: ["it was 7 in the film 🙂 or 8 " * 3],
             windows.ANSWERS: [[]], windows.STARTS: [[]]}
        )  # fmt: skip
        for longest, stride in ((12, 2), (24, 9)):
            made = windows._windows_of(tokenizer, longest, stride, rows[:], range(1))
            assert max(made[store.LENGTHS]) <= longest and len(made[store.LENGTHS]) > 1


def tokenizers(kind: str, tiny_model: Path) -> Any:
    if kind == "bytes":
        return causal_kit.make_tokenizer()
    if kind == "spelling":
        return serving_kit.tokenizer()
    if kind == "in Python":
        return ByT5Tokenizer()
    if kind == "Unigram":
        pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("film", -3.5), ("lm", -4.0)]
        pieces += [(letter, -6.0) for letter in "abcthefilm.,'0"]
        model = Tokenizer(models.Unigram(pieces, unk_id=0))
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        return PreTrainedTokenizerFast(tokenizer_object=model, model_max_length=10_000)
    made = AutoTokenizer.from_pretrained(tiny_model)
    if kind == "left":
        made.truncation_side = "left"
    if kind == "whole specials":
        made.split_special_tokens = True
    if kind == "of its own":

        class Custom(type(made)):  # type: ignore[misc]
            def _encode_plus(self, text: Any, *given: Any, **options: Any) -> Any:
                def shorter(one: Any) -> Any:
                    return one[:-1] if len(one) > 60 else one

                texts = list(map(shorter, text)) if isinstance(text, list) else shorter(text)
                return super()._encode_plus(texts, *given, **options)

            _batch_encode_plus = _encode_plus if hasattr(made, "_batch_encode_plus") else None

        made.__class__ = Custom
    return made


@pytest.mark.filterwarnings("ignore:This sequence already has")  # ByT5's of texts with </s>
@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("words", False), ("words", True), ("bytes", False), ("spelling", False),
        ("in Python", False), ("Unigram", False), ("bytes", True), ("left", False), ("left", True), ("whole specials", False),
        ("of its own", False), ("of its own", True),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_library(kind: str, pairs: bool, tiny_model: Path) -> None:
    draw = random.Random(f"{kind} {pairs}")

    def some_text() -> str:
        # The longest have more characters than are read of a text where that decides.
        return "".join(draw.choices(LETTERS, k=draw.choice([0, 1, 5, 20, 20, 60, 90, 450])))

    # Of pairs that are cut, the library builds every combination of their pieces, for seconds.
    count = 50 if pairs else 100
    columns: dict[str, list[Any]] = {"text": [some_text() for _ in range(count)]}
    if pairs:
        columns["text_pair"] = [some_text() for _ in range(count)]
    columns["label"] = [index % 3 for index in range(count)]
    split = datasets.Dataset.from_dict(columns).shuffle(seed=0).select(range(count - 10))
    tokenizer = tokenizers(kind, tiny_model)
    actual = texts.samples(split, tokenizer, 12)
    given = [split[name][:] for name in ("text", "text_pair") if name in columns]
    expected = tokenizers(kind, tiny_model)(*given, truncation=True, max_length=12)
    rows = range(len(split))
    assert [actual.tokens(row).tolist() for row in rows] == expected["input_ids"]
    assert actual.labels.tolist() == split["label"][:]
    assert (actual.types is not None) == (pairs and "token_type_ids" in expected)
    if actual.types is not None:
        types = [actual.types[actual.span(row)].tolist() for row in rows]
        assert types == expected["token_type_ids"]


@pytest.mark.parametrize("kind", ["words", "bytes", "Unigram"])
def test_of_megabytes_only_the_beginning_is_read(kind: str, tiny_model: Path) -> None:
    tokenizer = tokenizers(kind, tiny_model)
    assert len(beginning(tokenizer, "film " * 400_000, 16)) == 16 * 16
    spaces = " " * 100_000 + "film"
    assert beginning(tokenizer, spaces, 16) in (spaces, spaces[: 16 * 16])
    tokenizer.truncation_side = "left"
    assert beginning(tokenizer, spaces, 16) == spaces


def test_a_store_is_of_its_rows_and_length_and_is_whole(tiny_model: Path, cache: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    split = datasets.Dataset.from_dict({"text": ["the film", "good"] * 90, "label": [0, 1] * 90})
    first = texts.samples(split, tokenizer, 8)
    (kept,) = cache.iterdir()
    assert {path.name for path in kept.iterdir()} == {"contents.json", "input_ids", "starts"}
    assert texts.samples(split, tokenizer, 3).fingerprint() != first.fingerprint()
    other = datasets.Dataset.from_dict({"text": ["the film", "bad"] * 90, "label": [0, 1] * 90})
    assert texts.samples(other, tokenizer, 8).fingerprint() != first.fingerprint()
    assert len(list(cache.iterdir())) == 3
    (kept / "starts").write_bytes((kept / "starts").read_bytes()[:-8])
    with pytest.raises(DataError, match=f"{kept} are incomplete"):
        texts.samples(split, tokenizer, 8)


def test_a_key_tells_tokenizers_apart_that_are_asked_for_in_turn(tiny_model: Path) -> None:
    split = datasets.Dataset.from_dict({"text": ["the film"], "label": [0]})
    tokenizers = [AutoTokenizer.from_pretrained(tiny_model) for _ in range(3)]
    tokenizers[1].backend_tokenizer.add_tokens(["film"])
    tokenizers[2].backend_tokenizer.normalizer = None
    keys = [store.key(split, tokenizer, 8) for tokenizer in tokenizers]
    assert len(set(keys)) == 3
    assert [store.key(split, tokenizer, 8) for tokenizer in tokenizers] == keys
    tokenizers[0](["the film"], truncation=True, max_length=2)
    assert store.key(split, tokenizers[0], 8) == keys[0]
    tokenizers[0].backend_tokenizer.add_tokens(["film"])
    assert store.key(split, tokenizers[0], 8) == keys[1]


@pytest.fixture
def small_disk(tmpfs: Mount) -> Path:
    """A folder with room for 200 kB."""
    return tmpfs("small", 200)


def test_a_store_without_room_is_an_error_and_nothing_of_it_stays(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_of_each(batch: Any, rows: range) -> dict[str, store.Column]:
        return {"ids": np.ones(2 * len(rows), np.int32), store.LENGTHS: np.full(len(rows), 2)}

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", small_disk)
    split = datasets.Dataset.from_dict({"text": ["word"] * 20_000})

    with pytest.raises(OutputError, match=r"tokens of 20000 rows .* HF_DATASETS_CACHE"):
        store.tokens_of(split, "abc", two_of_each)
    assert list((small_disk / "tokens").iterdir()) == []
    few = store.tokens_of(split.select(range(100)), "abc", two_of_each)
    assert len(few["ids"]) == 200 and few[store.STARTS].tolist() == list(range(0, 201, 2))


@pytest.mark.parametrize("rows", [1_000, 11_000])
def test_rows_without_room_are_an_error_and_leave_no_file(
    rows: int, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at once, or at the file's end."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", small_disk)
    monkeypatch.setattr(spool, "_IN_MEMORY", 1)
    monkeypatch.setattr(spool, "_SPARE", -(1 << 40))
    if rows == 1_000:
        (small_disk / "other").write_bytes(bytes(190_000))

    table = pa.table({"text": ["x" * 10] * rows})
    with pytest.raises(OutputError, match=r"rows of the data .* HF_DATASETS_CACHE"):
        spool.spool_tables(table.schema, [table, table])
    assert list(small_disk.glob("*.rows")) == []
