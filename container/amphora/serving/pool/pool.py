"""The front's side of the model workers: one bounded queue, and the workers that serve it.

`Dispatcher` decides which worker gets which request. A worker that dies is replaced. If several
requests were at work in it, and the handlers declare predictions pure (`predict_batch_fn`),
each of them is tried once more, alone; otherwise they are answered 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amphora.common.errors import AmphoraError
from amphora.serving.pool.connections import Call, WorkerConnection
from amphora.serving.pool.dispatching import Dispatcher
from amphora.serving.pool.spawner import ModelLoadError, Spawner
from amphora.serving.pool.worker_adapters import WorkerAdapters
from amphora.serving.protocol import messages
from amphora.serving.protocol.media_types import Fault
from amphora.serving.protocol.messages import Answer, Chunk, Error
from amphora.serving.settings import ServerSettings
from amphora.serving.telemetry import Metrics

LOG = logging.getLogger("amphora.pool")
# Without a living worker, failed starts in a row for each worker after which the container ends.
_GIVE_UP_AFTER = 5
# After this many chunks that its client has read, a worker may send as many more.
_CREDIT = messages.CHUNKS_AHEAD // 4
# The pause before a worker is replaced, which may die at once again.
_RESTART_PAUSE = 0.1
_DRAIN_STEP = 0.02


class Pool:
    """The workers of one model, and the requests that wait for them."""

    def __init__(
        self, settings: ServerSettings, environ: Mapping[str, str], metrics: Metrics
    ) -> None:
        self.settings = settings
        self._metrics = metrics
        self._spawner = Spawner(settings, environ)
        self._dispatcher = Dispatcher(settings, metrics)
        self._adapters = WorkerAdapters(settings, self._dispatcher.connections)
        self._keepers: list[asyncio.Task[None]] = []
        self._failures = 0
        self._closing = False
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[AmphoraError] = loop.create_future()
        """Done when the pool has given up; its result is the reason."""
        self.loaded: asyncio.Future[messages.Loaded] = loop.create_future()
        """Done when the first worker is ready."""

    @property
    def merges(self) -> bool:
        return self._dispatcher.merges

    @property
    def living(self) -> int:
        """Return the number of workers that have loaded the model and warmed up."""
        return len(self._dispatcher.connections)

    @property
    def description(self) -> Mapping[str, Any]:
        """Return the handlers' description of the model, with the routes that its adapters answer;
        empty before it is loaded."""
        if not self.loaded.done():
            return {}
        described: Mapping[str, Any] = self.loaded.result().description
        if more := [route for one in self._adapters.described.values() for route in one["routes"]]:
            return {**described, "routes": [*dict.fromkeys([*described["routes"], *more])]}
        return described

    @property
    def adapters(self) -> Mapping[str, str]:
        """Return the folders of the loaded adapters by their names."""
        return self._adapters.sources

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter in all workers. Raises Fault as `WorkerAdapters.load`."""
        await self._adapters.load(name, folder, self.description.get("model", "model"))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises Fault (404) if it is not loaded."""
        await self._adapters.unload(name)

    @property
    def waiting(self) -> list[Call]:
        """Return the calls that wait for a worker."""
        return [call for call in self._dispatcher.queue if not call.reply.done()]

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the processes that load the model."""
        return self._spawner.process_ids

    def start(self) -> None:
        """Begin to load the model; `loaded` and `failed` report the outcome.

        The first worker starts alone, so that a model that cannot be loaded is reported once.
        """
        self._keepers = [asyncio.create_task(self._keep(0))]

    async def drain(self) -> None:
        """Wait until all requests are answered, at most for the time that one may take."""
        deadline = time.monotonic() + self.settings.timeout
        while time.monotonic() < deadline and (
            self.waiting or any(c.calls for c in self._dispatcher.connections.values())
        ):
            await asyncio.sleep(_DRAIN_STEP)

    async def close(self) -> None:
        """End all workers. Requests that they have not answered are lost, so drain first."""
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        for connection in self._dispatcher.connections.values():
            connection.kill()
        # In a thread: to free much memory takes time.
        await asyncio.to_thread(self._spawner.close)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._adapters.close()

    def submit(self, call: Call) -> None:
        """Queue a request. Raises Fault: not ready, or queue full."""
        if not self.loaded.done():
            raise Fault(503, "not_ready", "The model is not loaded yet.")
        if (waiting := len(self._dispatcher.queue)) >= self.settings.queue_limit:
            raise Fault(503, "overloaded", f"{waiting} requests wait already.")
        self._dispatcher.queue.append(call)
        self._dispatcher.dispatch()

    def cancel(self, call: Call) -> None:
        """Drop a call whose client has gone from the queue, or cancel it in its worker."""
        with contextlib.suppress(ValueError):
            self._dispatcher.queue.remove(call)
        for connection in self._dispatcher.connections.values():
            if connection.calls.pop(call.id, None) is not None:
                connection.notify(messages.Cancel(id=call.id))
                if connection.takes_turns:
                    # A job that waited for its slow client runs once more, to end.
                    connection.expect()

    def took(self, call: Call) -> None:
        """Count a chunk that the client has read, and sometimes report the count to the worker."""
        call.taken += 1
        for connection in self._dispatcher.connections.values():
            is_due = connection.takes_turns and call.taken >= _CREDIT
            if is_due and connection.calls.get(call.id) is call:
                connection.notify(messages.Credit(id=call.id, count=call.taken))
                call.taken = 0

    async def _keep(self, index: int) -> None:
        """Start a worker, and replace it when it ends, until the pool is closed."""
        while not self._closing:
            try:
                sock, pid, loaded = await self._spawner.worker(index)
                reader, writer = await asyncio.open_connection(sock=sock)
                connection = WorkerConnection(
                    index=index, pid=pid, reader=reader, writer=writer, takes_turns=loaded.turns,
                    timeout=self.settings.timeout,
                )  # fmt: skip
                async with self._adapters.changing:
                    await self._adapters.restore(connection, loaded.description)
                    self._dispatcher.connections[index] = connection
            except (AmphoraError, EOFError, OSError, asyncio.TimeoutError) as error:
                self._failures += 1
                never_loaded = not self.loaded.done() and isinstance(error, AmphoraError)
                most_failures = _GIVE_UP_AFTER * self.settings.workers
                is_hopeless = self._failures >= most_failures and not self._dispatcher.connections
                if never_loaded or is_hopeless:
                    if not isinstance(error, AmphoraError):
                        error = ModelLoadError(f"No worker starts: {error}")
                    if not self.failed.done():
                        self.failed.set_result(error)
                    return
                LOG.error("A model worker could not be started: %s", error)
                await asyncio.sleep(min(10.0, _RESTART_PAUSE * 2**self._failures))
                continue
            if not self.loaded.done():
                LOG.info("The model is loaded (%.1f s).", loaded.seconds)
                LOG.info("ready at %s", self.settings.url)
                if "engine" in loaded.description:
                    labels = (loaded.description.get("task", ""), loaded.description["engine"])
                    self._metrics.model.labels(*labels).set(1)
                self.loaded.set_result(loaded)
            self._dispatcher.merges = loaded.batches
            self._failures = 0
            for other in range(len(self._keepers), self.settings.workers):
                self._keepers.append(asyncio.create_task(self._keep(other)))
            try:
                self._dispatcher.dispatch()
                with contextlib.suppress(EOFError, ConnectionError):
                    while True:
                        message, body = await messages.read(connection.reader)
                        if isinstance(message, messages.State):
                            self._dispatcher.note(connection, message)
                        elif isinstance(message, messages.Adapted):
                            if connection.adapted is not None:
                                connection.adapted.set_result(message)
                        else:
                            connection.watch()
                            await self._deliver(connection, message, body)
            finally:
                connection.close()
                del self._dispatcher.connections[index]
                if not self._closing:
                    text = "Model worker %d has ended with %d requests in it."
                    LOG.warning(text, pid, len(connection.calls))
                    self._dispatcher.requeue(connection)
            self._metrics.restarts.inc()
            await asyncio.sleep(_RESTART_PAUSE)

    async def _deliver(
        self, connection: WorkerConnection, message: Answer | Chunk | Error, body: bytes
    ) -> None:
        """Pass an answer, an error or a chunk on to the call that waits for it."""
        call = connection.calls.get(message.id)
        if call is None:
            return
        if isinstance(message, Error):
            del connection.calls[call.id]
            call.fail(Fault(message.status, **message.error))
            return
        if not message.more:
            del connection.calls[call.id]
        if isinstance(message, Answer):
            call.answer(message, body)
        elif call.is_streaming:
            chunk = body if message.more else None
            if connection.takes_turns:
                # Its credit is the room in the queue.
                call.chunks.put_nowait(chunk)
                return
            connection.unwatch()
            try:
                # A full queue stops the reading here, so that the worker waits for a slow client.
                await asyncio.wait_for(call.chunks.put(chunk), self.settings.timeout)
            except asyncio.TimeoutError:
                self.cancel(call)
            connection.watch()


def too_late(timeout: float) -> Fault:
    return Fault(504, "deadline_exceeded", f"No answer within {timeout:g} s.")
