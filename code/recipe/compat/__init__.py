"""The libraries underneath: how much they say, and what they call things."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, logging

from recipe.console import has_terminal, is_first_process

UNBOUNDED = 1 << 30
"""Tokens that a model reads which says no number."""


def quieten(bars: bool = True) -> None:
    """Only errors from transformers, and its progress bars only where somebody watches them.

    What its warnings tell of a new head, `modeling.load` says in one line.

    Args:
        bars: Whether there may be progress bars at all; a server shows none.
    """
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # The Trainer sets it where several processes train; nobody else can do anything about it.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    if not (bars and has_terminal() and is_first_process()):
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def in_precision(dtype: torch.dtype) -> dict[str, Any]:
    """The argument of from_pretrained for it, by its name in the transformers that is here."""
    major, minor = map(int, transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}


def attend_fully(model: PreTrainedModel) -> bool:
    """Whether the model was one of BigBird's sparse attention, which is left here.

    BigBird leaves it at the first batch that is too short for it (704 tokens), for good: what it
    says of a long text would depend on what came before. Serving begins with a short one.
    """
    config: Any = model.config
    if getattr(config, "attention_type", None) != "block_sparse":
        return False
    base: Any = model.base_model
    base.set_attention_type("original_full")
    config.attention_type = "original_full"
    return True


def positions_of(model: PreTrainedModel) -> int:
    """How many tokens the model has positions for; 2**30 if nothing bounds them (T5, XLNet)."""
    positions: int = getattr(model.config, "max_position_embeddings", None) or UNBOUNDED
    if positions < 1:  # as XLNet says that it has no bound
        positions = UNBOUNDED
    for path, module in model.named_modules():
        # RoBERTa and its kin (CamemBERT, MPNet, Longformer ...) count from behind the padding's.
        if path.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            positions = min(positions, module.num_embeddings - unused)
    return positions
