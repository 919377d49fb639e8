"""Groups inputs of several requests that are generated together; groups take turns.

The length of a generated text is not known in advance: a request that waited for a running group to
end would wait for its longest text. So a request waits for a few tokens of the running groups of
its kind, and longer if there are more of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from recipe.backend import turns

_PATIENCE = 2
"""Tokens of running groups for which a piece waits; doubled for each further group."""
_MUCH_LONGER = 4
"""Pieces do not share a group if one has this many times the tokens of the other."""


@dataclass(frozen=True)
class Source:
    """An input of a request, in tokens."""

    index: int
    """Its position in the request."""
    ids: list[int]


Input = TypeVar("Input", bound=Source)
Written = TypeVar("Written")
Write = Callable[[Sequence[Input], Callable[[], None]], list[Written]]
"""Generates something for each input; the second argument pauses."""


class Piece(Generic[Input]):
    """Inputs of one request that are generated together."""

    def __init__(self, inputs: Sequence[Input], alike: Any, most: int) -> None:
        self.inputs = inputs
        self.alike = alike
        """A value that is equal for pieces that may share a group."""
        self.most = most
        """The most inputs of a group."""
        self.longest = max(len(one.ids) for one in inputs)
        self.came: int | None = None
        """How many tokens all groups had generated when it began to wait."""
        self.group: tuple[turns.Shared[list[Any]], int, int] | None = None
        """The work of its group, the position of its first input there, and the group's pieces."""


def pieces(inputs: Sequence[Input], alike: Any, most: int) -> Iterator[Piece[Input]]:
    """Cut a request's inputs into pieces of at most `most`."""
    for start in range(0, len(inputs), most):
        yield Piece(inputs[start : start + most], alike, most)


class Gathering:
    """The pieces that wait, and the groups that run.

    A piece that arrives while a group of its kind runs waits for a few tokens of the group, or for
    its end. Then all waiting pieces are generated together, which costs little more than one of
    them. A much shorter piece, or one with other settings, starts at once.
    """

    def __init__(self) -> None:
        # Weak, since a request whose client has left waits no longer.
        self._waiting: list[weakref.ref[Piece[Any]]] = []
        self._running: list[tuple[Any, int]] = []
        """Of each group the value `alike` of its pieces, and the tokens of its longest input."""
        self._steps = 0
        """Tokens that all groups have generated."""

    def add(self, piece: Piece[Any]) -> None:
        """Queue a piece, to be generated with others."""
        self._waiting.append(weakref.ref(piece))

    def results(
        self, request: Sequence[Piece[Input]], write: Write[Input, Written]
    ) -> list[Written]:
        """Return what is generated for the inputs of a request, given as all of its pieces. A piece
        whose group fails is generated alone."""
        written: dict[int, Written] = {}
        for piece in request:
            if not self._may_start(piece):
                try:
                    turns.pause(partial(self._may_start, piece))
                except BaseException:
                    self._waiting = [one for one in self._waiting if one() is not piece]
                    raise
            if piece.group is None:
                self._gather(piece, write)
            assert piece.group is not None
            work, start, count = piece.group
            try:
                results = work.result()[start : start + len(piece.inputs)]
            except Exception:
                if count == 1:
                    raise
                results = write(piece.inputs, turns.pause)
            for source, result in zip(piece.inputs, results, strict=True):
                written[source.index] = result
        return [written[index] for index in sorted(written)]

    def _may_start(self, piece: Piece[Any]) -> bool:
        """Return whether a piece has a group, has waited long enough, or has no group of its kind
        to wait for."""
        groups = sum(
            alike == piece.alike and longest < _MUCH_LONGER * piece.longest
            for alike, longest in self._running
        )
        if piece.group is not None or not groups:
            return True
        if piece.came is None:
            piece.came = self._steps
        return bool(self._steps - piece.came >= _PATIENCE << (groups - 1))

    def _gather(self, first: Piece[Input], write: Write[Input, Written]) -> None:
        """Form a group of a piece and the waiting pieces of its kind."""
        waiting = [piece for one in self._waiting if (piece := one()) and piece.group is None]
        group, count = [first], len(first.inputs)
        for piece in waiting:
            shorter, longer = sorted((first.longest, piece.longest))
            is_like = piece.alike == first.alike and longer < _MUCH_LONGER * shorter
            if piece is not first and is_like and count + len(piece.inputs) <= first.most:
                group.append(piece)
                count += len(piece.inputs)
        inputs = [one for piece in group for one in piece.inputs]
        kind = first.alike, max(piece.longest for piece in group)

        def run(pause: Callable[[], None]) -> list[Written]:
            def step() -> None:
                self._steps += 1
                pause()

            self._running.append(kind)
            try:
                return write(inputs, step)
            finally:
                self._running.remove(kind)

        work = turns.Shared(run)
        start = 0
        for piece in group:
            piece.group = work, start, len(group)
            start += len(piece.inputs)
        self._waiting = [weakref.ref(piece) for piece in waiting if piece.group is None]
