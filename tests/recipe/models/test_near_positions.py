"""DeBERTa answers and learns over near relative positions what it does over all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from recipe.models.sources.near_positions import NearPositionAttention
from recipe.models.sources.origin import Origin

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "relative_attention": True, "vocab_size": 50, "max_position_embeddings": 64,
    "norm_rel_ebd": "layer_norm",
}  # fmt: skip
KINDS = {
    "v3": {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_buckets": 16},
    "without buckets": {"pos_att_type": ["p2c", "c2p"]},
    "one direction": {"pos_att_type": ["c2p"], "position_buckets": 16},
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_all_positions(tmp_path: Path, kind: str) -> None:
    """Texts are shorter and longer than half of the span, where buckets begin."""
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**SIZES, **KINDS[kind])
    transformers.DebertaV2Model(config).save_pretrained(tmp_path)
    model, _ = Origin(str(tmp_path)).read(transformers.AutoModel, torch.float64)
    attentions = [m for m in model.modules() if isinstance(m, DisentangledSelfAttention)]
    assert {type(attention) for attention in attentions} == {NearPositionAttention}
    lengths = {"short": 5, "half": 8, "buckets": 9, "long": 40}
    seen: dict[str, Any] = {name: [] for name in lengths}
    projected: list[int] = []
    name = "key_proj" if "share_att_key" in KINDS[kind] else "pos_key_proj"
    getattr(attentions[0], name).register_forward_hook(
        lambda module, inputs, output: projected.append(output.shape[1])
    )
    for attention_class in (NearPositionAttention, DisentangledSelfAttention):
        for attention in attentions:
            attention.__class__ = attention_class
        for length, values in lengths.items():
            model.zero_grad()
            ids = torch.arange(2 * values).reshape(2, values) % 50
            states = model(input_ids=ids).last_hidden_state
            (states * torch.arange(16)).sum().backward()
            gradients = [w.grad.clone() for w in model.parameters() if w.grad is not None]
            seen[length].append([states.detach(), *gradients])
    for near, whole in seen.values():
        torch.testing.assert_close(near, whole)
    positions = [count for count in projected if count not in lengths.values()]
    span = 16 if "position_buckets" in KINDS[kind] else 64
    assert positions[0] == 10 and positions[-1] == 2 * span
