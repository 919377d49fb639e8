"""Groups inputs of one or several requests that are generated together; groups take turns.

The length of a generated text is not known in advance: a request that waited for a running group to
end would wait for its longest text. So a group waits for a few tokens of the running groups of its
kind, and longer if there are more of them. Inputs that arrive meanwhile join it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from recipe.backend import turns

_PATIENCE = 2
"""Tokens of a running group for which a group waits; doubled for each further one."""


@dataclass(frozen=True)
class TokenizedInput:
    """An input of a request, in tokens."""

    index: int
    """Its position in the request."""
    ids: list[int]


Write = Callable[[Sequence[Any], Callable[[], None]], list[Any]]
"""Generates something for each input; the second argument pauses."""


class GenerationGroup:
    """Inputs that are generated together, by the first of their requests that has a turn."""

    def __init__(self, kind: Any, write: Write) -> None:
        self.kind, self.write = kind, write
        self.inputs: list[Any] = []
        self.parts = 0
        self.came: int | None = None
        """How many tokens all groups had generated when it began to wait."""
        self.is_begun = self.is_running = self.has_failed = False
        self.written: list[Any] | None = None

    @property
    def is_over(self) -> bool:
        return self.has_failed or self.written is not None


GroupMembers = tuple[GenerationGroup, slice]
"""A group, and which of its inputs are of one request."""


class GenerationGroups:
    """The groups of a model."""

    def __init__(self) -> None:
        # Weak, since nobody waits for a group whose clients have left.
        self._open: weakref.WeakValueDictionary[Any, GenerationGroup] = (
            weakref.WeakValueDictionary()
        )
        self._running: list[Any] = []
        self._steps = 0
        """Tokens that all groups have generated."""

    def add(
        self, inputs: Sequence[TokenizedInput], alike: Any, most: int, write: Write
    ) -> list[GroupMembers]:
        """Add a request's inputs to groups of at most `most`, and return its parts of them.

        Args:
            alike: A value that is equal for inputs that may share a group.
        """
        parts = []
        for start in range(0, len(inputs), most):
            some = inputs[start : start + most]
            # A short input would cost as much as a much longer one next to it.
            kind = alike, max(len(one.ids) for one in some).bit_length() // 3
            group = self._open.get(kind)
            if group is None or group.is_begun or len(group.inputs) + len(some) > most:
                group = self._open[kind] = GenerationGroup(kind, write)
            first = len(group.inputs)
            group.inputs += some
            group.parts += 1
            parts.append((group, slice(first, first + len(some))))
        return parts

    def results(self, parts: Sequence[GroupMembers]) -> list[Any]:
        """Return what is generated for the inputs of a request, in their order. If a group of
        several requests fails, each is generated alone."""
        written: dict[int, Any] = {}
        for group, members in parts:
            while not group.is_over:
                if not self._is_due(group):
                    turns.pause(partial(self._is_due, group))
                if group.is_running:
                    break  # A caller outside the turns cannot wait for another prediction.
                if not group.is_over:
                    self._run(group)
            inputs = group.inputs[members]
            if group.written is None:
                results = group.write(inputs, turns.pause)
            else:
                results = group.written[members]
            written.update((one.index, value) for one, value in zip(inputs, results, strict=True))
        return [written[index] for index in sorted(written)]

    def _is_due(self, group: GenerationGroup) -> bool:
        """Return whether a group is over, or may run now."""
        others = self._running.count(group.kind)
        if group.is_over or not others:
            return True
        if group.came is None:
            group.came = self._steps
        return not group.is_running and self._steps - group.came >= _PATIENCE << (others - 1)

    def _run(self, group: GenerationGroup) -> None:
        def step() -> None:
            self._steps += 1
            turns.pause()

        group.is_begun = group.is_running = True
        self._running.append(group.kind)
        try:
            group.written = group.write(group.inputs, step)
        except Exception:
            if group.parts == 1:
                raise
            group.has_failed = True
        finally:
            # If its client has left, another request of the group runs it again.
            group.is_running = False
            self._running.remove(group.kind)
