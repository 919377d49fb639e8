"""Show how a trained model continues documents of the evaluation data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recipe.batching.document_batches import Documents
from recipe.compat import positions_of
from recipe.reports.section import Section

_SHOWN = 4
_PROMPT = 24
_NEW = 40


def section(model: Any, tokenizer: PreTrainedTokenizerBase, documents: Documents) -> Section:
    """Return some prompts, or beginnings of documents, with their continuations: the likeliest
    tokens by the model, and those of the data.

    Args:
        model: It is put into evaluation mode.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.eval()
    count = len(documents.starts) - 1  # of this host
    rows = documents.first + np.linspace(0, count - 1, min(_SHOWN, count)).astype(int)
    shown = []
    for row in rows.tolist():
        ids = documents.tokens(row).astype(np.int64)
        first = int(documents.successors(row)[0][0]) + 1
        start = first if first > 1 else max(1, min(_PROMPT, len(ids) // 2))
        prompt = torch.from_numpy(ids[:start])[None].to(inner.device)
        with torch.inference_mode():
            output = inner.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max(1, min(_NEW, positions_of(inner) - start)),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        generated = output[0, start:].cpu().numpy()
        parts = (ids[:start], generated, ids[start : start + _NEW])
        shown.append([str(tokenizer.decode(part.tolist())) for part in parts])
    return Section(
        title="Generated text, evaluation data",
        columns=("prompt", "the model", "the data"),
        rows=shown,
    )
