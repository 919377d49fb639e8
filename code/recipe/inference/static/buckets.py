"""The shapes that a model is called with, where each new shape is a program to compile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipe.inference.payloads import BadRequest

NAME = "AMPHORA_BUCKETS"
LENGTHS, ROWS = (32, 128, 512, 2048), (1, 8, 32)
_MOST_TOKENS = 16384
"""Of a usual bucket."""
_PAIR = re.compile(r"([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape of a call: so many rows of so many tokens, most of them maybe padding."""

    length: int
    rows: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


@dataclass(frozen=True)
class Buckets:
    """The shapes of one model, shorter ones first."""

    shapes: tuple[Bucket, ...]

    @classmethod
    def read(cls, environ: Mapping[str, str], longest: int) -> Buckets:
        """Those of AMPHORA_BUCKETS, else three numbers of rows of a few lengths.

        Args:
            environ: AMPHORA_BUCKETS, such as "1x32,8x128": rows and tokens.
            longest: Tokens of the longest text that the model reads.

        Raises:
            ValueError: AMPHORA_BUCKETS is something else, or longer than the model reads.
        """
        text = environ.get(NAME, "").strip()
        if not text:
            lengths = sorted({min(length, longest) for length in LENGTHS})
            pairs = [(rows, length) for length in lengths for rows in ROWS]
            usual = [pair for pair in pairs if pair[0] == 1 or pair[0] * pair[1] <= _MOST_TOKENS]
            return cls(tuple(sorted(Bucket(length, rows) for rows, length in usual)))
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
        """Tokens of the longest row."""
        return self.shapes[-1].length

    def __str__(self) -> str:
        return ",".join(map(str, self.shapes))

    def cuts(self, lengths: Sequence[int]) -> Iterator[tuple[Bucket, list[int]]]:
        """The calls for rows of these lengths: a bucket, and the places of the rows in it.

        Raises:
            BadRequest: A row is longer than every bucket.
        """
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        if order and lengths[order[-1]] > self.longest:
            raise BadRequest(
                f"A text has {lengths[order[-1]]} tokens, and this endpoint has programs for "
                f"{self.longest} at most ({NAME}). Shorten it, or send max_length or truncation "
                "where the task takes them."
            )
        start = 0
        while start < len(order):
            length = min(
                shape.length for shape in self.shapes if shape.length >= lengths[order[start]]
            )
            alike = [shape for shape in self.shapes if shape.length == length]
            fitting = sum(lengths[place] <= length for place in order[start:])
            bucket = next((shape for shape in alike if shape.rows >= fitting), alike[-1])
            yield bucket, order[start : start + min(fitting, bucket.rows)]
            start += min(fitting, bucket.rows)
