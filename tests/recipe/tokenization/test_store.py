"""Tokens that go from the tokenizer into a mapped file: those of the library, row for row."""

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from recipe.batching.samples import Samples
from recipe.errors import DataError
from recipe.tokenization import store
from recipe.tokenization import texts as module
from tests.support import causal_kit, serving_kit

LETTERS = [*"abc é中\u0301 \n\t,.'", "the ", "film ", "[SEP]", "</s>", "<|im_end|>", "0 ", "🙂"]


def tokenizers(kind: str, tiny_model: Path) -> Any:
    if kind == "bytes":
        return causal_kit.make_tokenizer()
    if kind == "spelling":
        return serving_kit.tokenizer()
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


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    "kind", ["words", "bytes", "spelling", "left", "whole specials", "of its own"]
)
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
    expected = Samples.from_dataset(module.tokenise(split, tokenizers(kind, tiny_model), 12))
    for name in ("token_ids", "starts", "labels", "types"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype and np.array_equal(one, other), name
    assert actual.fingerprint() == expected.fingerprint()
    assert actual.lengths.max() <= 12


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
