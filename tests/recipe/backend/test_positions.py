"""How many tokens a model reads, against the model itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CamembertConfig,
    CamembertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    XLNetConfig,
    XLNetModel,
)

from recipe.compat import UNBOUNDED, positions_of
from recipe.errors import HyperparameterError
from recipe.models.pretrained import longest_input

SIZE = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 12}  # fmt: skip


def tokenizer(longest: int) -> Any:
    return SimpleNamespace(model_max_length=longest)


@pytest.mark.parametrize(
    ("model", "config", "padding"),
    [
        *((BertModel, BertConfig, padding) for padding in (0, 1, 3)),
        *((RobertaModel, RobertaConfig, padding) for padding in (0, 1, 3)),
        (CamembertModel, CamembertConfig, 1),
        (MPNetModel, MPNetConfig, 1),
    ],
)
def test_the_longest_text_is_read_and_a_longer_one_is_not(
    model: type, config: type, padding: int
) -> None:
    made = model(config(**SIZE, pad_token_id=padding)).eval()
    most = positions_of(made)
    assert most == (12 if model is BertModel else 12 - padding - 1)
    # A tokenizer that was saved without a limit of its own says 1e30.
    assert longest_input(made, tokenizer(10**30), None) == most
    with torch.inference_mode():
        made(input_ids=torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError)):
            made(input_ids=torch.full((1, most + 1), 5))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (XLNetModel, XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8)),
        (T5EncoderModel, T5Config(vocab_size=20, d_model=8, d_kv=4, num_layers=1, num_heads=2)),
    ],
)
def test_models_without_positions_read_what_the_tokenizer_lets_through(
    model: type, config: Any
) -> None:
    made = model(config).eval()
    assert positions_of(made) == UNBOUNDED
    assert longest_input(made, tokenizer(10**30), None) == 512
    assert longest_input(made, tokenizer(10**30), 700) == 700
    with pytest.raises(HyperparameterError, match="the model takes 600 tokens"):
        longest_input(made, tokenizer(600), 700)
    with torch.inference_mode():
        assert made(input_ids=torch.full((1, 700), 5))[0].shape == (1, 700, 8)
