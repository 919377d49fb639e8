"""Check rows of texts end to end, as serving computes them, on this device."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stage import Failed, Stage, Values, find_minilm, table, wait

import numpy as np  # isort: skip
import torch  # isort: skip
from torch import Tensor  # isort: skip
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from recipe.backend import loaded_model, loading
from recipe.backend.packed_rows import PackedRows
from recipe.backend.padded_rows import pad_rows
from recipe.backend.rows import Reading, TokenRow
from recipe.models import flat_attention
from recipe.models.sources.origin import Origin

_PADDED_TEXTS = 32
"""Texts of a padded call, as in `LoadedModel`."""


def truth(stage: Stage) -> Values:
    """Compare states of rows end to end with padded texts in float32; the error may be twice that
    of padded texts in bfloat16."""
    exact: Any = AutoModel.from_pretrained(find_minilm(stage), dtype=torch.float32)
    exact = exact.to(stage.device).eval()
    model = copy.deepcopy(exact).to(torch.bfloat16)
    longest = int(model.config.max_position_embeddings)
    packed = PackedRows.from_model(model, "AutoModel", frozenset({"token_type_ids"}), {})
    assert packed is not None
    flat_attention.use(model)
    rows_seen = []
    for power in range(6, 9 if stage.smoke else 15):
        for rows in examples(1 << power, longest, model.config):
            expected = states_of_padded(exact, rows, longest)
            with torch.inference_mode():
                states = packed.states(model, rows)
            results = {
                "padded": farthest(states_of_padded(model, rows, longest), expected),
                "end to end": farthest(states, expected),
            }
            rows_seen.append({"tokens": 1 << power, "texts": len(rows), **results})
            if not max(results.values()) <= 2 * results["padded"] + 0.01:
                raise Failed("states are others", row=rows_seen[-1])
    print(table(rows_seen), flush=True)
    return {"rows": rows_seen}


def examples(tokens: int, longest: int, config: Any) -> list[list[TokenRow]]:
    """Return texts for a row of `tokens`, three quarters full as rows are on average: sentences of
    8 to 56 tokens, and texts of all lengths, shorter ones first."""
    random, room = np.random.default_rng(tokens), tokens * 3 // 4
    calls = []
    for least, most in ((8, 56), (1, longest)):
        lengths: list[int] = []
        while (left := room - sum(lengths)) > 0:
            lengths.append(min(left, longest, int(random.integers(least, most + 1))))
        ids = (random.integers(1, config.vocab_size, length) for length in sorted(lengths))
        pad = config.pad_token_id or 0
        # Some models count no position for padding that a text spells.
        other = pad - 1 if pad else 1
        calls.append(
            [TokenRow(np.where(row_ids == pad, other, row_ids).tolist()) for row_ids in ids]
        )
    return calls


@torch.inference_mode()
def states_of_padded(model: PreTrainedModel, rows: Sequence[TokenRow], longest: int) -> Tensor:
    """Return the last hidden states [tokens, hidden] of padded texts, one after the other.

    Args:
        longest: Tokens that the model reads at most.
    """
    pad, parts = int(model.config.pad_token_id or 0), []
    for start in range(0, len(rows), _PADDED_TEXTS):
        some = rows[start : start + _PADDED_TEXTS]
        length = min(longest, -(-max(len(row.ids) for row in some) // 8) * 8)
        hidden = model.base_model(**pad_rows(some, length, pad, model.device)).last_hidden_state
        parts += [row_ids[: len(row.ids)] for row, row_ids in zip(some, hidden, strict=True)]
    return torch.cat(parts)


def farthest(states: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a token's state from the expected one, relative to the mean
    distance of tokens from their mean; infinite if a number is NaN.

    The largest number is no measure: a few of an encoder's states are large for every token.

    Args:
        states: [tokens, hidden].
        expected: [tokens, hidden].
    """
    expected = expected.float()
    spread = (expected - expected.mean(0)).norm(dim=1).mean().clamp_min(1e-6)
    return float(((states.float() - expected).norm(dim=1).max() / spread).nan_to_num(math.inf))


def ahead(stage: Stage, folder: Path) -> Values:
    """Compare the answers and seconds of a long list without a call ahead and with one."""
    origin = Origin.find(str(folder), os.environ)
    loaded = loading.load(origin, AutoModelForSequenceClassification, os.environ)
    random = np.random.default_rng(0)
    lengths = random.integers(2, 64, 200 if stage.smoke else 20_000)
    rows = [TokenRow(random.integers(1000, 20000, length).tolist()) for length in lengths]
    calls_ahead: Any = loaded_model.CALLS_AHEAD
    kind, usual = stage.device.type, dict(calls_ahead)
    seconds: dict[int, list[float]] = {0: [], 1: []}
    answers = {}
    for _ in range(3):
        for count in (0, 1):
            calls_ahead[kind] = count
            began = time.perf_counter()
            answers[count] = torch.stack(loaded.forward(rows, Reading.LABELS))
            seconds[count].append(time.perf_counter() - began)
    calls_ahead.clear()
    calls_ahead.update(usual)
    off = float((answers[1] - answers[0]).abs().max())
    if not off <= 1e-3 * float(answers[0].abs().max()):
        raise Failed("other answers with a call ahead", off=off)
    return {f"seconds, {count} ahead": min(took) for count, took in seconds.items()}


CALLS: Mapping[str, tuple[int, Callable[[np.random.Generator, int], Any]]] = {
    "64 texts of 1 to 128 tokens": (64, lambda random, count: random.integers(1, 129, count)),
    "64 texts of 64 tokens": (64, lambda random, count: np.full(count, 64)),
    **{
        name: (count, lambda random, count: np.clip(random.normal(28, 12, count), 4, 80))
        for name, count in (("64 tweets", 64), ("16 tweets", 16), ("4 tweets", 4), ("1 tweet", 1))
    },
}
"""The texts of a call, and what draws their lengths."""


def packing(stage: Stage, folder: Path) -> Values:
    """Measure milliseconds a text, padded and end to end in rows of several lengths; compare the
    labels."""
    environ = {**os.environ, "AMPHORA_PACKING": "1"}
    origin = Origin.find(str(folder), os.environ)
    loaded = loading.load(origin, AutoModelForSequenceClassification, environ)
    if not isinstance(loaded.layout, PackedRows):
        raise Failed("the model is not packed here")
    models = {"padded": dataclasses.replace(loaded, layout=None)}
    for length in (512, 2048) if stage.smoke else (2048, 8192, 16384):
        layout = dataclasses.replace(loaded.layout, most=length)
        models[f"rows of {length}"] = dataclasses.replace(loaded, layout=layout)
    rows = []
    for name in ["16 tweets", "1 tweet"] if stage.smoke else CALLS:
        size, draw_lengths = CALLS[name]
        random, calls = np.random.default_rng(0), list[list[TokenRow]]()
        tokens, most = (500, 100) if stage.smoke else (100_000, 200)
        while len(calls) < most and sum(len(row.ids) for call in calls for row in call) < tokens:
            lengths = draw_lengths(random, size).astype(int)
            calls.append([TokenRow(random.integers(1000, 20000, n).tolist()) for n in lengths])
        seconds: dict[str, list[float]] = {way: [] for way in models}
        labels: dict[str, Tensor] = {}
        for _ in range(3 if stage.smoke else 6):  # the first round compiles kernels
            for way, model in models.items():
                wait(stage.device)
                began = time.perf_counter()
                logits = [item for call in calls for item in model.forward(call, Reading.LABELS)]
                wait(stage.device)
                seconds[way].append(time.perf_counter() - began)
                labels[way] = torch.stack(logits).argmax(-1)
        count = size * len(calls)
        for way in models:
            changed = int((labels[way] != labels["padded"]).sum())
            if changed > 0.03 * count:
                raise Failed("other labels end to end", way=way, changed=changed, of=count)
            rows.append({
                "a call": name, "by": way, "other labels": f"{changed} of {count}",
                "ms a text": round(min(seconds[way][1:]) * 1000 / count, 4),
            })  # fmt: skip
    print(table(rows), flush=True)
    return {"rows": rows}
