"""Models that a task cannot start from are refused with the reason, before anything is trained."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    BigBirdConfig,
    BigBirdForSequenceClassification,
)

from recipe.errors import HyperparameterError, ModelError
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


@pytest.mark.parametrize("kind", ["deberta", "xmod", "bert"])
def test_what_autocast_does_not_compute_is_refused(kind: str) -> None:
    config: Any = CONFIG_MAPPING[kind]
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"languages": ["en_XX"], "default_language": "en_XX"} if kind == "xmod" else {}
    if kind == "deberta":
        more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    auto: Any = AutoModelForSequenceClassification
    model = auto.from_config(config(vocab_size=20, intermediate_size=16, **size, **more))
    loading.check_precision(model, bf16=False, fp16=False)
    fails = contextlib.nullcontext() if kind == "bert" else pytest.raises(RuntimeError)
    with torch.autocast("cpu", dtype=torch.bfloat16), fails:  # as the model's own code has it
        model(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[1, 1, 1]]))
    if kind == "bert":
        loading.check_precision(model, bf16=True, fp16=False)
        return
    for name in ("bf16", "fp16"):
        with pytest.raises(HyperparameterError, match=f"Give {name}=False"):
            loading.check_precision(model, bf16=name == "bf16", fp16=name == "fp16")


def test_a_long_text_is_answered_alike_whatever_came_before(
    tmp_path: Path, tiny_model: Path
) -> None:
    """BigBird ends its sparse attention at the first short batch."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BigBirdConfig(vocab_size=20, intermediate_size=16, block_size=4, num_random_blocks=1,
                           **size)  # fmt: skip
    torch.manual_seed(0)
    made = BigBirdForSequenceClassification(config)
    with torch.no_grad():
        for weights in made.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.7)
    made.save_pretrained(folder)
    source = loading.Source(name=str(folder), is_local=True)
    auto: Any = AutoModelForSequenceClassification
    model: Any = loading.read(auto, source, Hyperparameters())[0].eval()
    plain: Any = auto.from_pretrained(folder).eval()
    long, short = (torch.arange(length)[None] * 7 % 15 + 5 for length in (64, 8))
    with torch.inference_mode():
        before, sparse = model(input_ids=long).logits, plain(input_ids=long).logits
        assert not torch.allclose(before, sparse, atol=1e-3)
        model(input_ids=short)
        plain(input_ids=short)
        assert torch.equal(model(input_ids=long).logits, before)
        torch.testing.assert_close(plain(input_ids=long).logits, before)
    assert model.config.attention_type == "original_full"
