"""Compares the states of a converted encoder with those of PyTorch's."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe.backend.engines import ctranslate, int8
from recipe.backend.padded_rows import pad_rows
from recipe.backend.rows import TokenRow, are_close, tolerance_of
from recipe.compat import positions_of
from recipe.data.column_names import TYPE_IDS

_REMEDY = "Leave quantize out."
_LONGEST, _LONGEST_BEYOND = 4096, 1024
"""Tokens of the longest text that is compared, and of one that only a request may ask for."""


def check(model: Any, tokenizer: Any, longest: int) -> None:
    """Check, in a fork, that CTranslate2 computes the encoder of a model as PyTorch does. Raise
    ModelError if it does not."""
    inputs = ctranslate.inputs_of(model, tokenizer)
    if why_not := ctranslate.why_unknown(model.config):
        raise int8.failed(why_not, _REMEDY)

    def compare() -> str:
        with int8.quiet(), tempfile.TemporaryDirectory(prefix="int8-") as folder:
            exact = model.base_model.eval()
            names = ctranslate.convert(exact, Path(folder) / "encoder")
            forward = ctranslate.Forward(Path(folder) / "encoder", names, "float32")
            # A request may set another max_length: windows of attention show beyond their width.
            most = max(longest, min(positions_of(model), _LONGEST_BEYOND))
            return fault(exact, forward, names, inputs, most)

    if why_not := int8.run_forked(compare, _REMEDY):
        raise int8.failed(why_not, _REMEDY)


@torch.no_grad()
def fault(
    exact: Any, forward: Any, names: Sequence[str], inputs: Sequence[str], longest: int
) -> str:
    """Compare a converted encoder, `forward`, on batches of random tokens with PyTorch, which
    computes each text alone. Return how the states differ; "" if they are close.

    Args:
        exact: The encoder. Both compute in float32, and take `inputs`.
        names: The outputs of the converted one.
        longest: The most tokens that the model reads.
    """
    config, random = exact.config, np.random.default_rng(0)
    pad, most = int(config.pad_token_id or 0), min(longest, _LONGEST)

    def batch_of(rows: Sequence[TokenRow], length: int) -> dict[str, Tensor]:
        batch = pad_rows(rows, length, pad, exact.device)
        return {name: batch[name] for name in inputs if name in batch}

    # Single texts and batches, with and without the types of pairs.
    shapes = (2,), (17,), (9, 30, 5), (40, 3, 40, 21, 12, 2, 33), (most // 3, most), (most,)
    has_types = TYPE_IDS in inputs and getattr(config, "type_vocab_size", 2) > 1
    for lengths, is_typed in itertools.product(shapes, {False, has_types}):
        rows = []
        for length in lengths:
            drawn = random.integers(1, config.vocab_size, max(1, min(length, longest)))
            # A text holds no padding: some models count no position for it.
            ids = np.where(drawn == pad, pad - 1 if pad else 1, drawn).tolist()
            types = sorted(random.integers(0, 2, len(ids)).tolist()) if is_typed else None
            rows.append(TokenRow(ids, types))
        # The other texts of a batch must not change the answer.
        alone = [
            _values(exact(**batch_of([row], len(row.ids))), names, [row])  # each output of a row
            for row in rows
        ]
        expected = [values[index] for index in range(len(names)) for values in alone]
        batch = batch_of(rows, max(len(row.ids) for row in rows))
        values = _values(forward(**batch), names, rows)
        tolerance = tolerance_of(expected, torch.float32)
        if not are_close(values, expected, tolerance):
            pairs = zip(values, expected, strict=True)
            far = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
            return (
                f"its states of {len(rows)} texts of up to {batch['input_ids'].shape[1]} "
                f"tokens differ from PyTorch's by {far:.3g}, where {tolerance:.3g} would be "
                "rounding"
            )
    return ""


def _values(output: Any, names: Sequence[str], rows: Sequence[TokenRow]) -> list[Tensor]:
    """Return what is read of an output, in float32, without the values of padding."""
    values = []
    for name in names:
        for one, row in zip(output[name].float(), rows, strict=True):
            values.append(one[: len(row.ids)] if name == "last_hidden_state" else one)
    return values
