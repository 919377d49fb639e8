"""A model on a device that compiles a program for each shape: all are compiled before it answers.

A request's texts are padded into one of a few shapes (`buckets`). Nothing whose shape depends on
the texts is computed on the device: what is wanted of each text is cut out on the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.data.column_names import TYPE_IDS
from recipe.errors import ModelError
from recipe.inference import turns
from recipe.inference.rows import (
    Reading,
    TokenRow,
    of_padded,
    of_tokens,
    padded,
    tolerance_of,
)
from recipe.inference.saved.origin import Origin
from recipe.inference.static.buckets import NAME, Bucket, Buckets
from recipe.runtime import xla

DEVICES = frozenset({"xla", "neuron"})
"""Those that compile a program for each shape."""
IDS, MASK, PLACES, POOLED = "input_ids", "attention_mask", "places", "pooled"
_REMEDY = (
    "Serve it on a CPU or GPU image; USE_TORCH_XLA=0 computes on this host's CPU; or bring an "
    "inference.py whose model_fn and predict_fn use the device's own libraries."
)
BACKEND = "neuron"
"""What torch.compile calls TorchNeuron's compiler."""
_KEPT = 8
"""Tokens of a row whose values a call gives, where few are wanted: a row with more is called
again."""
ATTENTION = {"attn_implementation": "eager"}
Batch = Mapping[str, Tensor]
Given = ParamSpec("Given")
Computed = TypeVar("Computed")


@dataclass(frozen=True)
class Layout:
    """What a program is given, and what of it is one row's."""

    pad: int
    """The id of what fills a row up."""
    has_types: bool
    """Whether it is given `token_type_ids`."""
    per_token: bool = False
    """Whether it gives values of each token."""
    picks: bool = False
    """Whether it gives values of `_KEPT` tokens of each row, whose `places` it is given."""
    pools: bool = False
    """Whether it is given a mask of the tokens that a row keeps."""


class Programs:
    """What computes rows of tokens, in calls of few shapes."""

    def __init__(
        self, compute: Callable[[Batch], Tensor], layout: Layout, buckets: Buckets, kind: str
    ) -> None:
        """
        Args:
            compute: A tensor whose first dimension is the rows', on the device, by operations that
                do not depend on the numbers in it.
            layout: What it is given: int64 tensors [rows, tokens], and `places` [rows, 8].
            buckets: The shapes.
            kind: The device's.
        """
        self._compute = compute
        self._layout = layout
        self._buckets = buckets
        self._device = torch.device(kind)
        # What a thread has written for torch-xla, and not computed, would be of another's program.
        self._lock = threading.Lock()

    @property
    def is_per_token(self) -> bool:
        """Whether `values` are of each token."""
        return self._layout.per_token

    def values(self, rows: Sequence[TokenRow]) -> list[Tensor]:
        """What is wanted of each row, in float32 on the CPU.

        Raises:
            BadRequest: A row is longer than every bucket.
        """
        parts, owners = list(rows), list(range(len(rows)))
        if self._layout.picks:
            pairs = [(part, place) for place, row in enumerate(rows) for part in _parts(row)]
            parts, owners = [part for part, _ in pairs], [place for _, place in pairs]
        results: list[Tensor] = [torch.empty(0)] * len(parts)
        for bucket, places in self._buckets.cuts([len(part.ids) for part in parts]):
            together = [parts[place] for place in places]
            for place, own in zip(places, self._call(bucket, together), strict=True):
                results[place] = own
            turns.pause()
        if not self._layout.picks:
            return results
        return [
            torch.cat([own for own, owner in zip(results, owners, strict=True) if owner == place])
            for place in range(len(rows))
        ]

    @torch.no_grad()
    def _call(self, bucket: Bucket, rows: Sequence[TokenRow]) -> Iterator[Tensor]:
        """The values of at most `bucket.rows` rows, which the last one fills up."""
        filled = [*rows, *[rows[-1]] * (bucket.rows - len(rows))]
        batch = padded(filled, bucket.length, self._layout.pad, torch.device("cpu"))
        if not self._layout.has_types:
            batch.pop(TYPE_IDS, None)
        elif TYPE_IDS not in batch:
            batch[TYPE_IDS] = torch.zeros_like(batch[IDS])
        if self._layout.picks:
            batch[PLACES] = torch.zeros((bucket.rows, _KEPT), dtype=torch.long)
        if self._layout.pools:
            batch[POOLED] = batch[MASK].clone()
        for place, row in enumerate(filled):
            if row.keep is not None and self._layout.picks:
                batch[PLACES][place, : len(row.keep)] = torch.tensor(row.keep, dtype=torch.long)
            elif row.keep is not None and self._layout.pools:
                batch[POOLED][place] = 0
                batch[POOLED][place, row.keep] = 1
        with self._lock:
            on_device = {name: tensor.to(self._device) for name, tensor in batch.items()}
            # The whole of it: a part would be a program for each number of texts.
            whole = self._compute(on_device).float().cpu()
        return (self._of(row, own) for row, own in zip(rows, whole, strict=False))

    def _of(self, row: TokenRow, own: Tensor) -> Tensor:
        if self._layout.picks:
            return own[: len(row.keep or ())]
        return own[: len(row.ids)] if self._layout.per_token else own

    def prepare(
        self,
        longest: TokenRow,
        short: TokenRow,
        expected: Callable[[TokenRow], Tensor],
        dtype: torch.dtype,
    ) -> Callable[[], None]:
        """What compiles every program, once the model is on the device, and holds its answers to
        those of the CPU.

        Args:
            longest: A text of as many tokens as the longest bucket, if they can be had.
            short: Another one.
            expected: A row's values. The model is still on the CPU.
            dtype: What it computes in.

        Returns:
            A function that raises ModelError if an answer is another than on the CPU, or if other
            texts of the same shape would be another program.
        """
        texts = {
            length: [_cut(longest, length), _cut(short, length)]
            for length in {shape.length for shape in self._buckets.shapes}
        }
        answers = {length: [expected(row) for row in rows] for length, rows in texts.items()}
        return partial(self._compile, texts, answers, dtype)

    def _compile(
        self,
        texts: Mapping[int, Sequence[TokenRow]],
        answers: Mapping[int, Sequence[Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """Call each program twice.

        Args:
            texts: For each length, as long a text and a short one.
            answers: What the CPU answers.
            dtype: What it computes in.
        """
        count, kind = len(self._buckets.shapes), self._device.type
        began, (_, looks) = time.monotonic(), xla.work()
        print(f"programs: {count} for {kind}, {NAME}={self._buckets} (texts x tokens)", flush=True)
        for number, bucket in enumerate(self._buckets.shapes, 1):
            rows, wanted = texts[bucket.length], answers[bucket.length]
            start = time.monotonic()
            farthest = self._differ(bucket, rows[: bucket.rows], wanted)
            first, work = time.monotonic() - start, xla.work()
            start = time.monotonic()
            again = self._differ(bucket, rows[1:], wanted[1:])
            seconds = time.monotonic() - start
            if xla.work() != work or work[1] != looks:
                raise refused(
                    kind,
                    "its code looks at numbers on the device, so that other texts of the same "
                    "shape may be another program to compile",
                )
            tolerance = tolerance_of(wanted, dtype)
            if not (farthest <= tolerance and again <= tolerance):
                raise refused(
                    kind,
                    f"in {dtype} its answers for {bucket} (texts x tokens) differ from the CPU's "
                    f"by {farthest:.3g} and {again:.3g}, where {tolerance:.3g} would be rounding",
                )
            print(
                f"program {number} of {count}: {bucket}, ready after {first:.1f} s, "
                f"{1000 * seconds:.0f} ms a call, within {max(farthest, again):.1g} of the CPU",
                flush=True,
            )
        print(f"programs: all are ready after {time.monotonic() - began:.0f} s", flush=True)

    def _differ(
        self, bucket: Bucket, rows: Sequence[TokenRow], expected: Sequence[Tensor]
    ) -> float:
        """By how much a bucket's values of rows differ from what is expected; NaN if some are no
        numbers."""
        parts = [next(_parts(row)) for row in rows] if self._layout.picks else rows
        pairs = zip(self._call(bucket, parts), expected, strict=False)
        return float(
            torch.stack([(own - each[: len(own)]).abs().max() for own, each in pairs]).max()
        )


def _parts(row: TokenRow) -> Iterator[TokenRow]:
    """A row as often as it keeps `_KEPT` tokens, each time with the next of them."""
    keep = list(range(len(row.ids))) if row.keep is None else row.keep
    for start in range(0, max(1, len(keep)), _KEPT):
        yield replace(row, keep=keep[start : start + _KEPT])


def _cut(row: TokenRow, length: int) -> TokenRow:
    """The row, with its last token, in so many tokens."""
    return row if len(row.ids) <= length else TokenRow([*row.ids[: length - 1], row.ids[-1]])


def refused(kind: str, why: str) -> ModelError:
    """What says that a model is not served on a device, as the CPU would take its place."""
    return ModelError(f"The model cannot be served on {kind}: {why}.", _REMEDY)


def origin_for(kind: str, origin: Origin) -> Origin:
    """Where a model's weights come from, with the attention that a device needs."""
    if kind not in DEVICES:
        return origin
    # Others look whether a mask leaves anything out, and go on in two ways.
    return replace(origin, options={**origin.options, **ATTENTION})


def move(model: PreTrainedModel, kind: str) -> None:
    """Put a model on a device that compiles a program for each shape."""
    cast("torch.nn.Module", model).to(kind)
    model.tie_weights()  # moving makes one tensor two


def compiled(
    call: Callable[Given, Computed], kind: str, environ: Mapping[str, str], count: int
) -> Callable[Given, Computed]:
    """`call` by torch.compile, if AMPHORA_COMPILE asks for it, under TorchNeuron's rules: one graph
    without breaks, and no dynamic shape.

    Args:
        call: What a program computes.
        kind: Of the device.
        environ: AMPHORA_COMPILE.
        count: How many shapes it will be called with.
    """
    if environ.get("AMPHORA_COMPILE", "") not in ("1", "true"):
        return call
    if kind == "xla":
        print("AMPHORA_COMPILE has no effect: torch-xla compiles without it", flush=True)
        return call
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    return torch.compile(call, backend=BACKEND, fullgraph=True, dynamic=False)


def call_of(
    model: PreTrainedModel, inputs: Collection[str], reading: Reading
) -> Callable[[Batch], Tensor]:
    """What a program computes: what is wanted of each row by a model of transformers.

    Args:
        model: It may still be moved.
        inputs: What its forward takes of a batch.
        reading: What is wanted.
    """

    def call(batch: Batch) -> Tensor:
        taken = {name: tensor for name, tensor in batch.items() if name in inputs}
        output = model(**taken)
        if reading is not Reading.TOKENS:
            return of_padded(reading, output, batch[MASK], ()).whole
        values = of_tokens(output)
        if PLACES in batch:
            values = values.take_along_dim(batch[PLACES].unsqueeze(-1), dim=1)
        return values

    return call
