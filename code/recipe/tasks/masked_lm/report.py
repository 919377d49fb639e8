"""Show how a trained model fills masks in texts of the evaluation data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recipe.models import lora
from recipe.reports.section import TEXT, Section
from recipe.tasks.masked_lm.batches import MaskedTexts

_SHOWN = 6


@torch.inference_mode()
def section(model: Any, tokenizer: PreTrainedTokenizerBase, texts: MaskedTexts) -> Section:
    """Return some texts with their masks, the likeliest token for each mask, and the original
    token.

    Args:
        model: It is put into evaluation mode.
    """
    inner = lora.bare(model)
    inner.eval()
    masked = np.flatnonzero(texts.labels)
    chosen = masked[np.linspace(0, len(masked) - 1, min(_SHOWN, len(masked))).astype(int)]
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
    ends = {getattr(tokenizer, name, None) for name in names}
    rows = []
    for row in chosen.tolist():
        source = np.arange(texts.starts[row], texts.starts[row + 1])
        indices, _ = texts.masked(source)
        ids = texts.tokens(row).astype(np.int64)
        true = ids[indices]
        ids[indices] = texts.masking.mask_id
        masked_ids = torch.from_numpy(ids)[None].to(inner.device)
        logits = inner(input_ids=masked_ids, attention_mask=torch.ones_like(masked_ids)).logits[0]
        predicted = logits[torch.from_numpy(indices).to(inner.device)].argmax(-1).tolist()
        shown = tokenizer.decode([token for token in ids.tolist() if token not in ends])
        rows.append((str(shown), _listed(tokenizer, predicted), _listed(tokenizer, true.tolist())))
    return Section(
        title="Predicted tokens, evaluation data",
        columns=[("text", TEXT), ("the model", TEXT), ("the data", TEXT)],
        rows=rows,
    )


def _listed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return ", ".join(str(tokenizer.decode([token])).strip() for token in ids)
