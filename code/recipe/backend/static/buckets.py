"""The shapes of a model's calls on a device that compiles a program for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipe.backend.requests.payloads import BadRequest

NAME = "AMPHORA_BUCKETS"
LENGTHS, ROWS = (32, 128, 512, 2048), (1, 8, 32)
_MOST_TOKENS = 16384
"""The most tokens of a default bucket."""
_PAIR = re.compile(r"([1-9]\d*)x([1-9]\d*)")


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
        """Read AMPHORA_BUCKETS. By default there are three numbers of rows for each of few lengths.

        Args:
            environ: AMPHORA_BUCKETS, such as "1x32,8x128": rows and tokens.
            longest: The most tokens that the model reads.

        Raises:
            ValueError: AMPHORA_BUCKETS is invalid, or has a length beyond `longest`.
        """
        text = environ.get(NAME, "").strip()
        if not text:
            lengths = sorted({min(length, longest) for length in LENGTHS})
            pairs = [(rows, length) for length in lengths for rows in ROWS]
            small = [pair for pair in pairs if pair[0] == 1 or pair[0] * pair[1] <= _MOST_TOKENS]
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
        of_length = [shape for shape in self.shapes if shape.length == longer]
        return next((shape for shape in of_length if shape.rows >= rows), of_length[-1])

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of the rows of each call.

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
            bucket = self.bucket(lengths[order[start]], len(order))
            fitting = sum(lengths[index] <= bucket.length for index in order[start:])
            bucket = self.bucket(bucket.length, fitting)
            yield order[start : start + min(fitting, bucket.rows)]
            start += min(fitting, bucket.rows)
