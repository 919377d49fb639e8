"""Compares the states of a converted encoder with those of PyTorch's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from recipe.backend.engines import ctranslate, int8
from recipe.backend.rows import TokenRow
from recipe.compat import positions_of
from recipe.data.column_names import TYPE_IDS

_REMEDY = "Leave quantize out."
_LONGEST, _LONGEST_BEYOND = 4096, 1024
"""Tokens of the longest text that is compared, and of one that only a request may ask for."""
_TOLERANCE = 1e-3
"""The difference of states that rounding may cause, as a share of their length."""


def check(model: Any, tokenizer: Any, longest: int) -> None:
    """Check, in a fork, that CTranslate2 computes the encoder of a model as PyTorch does, by texts
    of random tokens up to `longest`. Raise ModelError if it does not."""
    inputs = ctranslate.inputs_of(model, tokenizer)
    if why_not := ctranslate.why_unknown(model.config):
        raise int8.failed(why_not, _REMEDY)
    config, random = model.config, np.random.default_rng(0)
    # A request may set another max_length: windows of attention show beyond their width.
    most = min(max(longest, min(positions_of(model), _LONGEST_BEYOND)), _LONGEST)
    has_types = TYPE_IDS in inputs and getattr(config, "type_vocab_size", 2) > 1
    rows = []
    for length in (2, 17, most // 3, most):
        drawn = random.integers(1, config.vocab_size, max(1, min(length, most)))
        # A text holds no padding: some models count no position for it.
        pad = int(config.pad_token_id or 0)
        ids = np.where(drawn == pad, pad - 1 if pad else 1, drawn).tolist()
        rows.append(TokenRow(ids))
        if has_types:
            rows.append(TokenRow(ids, sorted(random.integers(0, 2, len(ids)).tolist())))

    def compare() -> str:
        with int8.quiet(), tempfile.TemporaryDirectory(prefix="int8-") as folder:
            exact = model.base_model.eval()
            names = ctranslate.convert(exact, Path(folder) / "encoder")
            forward = ctranslate.Forward(Path(folder) / "encoder", names, "float32")
            states = (int8.states_of(encoder, rows, inputs) for encoder in (forward, exact))
            difference = int8.distance(*states)
        if difference <= _TOLERANCE:
            return ""
        return (
            f"its states of texts of up to {most} tokens differ from PyTorch's by {difference:.3g}"
        )

    if why_not := int8.run_forked(compare, _REMEDY):
        raise int8.failed(why_not, _REMEDY)
