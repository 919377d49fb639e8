"""Hide differences between versions of transformers, and silence its warnings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, logging

UNBOUNDED = 1 << 30
"""Positions of a model whose configuration has no limit."""


def quieten() -> None:
    """Let transformers log errors only, without progress bars.

    `pretrained.load_head` logs a new head, which the warnings would report, in one line.
    """
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # The Trainer sets it if several processes train; users cannot change that.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def dtype_argument(dtype: torch.dtype) -> dict[str, Any]:
    """Return the argument of from_pretrained for `dtype`, by its name in this transformers."""
    major, minor = map(int, transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}


def attend_fully(model: PreTrainedModel) -> bool:
    """Replace BigBird's sparse attention by full attention, and return whether it was in use.

    BigBird itself switches for good at the first batch below 704 tokens. Its output for a long text
    would depend on earlier batches, and serving begins with a short one.
    """
    config: Any = model.config
    if getattr(config, "attention_type", None) != "block_sparse":
        return False
    base: Any = model.base_model
    base.set_attention_type("original_full")
    config.attention_type = "original_full"
    return True


def positions_of(model: PreTrainedModel) -> int:
    """Return the number of the model's positions; UNBOUNDED if it has no limit (T5, XLNet)."""
    positions: int = getattr(model.config, "max_position_embeddings", None) or UNBOUNDED
    if positions < 1:  # XLNet: no limit
        positions = UNBOUNDED
    for path, module in model.named_modules():
        # In RoBERTa and related models (CamemBERT, MPNet, Longformer ...), positions start after
        # the padding index.
        if path.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            positions = min(positions, module.num_embeddings - unused)
    return positions
