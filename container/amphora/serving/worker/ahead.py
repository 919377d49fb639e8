"""Whether a worker should have its next batch while a device computes the present one.

While the device computes, the next batch becomes tokens, so that the device need not wait for it.
But two batches at once are two calls where one could have held the requests of both, since clients
that wait for their answers ask no more meanwhile. That costs what a call costs beside its tokens,
and pays only where this is less than what the host does for a batch. Both are measured.
"""

from __future__ import annotations

import time

# How much the sums keep at each call: what they say is of the last ten or so.
_MEMORY = 0.9
# Of the host's part in the worker, which is not all of it: the front reads and writes, too.
_WORTH = 1.5


class Ahead:
    """What the last calls of one worker took, of its device and of its host."""

    def __init__(self, call_tokens: int) -> None:
        """
        Args:
            call_tokens: What a call costs beside its tokens, in tokens.
        """
        self._call_tokens = call_tokens
        self._device = self._host = 0.0
        self._since = time.monotonic()
        self._idle = 0.0

    @property
    def pays(self) -> bool:
        """Whether a batch that could hold more requests should be taken; False before the first
        call."""
        return 0 < self._device <= _WORTH * self._host

    def idled(self, seconds: float) -> None:
        """The host had nothing to do for so long."""
        self._idle += seconds

    def called(self, computed: float, tokens: int) -> None:
        """A call was made, and answered.

        Args:
            computed: Seconds that the device was seen to take since the last one.
            tokens: Of the call, with its padding.
        """
        now = time.monotonic()
        share = self._call_tokens / max(1, self._call_tokens + tokens)
        self._device = _MEMORY * self._device + share * computed
        self._host = _MEMORY * self._host + max(0.0, now - self._since - self._idle)
        self._since, self._idle = now, 0.0
