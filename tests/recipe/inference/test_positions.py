"""How many tokens a model reads, against the model itself."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from recipe.inference.weights import positions_of

SIZE = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 12}  # fmt: skip


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize(
    ("model", "config"), [(BertModel, BertConfig), (RobertaModel, RobertaConfig)]
)
def test_the_longest_text_is_read_and_a_longer_one_is_not(
    model: type, config: type, padding: int
) -> None:
    made = model(config(**SIZE, pad_token_id=padding)).eval()
    most = positions_of(made)
    assert most == (12 if model is BertModel else 12 - padding - 1)
    with torch.inference_mode():
        made(input_ids=torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError)):
            made(input_ids=torch.full((1, most + 1), 5))
