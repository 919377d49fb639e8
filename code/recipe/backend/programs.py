"""Run a model on a device that compiles a program for each shape, all before the first request.

The texts of a request are padded to one of a few shapes, the `Buckets`. No shape on the device
depends on the texts: the host removes the padding from the output.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.backend.padded_rows import pad_rows, token_values, values_from_padded
from recipe.backend.requests.payloads import BadRequest
from recipe.backend.rows import OutputKind, Pooling, Reading, TokenRow, Values, tolerance_of
from recipe.console import log
from recipe.data.column_names import TYPE_IDS
from recipe.errors import ModelError
from recipe.runtime import device, xla

NAME = "AMPHORA_BUCKETS"
LENGTHS, ROWS = (32, 128, 512, 2048), (1, 8, 32)
_BUCKET_TOKENS = 16384
"""The most tokens of a default bucket."""
_PAIR = re.compile(r"([1-9]\d*)x([1-9]\d*)")
DEVICES = frozenset(name for name, kind in device.KINDS.items() if kind.compiles_each_shape)
IDS, MASK, POOLED = "input_ids", "attention_mask", "pooled"
_REMEDY = (
    "Serve it on a CPU or GPU image; on torch-xla USE_TORCH_XLA=0 uses this host's CPU; or bring "
    "an inference.py whose model_fn and predict_fn use the device's own libraries."
)
ATTENTION = {"attn_implementation": "eager"}
Batch = Mapping[str, Tensor]


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a call: a number of rows of as many tokens each, padding included."""

    length: int
    rows: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


@dataclass(frozen=True)
class Buckets:
    """The shapes of one model, by length."""

    shapes: tuple[Bucket, ...]

    @classmethod
    def read(cls, environ: Mapping[str, str], longest: int) -> Buckets:
        """Read AMPHORA_BUCKETS, rows and tokens such as "1x32,8x128"; by default 1, 8 and 32 rows
        of up to four lengths. Raise ValueError if it is invalid, or has a length beyond `longest`,
        the most tokens that the model reads.
        """
        text = environ.get(NAME, "").strip()
        if not text:
            lengths = sorted({min(length, longest) for length in LENGTHS})
            pairs = [(rows, length) for length in lengths for rows in ROWS]
            small = [pair for pair in pairs if pair[0] == 1 or pair[0] * pair[1] <= _BUCKET_TOKENS]
            return cls(tuple(sorted(Bucket(length, rows) for rows, length in small)))
        matches = [_PAIR.fullmatch(part) for part in re.split(r"[,\s]+", text)]
        if not all(matches):
            raise ValueError(
                f"{NAME} is {text!r}. Give pairs of rows and tokens such as 1x32,8x128: a program "
                "is compiled for each."
            )
        shapes = sorted({Bucket(int(match[2]), int(match[1])) for match in matches if match})
        if shapes[-1].length > longest:
            raise ValueError(
                f"{NAME} names {shapes[-1]}, and the model reads {longest} tokens at most. Give "
                f"no length above {longest}."
            )
        return cls(tuple(shapes))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return self.shapes[-1].length

    def __str__(self) -> str:
        return ",".join(map(str, self.shapes))

    def bucket(self, length: int, rows: int) -> Bucket:
        """Return the smallest bucket for rows of `length` tokens. It may have fewer rows."""
        longer = min(shape.length for shape in self.shapes if shape.length >= length)
        fitting_shapes = [shape for shape in self.shapes if shape.length == longer]
        return next((shape for shape in fitting_shapes if shape.rows >= rows), fitting_shapes[-1])

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of the rows of each call. Raise BadRequest for one that is longer
        than every bucket."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        if order and lengths[order[-1]] > self.longest:
            raise BadRequest(
                f"A text has {lengths[order[-1]]} tokens, and this endpoint has programs for "
                f"{self.longest} at most ({NAME}). Shorten it, or send max_length or truncation "
                "where the task takes them."
            )
        start = 0
        while start < len(order):
            bucket = self.bucket(lengths[order[start]], len(order))
            fitting = sum(lengths[index] <= bucket.length for index in order[start:])
            bucket = self.bucket(bucket.length, fitting)
            yield order[start : start + min(fitting, bucket.rows)]
            start += min(fitting, bucket.rows)


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Computes rows of tokens in calls of few shapes."""

    compute: Callable[[Batch], Tensor]
    """Returns a tensor [rows, ...] on the device, by operations that do not depend on the numbers
    in its inputs, int64 tensors [rows, tokens]."""
    buckets: Buckets
    kind: str
    """The kind of device."""
    pad: int
    """The id of the padding token."""
    has_types: bool
    """Whether `compute` takes `token_type_ids`."""
    per_token: bool
    """Whether it returns values of each token."""
    pools: bool
    """Whether it takes a mask of the tokens that are pooled."""
    # torch-xla's graph is global, so it would include operations of other threads.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of the rows of each call. Raise BadRequest for one that is longer
        than every bucket."""
        return self.buckets.cuts(lengths)

    def values(
        self, model: PreTrainedModel, rows: Sequence[TokenRow], reading: OutputKind
    ) -> Values:
        """Compute the rows of one call, on the CPU in float32."""
        bucket = self.buckets.bucket(max(len(row.ids) for row in rows), len(rows))
        values = list(self._call(bucket, rows))
        if not self.per_token:
            return Values(torch.stack(values))
        if reading is Reading.MEAN:
            return Values(torch.stack([states.mean(0) for states in values]))
        return Values(torch.cat(values), [len(tokens) for tokens in values])

    @torch.no_grad()
    def _call(self, bucket: Bucket, rows: Sequence[TokenRow]) -> Iterator[Tensor]:
        """Compute at most `bucket.rows` rows. Copies of the last row fill the bucket."""
        filled = [*rows, *[rows[-1]] * (bucket.rows - len(rows))]
        batch = pad_rows(filled, bucket.length, self.pad, torch.device("cpu"))
        if not self.has_types:
            batch.pop(TYPE_IDS, None)
        elif TYPE_IDS not in batch:
            batch[TYPE_IDS] = torch.zeros_like(batch[IDS])
        if self.pools:
            batch[POOLED] = batch[MASK].clone()
            for index, row in enumerate(filled):
                if row.keep is not None:
                    batch[POOLED][index] = 0
                    batch[POOLED][index, row.keep] = 1
        with self.lock:
            on_device = {name: tensor.to(self.kind) for name, tensor in batch.items()}
            # Copy all rows, since slicing would need a program for each number of texts.
            whole = self.compute(on_device).float().cpu()
        return (
            values[: len(row.ids)] if self.per_token else values
            for row, values in zip(rows, whole, strict=False)
        )

    def compile(
        self, probes: Mapping[int, Sequence[tuple[TokenRow, Tensor]]], dtype: torch.dtype
    ) -> None:
        """Call all programs twice, with a text that fills the shape and with a short one. `probes`
        has both by length, with the values that the CPU computed in `dtype`. Raise ModelError if
        answers differ from these, or other texts of the same shape need another program."""
        count = len(self.buckets.shapes)
        began = time.monotonic()
        log(f"programs: {count} for {self.kind}, {NAME}={self.buckets} (texts x tokens)")
        for number, bucket in enumerate(self.buckets.shapes, 1):
            rows, wanted = zip(*probes[bucket.length], strict=True)
            start = time.monotonic()
            farthest = self._difference(bucket, rows[: bucket.rows], wanted)
            first, programs = time.monotonic() - start, xla.programs()
            start = time.monotonic()
            again = self._difference(bucket, rows[1:], wanted[1:])
            seconds = time.monotonic() - start
            if xla.programs() != programs:
                raise refused(
                    self.kind,
                    "its code depends on numbers on the device, so other texts of the same shape "
                    "need another program",
                )
            tolerance = tolerance_of(wanted, dtype)
            if not (farthest <= tolerance and again <= tolerance):
                raise refused(
                    self.kind,
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


def refused(kind: str, why: str) -> ModelError:
    """Return the error for a model that a device cannot serve. There is no fallback to the CPU."""
    return ModelError(f"The model cannot be served on {kind}: {why}.", _REMEDY)


def move(model: PreTrainedModel, kind: str, reading: OutputKind) -> None:
    """Move a model, and the modules that read it, to a device that compiles each shape."""
    for module in (model, *(reading.modules if isinstance(reading, Pooling) else ())):
        cast("torch.nn.Module", module).to(kind)
    model.tie_weights()  # moving copies shared weights


def compiled(
    model: PreTrainedModel, inputs: Collection[str], reading: OutputKind, kind: str, count: int
) -> Callable[[Batch], Tensor]:
    """Return the function of a program: a model's forward with its `inputs`, and the values that
    are read. The model may be moved to the device later.

    It is compiled for `count` shapes, under TorchNeuron's rules: one graph without breaks, no
    dynamic shape. torch-xla compiles without torch.compile.
    """

    def call(batch: Batch) -> Tensor:
        taken = {name: tensor for name, tensor in batch.items() if name in inputs}
        output = model(**taken)
        if reading is Reading.TOKENS:
            return token_values(output)
        return values_from_padded(reading, output, batch.get(POOLED, batch[MASK]), ()).whole

    compiler = device.kind_of(kind).compiler
    if compiler is None:
        return call
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    return torch.compile(call, backend=compiler, fullgraph=True, dynamic=False)
