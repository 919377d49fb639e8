"""Models that a task cannot start from are refused with the reason, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from recipe.errors import ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import loading, masked_models, text_to_text
from tests.support import causal_kit, texts_and_pictures

Load = Callable[[loading.Source, Hyperparameters], Any]


def without(folder: Path, name: str) -> Path:
    """The model without one of its weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def with_more_tokens(folder: Path) -> Path:
    """The model, its tokenizer with 3 tokens that it has no embeddings for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    tokenizer.save_pretrained(folder)
    return folder


def refusal(load: Load, folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load(loading.Source(name=str(folder), is_local=True), Hyperparameters())
    return str(refused.value)


def test_an_encoder_goes_on_with_no_text(tiny_model: Path) -> None:
    assert "is of type bert, an encoder" in refusal(loading.load_causal, tiny_model)


def test_a_decoder_without_its_head(tmp_path: Path) -> None:
    folder = without(causal_kit.make_model("llama", tmp_path / "model"), "lm_head.weight")
    found = refusal(loading.load_causal, folder)
    assert "lacks 1 weights of a causal language model: lm_head.weight." in found


def test_an_encoder_with_a_decoder_without_a_weight(tmp_path: Path) -> None:
    model = texts_and_pictures.make("summarization", tmp_path / "kind").model
    name = next(name for name in load_file(model / "model.safetensors") if "decoder" in name)
    found = refusal(text_to_text.load, without(model, name))
    assert f"lacks 1 weights of an encoder with a decoder: {name}." in found


@pytest.mark.parametrize(
    ("task", "load"), [("masked-lm", masked_models.load), ("summarization", text_to_text.load)]
)
def test_tokens_without_embeddings(tmp_path: Path, task: str, load: Load) -> None:
    model = texts_and_pictures.make(task, tmp_path / "kind").model
    assert " tokens, and the model " in refusal(load, with_more_tokens(model))


def test_tokens_without_embeddings_of_a_decoder(tmp_path: Path) -> None:
    folder = with_more_tokens(causal_kit.make_model("llama", tmp_path / "model"))
    assert " tokens, and the model " in refusal(loading.load_causal, folder)
