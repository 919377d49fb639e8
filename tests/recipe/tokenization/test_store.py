"""Tokens that go from the tokenizer into a mapped file: those of the library, row for row."""

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from recipe.data.files import spool
from recipe.errors import DataError, OutputError
from recipe.tokenization import store
from recipe.tokenization import texts as module
from tests.support import causal_kit, serving_kit
from tests.support.mounts import Mount

LETTERS = [*"abc é中\u0301 \n\t,.'", "the ", "film ", "[SEP]", "</s>", "<|im_end|>", "0 ", "🙂"]


def tokenizers(kind: str, tiny_model: Path) -> Any:
    if kind == "bytes":
        return causal_kit.make_tokenizer()
    if kind == "spelling":
        return serving_kit.tokenizer()
    if kind == "in Python":
        return ByT5Tokenizer()
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_AT_ONCE", 40)
    return tmp_path / "tokens"


@pytest.mark.filterwarnings("ignore:This sequence already has")  # ByT5's of texts with </s>
@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("words", False), ("words", True), ("bytes", False), ("spelling", False),
        ("in Python", False), ("left", False), ("left", True), ("whole specials", False),
        ("of its own", False), ("of its own", True),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_library(kind: str, pairs: bool, tiny_model: Path) -> None:
    draw = random.Random(f"{kind} {pairs}")

    def text() -> str:
        return "".join(draw.choices(LETTERS, k=draw.choice([0, 1, 5, 20, 20, 60, 90])))

    columns: dict[str, list[Any]] = {"text": [text() for _ in range(100)]}
    if pairs:
        columns["text_pair"] = [text() for _ in range(100)]
    columns["label"] = [index % 3 for index in range(100)]
    split = datasets.Dataset.from_dict(columns).shuffle(seed=0).select(range(90))
    tokenizer = tokenizers(kind, tiny_model)
    actual = module.samples(split, tokenizer, 12)
    texts = [split[name][:] for name in ("text", "text_pair") if name in columns]
    expected = tokenizers(kind, tiny_model)(*texts, truncation=True, max_length=12)
    rows = range(len(split))
    assert [actual.tokens(row).tolist() for row in rows] == expected["input_ids"]
    assert actual.labels.tolist() == split["label"][:]
    assert (actual.types is not None) == (pairs and "token_type_ids" in expected)
    if actual.types is not None:
        types = [actual.types[actual.span(row)].tolist() for row in rows]
        assert types == expected["token_type_ids"]


def test_a_store_is_whole_and_is_read_again(tiny_model: Path, cache: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    split = datasets.Dataset.from_dict({"text": ["the film", "good"] * 90, "label": [0, 1] * 90})
    first = module.samples(split, tokenizer, 8)
    (kept,) = cache.iterdir()
    assert {path.name for path in kept.iterdir()} == {"contents.json", "input_ids", "starts"}
    written = (kept / "input_ids").stat().st_mtime_ns
    assert module.samples(split, tokenizer, 8).fingerprint() == first.fingerprint()
    assert (kept / "input_ids").stat().st_mtime_ns == written
    assert module.samples(split, tokenizer, 3).fingerprint() != first.fingerprint()
    other = datasets.Dataset.from_dict({"text": ["the film", "bad"] * 90, "label": [0, 1] * 90})
    assert module.samples(other, tokenizer, 8).fingerprint() != first.fingerprint()
    assert len(list(cache.iterdir())) == 3
    (kept / "starts").write_bytes((kept / "starts").read_bytes()[:-8])
    with pytest.raises(DataError, match=f"{kept} are incomplete"):
        module.samples(split, tokenizer, 8)


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


def two_of_each(batch: Any, rows: range) -> dict[str, store.Column]:
    return {"ids": np.ones(2 * len(rows), np.int32), store.LENGTHS: np.full(len(rows), 2)}


@pytest.fixture
def small_disk(tmpfs: Mount) -> Path:
    """A folder with room for 200 kB."""
    return tmpfs("small", 200)


def test_a_store_without_room_is_an_error_and_nothing_of_it_stays(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        spool.spooled(table.schema, [table, table])
    assert list(small_disk.glob("*.rows")) == []
