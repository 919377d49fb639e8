"""DeBERTa's attention over the relative positions that its texts have, in place of all 512.

transformers projects the embeddings of all relative positions in each layer of each call, which
costs more than a text of 100 tokens. No pair of tokens has the positions that are left out, so the
outputs and gradients are the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention


class NearPositionAttention(DisentangledSelfAttention):  # type: ignore[misc]
    """The self-attention of DeBERTa-v2 and v3, over near relative positions."""

    pos_ebd_size: int

    def disentangled_attention_bias(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        relative_pos: Any,
        embeddings: Tensor,
        *scale: Any,
    ) -> Tensor:
        """Return the scores [texts x heads, tokens, tokens] of relative positions.

        Args:
            query_layer: Queries [texts x heads, tokens, features of a head], like the keys.
            embeddings: Embeddings [2 x span, features] of the positions from -span to span - 1.
        """
        span, length = self.pos_ebd_size, key_layer.shape[1]
        # Beyond half of the span, a position may stand for several distances.
        self.pos_ebd_size = near = length if 2 * length <= span else span
        try:
            scores: Tensor = super().disentangled_attention_bias(
                query_layer, key_layer, relative_pos, embeddings[span - near : span + near], *scale
            )
        finally:
            self.pos_ebd_size = span
        return scores


def attend_near_positions(model: PreTrainedModel) -> None:
    """Let the layers of a model leave out relative positions that no tokens have."""
    for module in model.modules():
        if type(module) is DisentangledSelfAttention:
            module.__class__ = NearPositionAttention
