"""On a GPU: whether texts share a row or are padded, and which rows graphs compute, by measurement.

Which of them is faster depends on the GPU, the model and the host's own speed. So at start the
model computes the same texts in each way. Their states must agree; then the clock decides. The
outcome is kept in a file for the host's other workers, and for those that replace them: they
record the same graphs without measuring again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from recipe.inference.packed.graphs import LENGTHS, CudaTape, Graphs, Shape, Tape
from recipe.inference.packed.rows import PackedRows
from recipe.inference.rows import TokenRow, padded

SECONDS = 15.0
"""After which nothing more is recorded or measured."""
_ROUNDS, _ROUNDS_SECONDS = 5, 1.5
_PADDED_TEXTS = 32
"""Of a padded call, as in `LoadedModel`."""
_GAIN = 0.95
"""A graph is used if it takes less than this share of the same row's time without it."""
_FARTHEST: Mapping[torch.dtype, float] = {torch.float32: 1e-3}
_FARTHEST_ROUNDED = 0.25
"""How far a token's state may be from what it is padded (`farthest`), in float32 and in types of 16
bits, whose own rounding makes up to a tenth of it."""
_VERSION = 1
"""Of the file."""


def settled(
    model: PreTrainedModel, packed: PackedRows | None, longest: int, environ: Mapping[str, str]
) -> PackedRows | None:
    """How `model` takes texts: as `packed`, with graphs or without; None if they are padded.

    On devices other than CUDA's it is `packed`: on a CPU that was found to be faster (docs/LAB.md).

    Args:
        model: On its device, with the attention that packed rows need.
        packed: How texts share a row, of which it is known that answers are the same; or None.
        longest: Tokens of the longest text.
        environ: AMPHORA_PACKING and AMPHORA_GRAPHS.

    Raises:
        ValueError: AMPHORA_GRAPHS is neither 0 nor 1.
    """
    asked = environ.get("AMPHORA_GRAPHS") or ""
    if asked not in ("", "0", "1"):
        raise ValueError(
            f"AMPHORA_GRAPHS is {asked!r}. Give 1 (CUDA graphs for rows of texts end to end), 0 "
            "(none), or leave it out: then those that are faster."
        )
    if packed is None or model.device.type != "cuda":
        return packed
    return Choice(model, packed, longest, environ, CudaTape(model.device)).make()


class Choice:
    """One model's: what is asked for, and what is found."""

    def __init__(
        self,
        model: PreTrainedModel,
        packed: PackedRows,
        longest: int,
        environ: Mapping[str, str],
        tape: Tape,
    ) -> None:
        self._model, self._packed, self._longest = model, packed, longest
        self._is_packed = environ.get("AMPHORA_PACKING") == "1"
        """Whether it was asked for; no was heeded before."""
        self._graphs_asked = environ.get("AMPHORA_GRAPHS") or ""
        self.took: dict[int, dict[str, float]] = {}
        """Seconds of rows of so many tokens, by way, where they were measured."""
        self._end = time.monotonic() + SECONDS
        self._graphs = Graphs(
            tape, model, lambda numbers, shape: packed.computed(model, numbers, shape)
        )
        name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
        parts = (
            _VERSION, torch.__version__, transformers.__version__, name, str(model.dtype), longest,
            type(model).__name__, model.config.to_json_string(use_diff=False), self._is_packed,
            self._graphs_asked, LENGTHS, SECONDS,
        )  # fmt: skip
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
        self._file = Path(tempfile.gettempdir()) / f"amphora-{os.getuid()}" / f"packing-{key}.json"

    @torch.inference_mode()
    def make(self) -> PackedRows | None:
        """What another worker has found to be faster, or what is measured now; one line of the log
        says which, and why. Texts are padded if the device fails in what is tried."""
        try:
            return self._made()
        except Exception as error:
            self._pad(f"{type(error).__name__}: {str(error)[:200]}")
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()
            return None

    def _made(self) -> PackedRows | None:
        try:
            is_ours = self._file.parent.stat().st_uid == os.getuid()
            known = json.loads(self._file.read_text()) if is_ours else {}
            lengths = known["graphs"]
            wanted = None if lengths is None else [int(tokens) for tokens in lengths]
        except (OSError, ValueError, KeyError, TypeError):
            return self._measured()
        if wanted is None:
            self._pad(f"which another worker has found to be faster ({self._file})")
            return None
        why_not = self._record(wanted)
        for tokens in wanted or LENGTHS[-1:]:
            if fault := self._check(tokens):
                self._pad(f"rows of {tokens} tokens: {fault}")
                return None
        print(
            f"batches: texts end to end, graphs for rows of {_named(self._graphs.lengths)}"
            f"{f' ({why_not})' if why_not else ''}, as another worker has measured ({self._file})",
            flush=True,
        )
        return self._chosen()

    def _measured(self) -> PackedRows | None:
        began = time.monotonic()
        lengths = [tokens for tokens in LENGTHS if tokens <= self._packed.most]
        why_not = "AMPHORA_GRAPHS=0" if self._graphs_asked == "0" else self._record(lengths)
        gains: dict[int, float] = {}
        kept: list[int] = []
        for tokens in sorted(lengths):
            if time.monotonic() > self._end:
                why_not = why_not or f"{SECONDS:g} s are over"
                break
            if fault := self._check(tokens):
                self._pad(f"rows of {tokens} tokens: {fault}")
                return None
            took = self.took[tokens] = self._times(tokens)
            plain, graph = took["end to end"], took.get("graph", math.inf)
            is_kept = graph < _GAIN * plain or (self._graphs_asked == "1" and graph < math.inf)
            if is_kept:
                kept.append(tokens)
            gains[tokens] = took["padded"] / (graph if is_kept else plain)
        self._graphs.keep(kept)
        if not gains:
            gain = 1.0
            why_not = why_not or f"nothing was measured in {SECONDS:g} s"
        else:
            gain = math.exp(sum(map(math.log, gains.values())) / len(gains))
        is_packed = self._is_packed or gain > 1
        if len(gains) == len(lengths):
            self._tell_others(kept if is_packed else None)
        if not is_packed:
            self._pad(f"{1 / gain:.2f} times as fast as end to end", why_not)
            return None
        print(
            f"batches: texts end to end, {gain:.2f} times as fast as padded, graphs for rows of "
            f"{_named(kept)}{f' ({why_not})' if why_not else ''}; rows of {_named([*gains])} were "
            f"measured in {time.monotonic() - began:.1f} s",
            flush=True,
        )
        return self._chosen()

    def _chosen(self) -> PackedRows:
        graphs = self._graphs if self._graphs.lengths else None
        return dataclasses.replace(self._packed, graphs=graphs)

    def _pad(self, *why: str) -> None:
        self._graphs.keep([])
        print(f"batches: texts are padded: {'; '.join(filter(None, why))}", flush=True)

    def _record(self, lengths: Sequence[int]) -> str:
        types = self._packed.takes_types
        shapes = [Shape.of_graph(tokens, self._longest, types) for tokens in lengths]
        return self._graphs.record(shapes, self._model.device, self._end)

    def _check(self, tokens: int) -> str:
        """Why texts are not to share rows of so many tokens; empty if their states are those of
        padded texts. A graph whose states are others is forgotten, which is printed."""
        calls = examples(tokens, self._longest, self._model.config)
        ways = self._ways(tokens)
        most = _FARTHEST.get(self._model.dtype, _FARTHEST_ROUNDED)
        for rows in [*calls, calls[0]]:
            expected = ways["padded"](rows)
            if not farthest(ways["end to end"](rows), expected) <= most:
                return "states are others than those of padded texts"
            if "graph" in ways and not farthest(ways["graph"](rows), expected) <= most:
                print(f"graphs: none for {tokens} tokens: its states are others", flush=True)
                self._graphs.keep([each for each in self._graphs.lengths if each != tokens])
                del ways["graph"]
        return ""

    def _times(self, tokens: int) -> dict[str, float]:
        """Seconds of the calls of so many tokens, by way: the least of some rounds."""
        calls = examples(tokens, self._longest, self._model.config)
        ways = self._ways(tokens)
        took: dict[str, list[float]] = {way: [] for way in ways}
        end = time.perf_counter() + _ROUNDS_SECONDS
        for number in range(_ROUNDS + 1):
            if number > 1 and time.perf_counter() > end:
                break
            for way, states in ways.items():
                began = time.perf_counter()
                for rows in calls:
                    states(rows)
                    if self._model.device.type == "cuda":
                        torch.cuda.synchronize(self._model.device)
                took[way].append(time.perf_counter() - began)
        return {way: min(seconds[1:]) for way, seconds in took.items()}

    def _ways(self, tokens: int) -> dict[str, Callable[[Sequence[TokenRow]], Tensor]]:
        """The states [tokens, hidden] of texts, one after the other, in each way."""
        model, packed = self._model, self._packed
        ways: dict[str, Callable[[Sequence[TokenRow]], Tensor]] = {
            "padded": lambda rows: states_of_padded(model, rows, self._longest),
            "end to end": lambda rows: packed.states(model, rows)[0],
        }
        if tokens in self._graphs.lengths:
            by_graph = dataclasses.replace(packed, graphs=self._graphs)
            ways["graph"] = lambda rows: by_graph.states(model, rows)[0]
        return ways

    def _tell_others(self, lengths: list[int] | None) -> None:
        """Write which graphs are kept, None for padding; who cannot read it measures again."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, exist_ok=True)
            part = self._file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"graphs": lengths}))
            part.replace(self._file)


def examples(tokens: int, longest: int, config: Any) -> list[list[TokenRow]]:
    """Texts for a row of so many tokens, three quarters full as rows are on average: sentences of 8
    to 56 tokens, and texts of all lengths, shorter ones first."""
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
        calls.append([TokenRow(np.where(own == pad, other, own).tolist()) for own in ids])
    return calls


@torch.inference_mode()
def states_of_padded(model: PreTrainedModel, rows: Sequence[TokenRow], longest: int) -> Tensor:
    """The last hidden states [tokens, hidden] of texts that are padded, one after the other.

    Args:
        longest: Tokens that the model reads at most.
    """
    pad, parts = int(model.config.pad_token_id or 0), []
    for start in range(0, len(rows), _PADDED_TEXTS):
        some = rows[start : start + _PADDED_TEXTS]
        length = min(longest, -(-max(len(row.ids) for row in some) // 8) * 8)
        hidden = model.base_model(**padded(some, length, pad, model.device)).last_hidden_state
        parts += [own[: len(row.ids)] for row, own in zip(some, hidden, strict=True)]
    return torch.cat(parts)


def farthest(states: Tensor, expected: Tensor) -> float:
    """How far the token that is farthest off is from its expected state, in terms of how far tokens
    are from their mean on average; infinite if something is no number.

    A share of the largest number would say little: a few numbers of an encoder's states are large
    for every token.

    Args:
        states: [tokens, hidden].
        expected: Alike.
    """
    expected = expected.float()
    spread = (expected - expected.mean(0)).norm(dim=1).mean().clamp_min(1e-6)
    return float(((states.float() - expected).norm(dim=1).max() / spread).nan_to_num(math.inf))


def _named(lengths: Sequence[int]) -> str:
    if not lengths:
        return "no length"
    return f"{min(lengths):,} to {max(lengths):,} tokens"
