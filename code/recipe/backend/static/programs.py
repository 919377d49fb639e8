"""Run a model on a device that compiles a program for each shape, all before the first request.

The texts of a request are padded to one of a few shapes (`buckets`). No shape on the device depends
on the texts: the host removes the padding from the output.
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

from recipe.backend.padded_rows import pad_rows, token_values, values_from_padded
from recipe.backend.rows import OutputKind, Pooling, Reading, TokenRow, Values
from recipe.backend.saved.origin import Origin
from recipe.backend.static.buckets import NAME, Bucket, Buckets
from recipe.backend.tolerances import tolerance_of
from recipe.console import log
from recipe.data.column_names import TYPE_IDS
from recipe.errors import ModelError
from recipe.runtime import device, xla

DEVICES = frozenset(name for name, kind in device.KINDS.items() if kind.compiles_each_shape)
IDS, MASK, POOLED = "input_ids", "attention_mask", "pooled"
_REMEDY = (
    "Serve it on a CPU or GPU image; on torch-xla USE_TORCH_XLA=0 uses this host's CPU; or bring "
    "an inference.py whose model_fn and predict_fn use the device's own libraries."
)
ATTENTION = {"attn_implementation": "eager"}
Batch = Mapping[str, Tensor]
Given = ParamSpec("Given")
Computed = TypeVar("Computed")


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of a program, and the kind of its output."""

    pad: int
    """The id of the padding token."""
    has_types: bool
    """Whether it takes `token_type_ids`."""
    per_token: bool = False
    """Whether it returns values of each token."""
    pools: bool = False
    """Whether it takes a mask of the tokens that are pooled."""


class Programs:
    """Computes rows of tokens in calls of few shapes."""

    def __init__(
        self, compute: Callable[[Batch], Tensor], inputs: ProgramInputs, buckets: Buckets, kind: str
    ) -> None:
        """
        Args:
            compute: Returns a tensor [rows, ...] on the device, by operations that do not depend on
                the numbers in its inputs.
            inputs: Its inputs, int64 tensors [rows, tokens].
            buckets: The shapes.
            kind: The kind of device.
        """
        self._compute = compute
        self._inputs = inputs
        self._buckets = buckets
        self._device = torch.device(kind)
        # torch-xla's graph is global, so it would include operations of other threads.
        self._lock = threading.Lock()

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the places of the rows that share a call.

        Raises:
            BadRequest: A row is longer than every bucket.
        """
        return self._buckets.cuts(lengths)

    def values(
        self, model: PreTrainedModel, rows: Sequence[TokenRow], reading: OutputKind
    ) -> Values:
        """Compute the rows of one call, on the CPU in float32."""
        bucket = self._buckets.bucket(max(len(row.ids) for row in rows), len(rows))
        values = list(self._call(bucket, rows))
        if not self._inputs.per_token:
            return Values(torch.stack(values))
        if reading is Reading.MEAN:
            return Values(torch.stack([states.mean(0) for states in values]))
        return Values(torch.cat(values), [len(tokens) for tokens in values])

    @torch.no_grad()
    def _call(self, bucket: Bucket, rows: Sequence[TokenRow]) -> Iterator[Tensor]:
        """Compute at most `bucket.rows` rows. Copies of the last row fill the bucket."""
        filled = [*rows, *[rows[-1]] * (bucket.rows - len(rows))]
        batch = pad_rows(filled, bucket.length, self._inputs.pad, torch.device("cpu"))
        if not self._inputs.has_types:
            batch.pop(TYPE_IDS, None)
        elif TYPE_IDS not in batch:
            batch[TYPE_IDS] = torch.zeros_like(batch[IDS])
        if self._inputs.pools:
            batch[POOLED] = batch[MASK].clone()
            for index, row in enumerate(filled):
                if row.keep is not None:
                    batch[POOLED][index] = 0
                    batch[POOLED][index, row.keep] = 1
        with self._lock:
            on_device = {name: tensor.to(self._device) for name, tensor in batch.items()}
            # Copy all rows, since slicing would need a program for each number of texts.
            whole = self._compute(on_device).float().cpu()
        return (
            values[: len(row.ids)] if self._inputs.per_token else values
            for row, values in zip(rows, whole, strict=False)
        )

    def prepare(
        self,
        longest: TokenRow,
        short: TokenRow,
        expected: Callable[[TokenRow], Tensor],
        dtype: torch.dtype,
    ) -> Callable[[], None]:
        """Compute answers on the CPU, to compare those of the programs with them.

        Args:
            longest: A text of as many tokens as the longest bucket, if possible.
            short: A shorter text.
            expected: Computes the values of a row. The model is still on the CPU.
            dtype: The type in which the model computes.

        Returns:
            A function to call when the model is on the device. It compiles all programs, and raises
            ModelError if answers differ from the CPU's, or if other texts of the same shape need
            another program.
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
        """Call each program twice, with a text that fills it and with a short one.

        Args:
            texts: Both texts, for each length.
            answers: The values that the CPU computed.
            dtype: The type in which the model computes.
        """
        count, kind = len(self._buckets.shapes), self._device.type
        began = time.monotonic()
        log(f"programs: {count} for {kind}, {NAME}={self._buckets} (texts x tokens)")
        for number, bucket in enumerate(self._buckets.shapes, 1):
            rows, wanted = texts[bucket.length], answers[bucket.length]
            start = time.monotonic()
            farthest = self._difference(bucket, rows[: bucket.rows], wanted)
            first, programs = time.monotonic() - start, xla.programs()
            start = time.monotonic()
            again = self._difference(bucket, rows[1:], wanted[1:])
            seconds = time.monotonic() - start
            if xla.programs() != programs:
                raise refused(
                    kind,
                    "its code depends on numbers on the device, so other texts of the same shape "
                    "need another program",
                )
            tolerance = tolerance_of(wanted, dtype)
            if not (farthest <= tolerance and again <= tolerance):
                raise refused(
                    kind,
                    f"in {dtype} its answers for {bucket} (texts x tokens) differ from the CPU's "
                    f"by {farthest:.3g} and {again:.3g}, where {tolerance:.3g} would be rounding",
                )
            log(
                f"program {number} of {count}: {bucket}, ready after {first:.1f} s, "
                f"{1000 * seconds:.0f} ms a call, within {max(farthest, again):.1g} of the CPU"
            )
        log(f"programs: all are ready after {time.monotonic() - began:.0f} s")

    def _difference(
        self, bucket: Bucket, rows: Sequence[TokenRow], expected: Sequence[Tensor]
    ) -> float:
        """Return the largest difference between a bucket's values and the expected ones, or NaN."""
        pairs = zip(self._call(bucket, rows), expected, strict=False)
        return float(torch.stack([(values - right).abs().max() for values, right in pairs]).max())


def _cut(row: TokenRow, length: int) -> TokenRow:
    """Shorten a row to `length` tokens, and keep its last token."""
    return row if len(row.ids) <= length else TokenRow([*row.ids[: length - 1], row.ids[-1]])


def refused(kind: str, why: str) -> ModelError:
    """Return the error for a model that a device cannot serve. There is no fallback to the CPU."""
    return ModelError(f"The model cannot be served on {kind}: {why}.", _REMEDY)


def origin_for(kind: str, origin: Origin) -> Origin:
    """Return the origin with the attention that a device needs."""
    if kind not in DEVICES:
        return origin
    # Other kernels branch on whether the mask excludes any token.
    return replace(origin, options={**origin.options, **ATTENTION})


def move(model: PreTrainedModel, kind: str, reading: OutputKind) -> None:
    """Move a model, and the modules that read it, to a device that compiles each shape."""
    for module in (model, *(reading.modules if isinstance(reading, Pooling) else ())):
        cast("torch.nn.Module", module).to(kind)
    model.tie_weights()  # moving copies shared weights


def compiled(call: Callable[Given, Computed], kind: str, count: int) -> Callable[Given, Computed]:
    """Compile `call` under TorchNeuron's rules: one graph without breaks, no dynamic shape.

    Args:
        call: The function of a program.
        kind: The kind of device; torch-xla compiles without torch.compile.
        count: The number of shapes.
    """
    compiler = device.kind_of(kind).compiler
    if compiler is None:
        return call
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    return torch.compile(call, backend=compiler, fullgraph=True, dynamic=False)


def call_of(
    model: PreTrainedModel, inputs: Collection[str], reading: OutputKind
) -> Callable[[Batch], Tensor]:
    """Return the function of a program: a model's forward, and the values that are read.

    Args:
        model: A model of transformers. It may be moved to the device later.
        inputs: The inputs of its forward.
        reading: The values to read from its output.
    """

    def call(batch: Batch) -> Tensor:
        taken = {name: tensor for name, tensor in batch.items() if name in inputs}
        output = model(**taken)
        if reading is Reading.TOKENS:
            return token_values(output)
        return values_from_padded(reading, output, batch.get(POOLED, batch[MASK]), ()).whole

    return call
