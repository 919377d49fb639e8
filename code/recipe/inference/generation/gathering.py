"""Texts of several requests that are written together, from first to last, as they come.

How long a text becomes is not known before it is written: who waited for others' whole texts would
wait for the longest. So it waits for a few of their tokens, and less of what has come meanwhile is
written apart the more groups are at work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from recipe.inference import turns

Written = TypeVar("Written")
Write = Callable[[Sequence[list[int]], Callable[[], None]], list[Written]]
"""Writes something for each text's tokens; it is given what it pauses by."""
_PATIENCE = 2
"""Tokens of what is at work for which a piece waits; twice as many with each group beside."""
_MUCH_LONGER = 4
"""Who has so many times the tokens of another one is not waited for by it, nor written with it."""


class Piece:
    """Texts of one request that are written together."""

    def __init__(self, ids: Sequence[list[int]], alike: Any, most: int) -> None:
        """
        Args:
            ids: The tokens of each text.
            alike: Equal for pieces that may be written together.
            most: Texts that are.
        """
        self.ids = ids
        self.alike = alike
        self.most = most
        self.longest = max(map(len, ids))
        self.came: int | None = None
        """How many tokens had been written for all groups when it began to wait."""
        self.group: tuple[turns.Shared[list[Any]], int, int] | None = None
        """The work that writes it, where its texts begin there, and how many pieces that has."""


class Gathering:
    """Pieces that wait to be written, and those that are.

    What comes while one like it is written waits for a few of its tokens, or its end, with others
    like it, and then they are written together: each alone would cost nearly as much as all. But
    who is much shorter, or is to be written otherwise, begins at once. Groups take turns.
    """

    def __init__(self) -> None:
        # Nobody waits any more for one whose request has gone.
        self._waiting: list[weakref.ref[Piece]] = []
        self._at_work: list[tuple[Any, int]] = []
        """What is equal of the pieces of each group, and the tokens of its longest text."""
        self._steps = 0
        """Tokens that were written for all groups."""

    def add(self, piece: Piece) -> None:
        """From now on the piece may be written with others."""
        self._waiting.append(weakref.ref(piece))

    def written(self, piece: Piece, write: Write[Written]) -> list[Written]:
        """What is written for each text of a piece; by itself, if it fails together with others."""
        if piece.group is None and self._is_awaited(piece):
            try:
                turns.pause(lambda: piece.group is not None or not self._is_awaited(piece))
            except BaseException:
                self._waiting = [each for each in self._waiting if each() is not piece]
                raise
        if piece.group is None:
            self._gather(piece, write)
        assert piece.group is not None
        together, start, pieces = piece.group
        try:
            return together.result()[start : start + len(piece.ids)]
        except Exception:
            if pieces == 1:
                raise
            return write(piece.ids, turns.pause)

    def _is_awaited(self, piece: Piece) -> bool:
        """Whether what is written is like the piece, and not much longer, and the piece has not
        waited for as much of it as it has to."""
        groups = sum(
            alike == piece.alike and longest < _MUCH_LONGER * piece.longest
            for alike, longest in self._at_work
        )
        if not groups:
            return False
        if piece.came is None:
            piece.came = self._steps
        return bool(self._steps - piece.came < _PATIENCE << (groups - 1))

    def _gather(self, first: Piece, write: Write[Written]) -> None:
        """Make a group of a piece and of those that wait and are like it."""
        waiting = [piece for each in self._waiting if (piece := each()) and piece.group is None]
        group, count = [first], len(first.ids)
        for piece in waiting:
            lengths = sorted((first.longest, piece.longest))
            is_like = piece.alike == first.alike and lengths[1] < _MUCH_LONGER * lengths[0]
            if piece is not first and is_like and count + len(piece.ids) <= first.most:
                group.append(piece)
                count += len(piece.ids)
        ids = [text for piece in group for text in piece.ids]
        longest = max(piece.longest for piece in group)
        together = turns.Shared(partial(self._work, ids, (first.alike, longest), write))
        start = 0
        for piece in group:
            piece.group = together, start, len(group)
            start += len(piece.ids)
        self._waiting = [weakref.ref(piece) for piece in waiting if piece.group is None]

    def _work(
        self,
        ids: Sequence[list[int]],
        kind: tuple[Any, int],
        write: Write[Written],
        pause: Callable[[], None],
    ) -> list[Written]:
        def step() -> None:
            self._steps += 1
            pause()

        self._at_work.append(kind)
        try:
            return write(ids, step)
        finally:
            self._at_work.remove(kind)
