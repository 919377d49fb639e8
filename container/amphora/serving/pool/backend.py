"""The interface of what answers a model's requests: worker processes, or vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from amphora.serving.pool.connections import Call
from amphora.serving.pool.spawner import ModelError
from amphora.serving.settings import ServerSettings


class Backend(Protocol):
    """Answers the requests of one model. `Pool` documents the members that both have."""

    settings: ServerSettings
    loaded: asyncio.Event
    failed: asyncio.Future[ModelError]

    @property
    def is_ready(self) -> bool:
        """Return whether requests would be answered now."""

    @property
    def merges(self) -> bool:
        """Return whether requests are predicted together."""

    @property
    def living(self) -> int:
        """Return the number of processes that can take requests."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Return what is known of the model; empty before it is loaded."""

    @property
    def oldest(self) -> float:
        """Return how many seconds the oldest request in the queue has waited."""

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue."""

    def start(self) -> None:
        """Begin to load the model."""

    async def close(self) -> None:
        """End every process."""

    def submit(self, call: Call) -> None:
        """Take a request. Raises Fault at once if it cannot be taken."""

    def cancel(self, call: Call) -> None:
        """Stop the work on a request whose client is gone."""

    def took(self, call: Call) -> None:
        """Note that the client has read a chunk of a stream."""

    async def metrics_text(self) -> bytes:
        """Return more lines for /metrics."""
