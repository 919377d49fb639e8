"""What a trained model says where documents of the evaluation data go on: for people to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recipe.batching.document_batches import Documents
from recipe.compat import positions_of
from recipe.reports.section import TEXT, Section

_SHOWN = 4
_PROMPT = 24
_NEW = 40


@dataclass(frozen=True)
class Continuation:
    """How a document goes on after a prompt."""

    prompt: str
    said: str
    """By the model, always choosing the likeliest token."""
    true: str


def continuations(
    model: Any, tokenizer: PreTrainedTokenizerBase, documents: Documents
) -> list[Continuation]:
    """Of some documents: their prompt, or their beginning, and what follows it.

    Args:
        model: It is put into evaluation mode.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.eval()
    count = len(documents.starts) - 1  # of this host
    rows = documents.first + np.linspace(0, count - 1, min(_SHOWN, count)).astype(int)
    return [_continuation(inner, tokenizer, documents, row) for row in rows.tolist()]


def section(model: Any, tokenizer: PreTrainedTokenizerBase, documents: Documents) -> Section:
    """`continuations` as a section of a report."""
    shown = continuations(model, tokenizer, documents)
    return Section(
        title="How the model goes on, evaluation data",
        columns=[("prompt", TEXT), ("the model", TEXT), ("the data", TEXT)],
        rows=[(example.prompt, example.said, example.true) for example in shown],
    )


@torch.inference_mode()
def _continuation(
    model: Any, tokenizer: PreTrainedTokenizerBase, documents: Documents, row: int
) -> Continuation:
    ids = documents.tokens(row).astype(np.int64)
    first = int(documents.successors(row)[0][0]) + 1
    start = first if first > 1 else max(1, min(_PROMPT, len(ids) // 2))
    prompt = torch.from_numpy(ids[:start])[None].to(model.device)
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max(1, min(_NEW, positions_of(model) - start)),
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Continuation(
        prompt=_text(tokenizer, ids[:start]),
        said=_text(tokenizer, output[0, start:].cpu().numpy()),
        true=_text(tokenizer, ids[start : start + _NEW]),
    )


def _text(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(ids.tolist()))
