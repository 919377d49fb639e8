"""Every task's tokens come from files, some rows at a time: those of each row alone."""

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from recipe.errors import DataError
from recipe.tasks.masked_lm import tokens as masked_texts
from recipe.tasks.masked_lm.batches import NEVER
from recipe.tasks.masked_lm.spec import Options
from recipe.tasks.question_answering import tokens as windows
from recipe.tasks.text_to_text import tokens as text_pairs
from recipe.tasks.token_classification import tokens as words
from recipe.tokenization import chat, documents, store, texts
from tests.support import causal_kit

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
PROMPTS = rows_of(prompt=text, completion=text)
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
    monkeypatch.setattr(store, "_AT_ONCE", 13)
    monkeypatch.setattr(store, "_BYTES_AT_ONCE", 500)
    return tmp_path / "tokens"


@pytest.mark.parametrize("long_texts", [None, "split", "truncate"])
@pytest.mark.parametrize("kind", ["text", "prompt", "messages", "input_ids"])
def test_documents_are_those_of_each_row(kind: str, long_texts: str | None) -> None:
    splits = {"text": TEXTS, "prompt": PROMPTS, "messages": TALKS,
              "input_ids": IDS.remove_columns("label")}  # fmt: skip
    split, tokenizer = splits[kind], causal_kit.make_tokenizer()
    longest = 60 if kind == "messages" else LONGEST
    actual = documents.tokenise("train", split, tokenizer, longest, long_texts)
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


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("long_texts", [None, "truncate"])
def test_words_to_mask_are_those_of_each_row(
    whole_words: bool, long_texts: str | None, tiny_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    given, truncates = Options(whole_word_masking=whole_words), long_texts == "truncate"
    actual = masked_texts.tokenise("train", TEXTS, tokenizer, LONGEST, given, truncates)
    never = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    expected: list[tuple[list[int], list[int]]] = []
    for row in TEXTS["text"]:
        encoded = tokenizer(row, add_special_tokens=False)
        ids: list[int] = encoded["input_ids"]
        of_tokens = encoded.word_ids() if whole_words else range(len(ids))
        numbers = [None if i in never else word for i, word in zip(ids, of_tokens, strict=True)]
        as_array = np.array([-1 if word is None else word for word in numbers])
        cut = masked_texts.pieces(as_array, LONGEST - 2, long_texts is not None) if ids else ()
        for piece in cut:
            back: list[int] = []
            for before, word in itertools.pairwise([None, *numbers[piece]]):
                goes_on = bool(back) and before == word
                back.append(NEVER if word is None else back[-1] + 1 if goes_on else 0)
            whole = [tokenizer.cls_token_id, *ids[piece], tokenizer.sep_token_id]
            expected.append((whole, [NEVER, *back, NEVER]))
    assert [actual.tokens(index).tolist() for index in range(len(actual))] == [
        ids for ids, _ in expected
    ]
    assert actual.back.tolist() == [number for _, back in expected for number in back]


@pytest.mark.parametrize("case", [
    pytest.param((IDS, lambda split, tokenizer: texts.samples(split, tokenizer, LONGEST)), id="texts"),
    pytest.param((TALKS, lambda split, tokenizer: documents.tokenise(
        "train", split, tokenizer, LONGEST, None)), id="documents"),
    pytest.param((TEXTS, lambda split, tokenizer: masked_texts.tokenise(
        "evaluation", split, tokenizer, LONGEST, Options(), False)), id="masked"),
    pytest.param((TAGGED, lambda split, tokenizer: words.tokenise(
        "train", split, tokenizer, LONGEST, ("O", "B-X", "I-X"), True)), id="words"),
    pytest.param((QUESTIONS, lambda split, tokenizer: windows.tokenise(
        "train", split, tokenizer, LONGEST + 8, 3)), id="windows"),
    pytest.param((PAIRS, lambda split, tokenizer: text_pairs.tokenise(
        "train", split, tokenizer, "do: ", LONGEST, 9)), id="pairs"),
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
    for name, value in (("_AT_ONCE", 10_000), ("_BYTES_AT_ONCE", 1 << 30)):
        monkeypatch.setattr(store, name, value)
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
        ([], "Row 50 "),
    ):
        rows = [[7]] * 50 + [wrong] + [[7]] * 50
        split = datasets.Dataset.from_dict({"input_ids": rows, "label": [0] * 101})
        with pytest.raises(DataError, match=says):
            texts.samples(split, tokenizer, LONGEST)
        with pytest.raises(DataError, match=says):
            documents.tokenise("train", split.remove_columns("label"), tokenizer, LONGEST, None)
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
