"""The libraries underneath: how much they say, and what they call things."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import logging

from recipe.console import has_terminal, is_first_process


def quieten() -> None:
    """Only errors from transformers, and its progress bars only where somebody watches them.

    What its warnings tell of a new head, `modeling.load` says in one line.
    """
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not (has_terminal() and is_first_process()):
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def in_precision(dtype: torch.dtype) -> dict[str, Any]:
    """The argument of from_pretrained for it, by its name in the transformers that is here."""
    major, minor = map(int, transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}
