"""Answers the batches of requests that the front process sends to a worker.

An error affects only the request that caused it. If the handlers take turns (`turns_fn`), more
requests arrive while others are at work: see `amphora.serving.worker.job_threads`.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from amphora.common import logs
from amphora.common.devices import CPU, CUDA, KINDS
from amphora.serving.protocol import batching, media_types, messages
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker.context import Context
from amphora.serving.worker.job_threads import TakesLong, TurnJob, Turns
from amphora.serving.worker.runner import Item, ModelRunner

LOG = logging.getLogger("amphora.worker")
# The longest slice of work. The number of tokens that the model computes in it is measured.
_SLICE_SECONDS = 0.1
_LEAST_SLICE, _FIRST_SLICE = 256, 2048
# A longer body is read and measured in turns.
_LONG_BODY = 16384
# If reading and measuring takes more CPU time than this, it starts again in turns.
_READ_SECONDS = 0.05
_SIGN_SECONDS = 0.2
# While a device computes; an answer waits for half of it.
_POLL_SECONDS = 0.0002


class Conversation:
    """The state of one worker: received requests, jobs, and what was last reported to the front."""

    def __init__(self, sock: socket.socket, runner: ModelRunner) -> None:
        self._sock = sock
        self._runner = runner
        self._turns = Turns(self._has_news)
        self._takes_turns = "turns_fn" in runner.handlers
        if self._takes_turns:
            context = Context("turns", {}, runner.settings)
            runner.handlers["turns_fn"](runner.model, self._turns.pause, context=context)
        self._number = 0
        """The number of the last batch that was received."""
        self._arrived: list[Item] = []
        self._jobs: dict[str, TurnJob] = {}
        """The job of each request that has its own."""
        self._credit: dict[str, int] = {}
        """How many chunks each stream may send before its client has read some."""
        self._tokens = self._padded = self._calls = 0
        self._tokens_per_second = _FIRST_SLICE / _SLICE_SECONDS
        self._sent_at = 0.0
        self._announced = (0, "idle")

    def serve(self) -> None:
        """Answer batches until the front process closes the socket (EOFError)."""
        jobs_are_next = False
        while True:
            while not self._arrived and not self._turns.is_runnable:
                if self._turns.polls:
                    if self._has_news(_POLL_SECONDS):
                        self._take_frame()
                    continue
                # Jobs that are left wait for slow clients.
                self._announce("rests")
                self._take_frame()
            while self._has_news():
                self._take_frame()
            # New requests and jobs alternate.
            if self._arrived and not (jobs_are_next and self._turns.is_runnable):
                batch, self._arrived = self._arrived, []
                self._send_state("begun")
                self.answer(batch)
                jobs_are_next = True
            else:
                self._turns.give()
                jobs_are_next = False
            self._announce("open")

    def _has_news(self, seconds: float = 0) -> bool:
        return bool(select.select([self._sock], [], [], seconds)[0])

    def _take_frame(self) -> str:
        """Apply the next frame from the front. Returns the request that it cancels, or ''."""
        message, body = messages.receive(self._sock)
        if isinstance(message, messages.Batch):
            self._number = message.batch
            position = 0
            for entry in message.items:
                part = body[position : position + entry["size"]]
                position += entry["size"]
                kind, accept = entry["content_type"], entry["accept"]
                headers = {"content-type": kind, "accept": accept, **entry["headers"]}
                context = Context(entry["id"], headers, self._runner.settings, entry["path"])
                self._arrived.append(Item(entry["id"], part, kind, accept, context))
        elif isinstance(message, messages.Adapt):
            self._send_message(self._runner.adapt(message))
        elif isinstance(message, messages.Credit) and message.id in self._credit:
            self._credit[message.id] += message.count
        elif isinstance(message, messages.Cancel):
            self._arrived = [item for item in self._arrived if item.id != message.id]
            if (job := self._jobs.get(message.id)) is not None:
                self._turns.leave(job)
            return message.id
        return ""

    def _send_message(self, message: messages.Message, body: bytes = b"") -> None:
        messages.send(self._sock, message, body)
        self._sent_at = time.monotonic()

    def _announce(self, state: str) -> None:
        """Report this worker's state to the front, if it has changed, or as a sign of life."""
        if self._arrived:
            return
        self._jobs = {name: job for name, job in self._jobs.items() if not job.is_done}
        if not len(self._turns):
            state = "idle"
        is_silent = state == "open" and time.monotonic() - self._sent_at > _SIGN_SECONDS
        if self._announced == (self._number, state) and not is_silent:
            return
        if state == "open" and self._turns.are_whole:
            return  # as if a batch without jobs were at work
        self._announced = (self._number, state)
        self._send_state(state)

    def _send_state(self, state: str) -> None:
        self._send_message(
            messages.State(
                state=state, batch=self._number, tokens=self._tokens, padded=self._padded,
                calls=self._calls, slices=self._turns.slices,
            )
        )  # fmt: skip
        self._tokens = self._padded = self._calls = self._turns.slices = 0

    def answer(self, batch: Sequence[Item]) -> None:
        """Answer each request of a batch, or create a job for it."""
        if "predict_batch_fn" not in self._runner.handlers:
            for item in batch:
                self._answer_alone(item)
            return
        apart: list[Item] = []
        lists: list[Item] = []
        merged: list[Item] = []
        for item in batch:
            if self._takes_turns and len(item.body) > _LONG_BODY:
                apart.append(item)
                continue
            self._turns.outside_until = time.thread_time() + _READ_SECONDS
            try:
                is_read = self._read(item)
            except TakesLong:
                apart.append(item)
                continue
            finally:
                self._turns.outside_until = None
            # Single texts stay in the batch, since one call of the model takes them all.
            is_list = item.size.rows > 1 and item.size.total > self._slice_tokens
            if is_read:
                (lists if self._takes_turns and is_list else merged).append(item)
        self._add_jobs(apart, self._answer_alone)
        self._add_jobs(lists, self._predict_alone)
        settings = self._runner.settings
        call_tokens = KINDS[settings.device_kind].call_tokens
        spent = 0
        for start in range(0, len(merged), settings.batch_size):
            some = merged[start : start + settings.batch_size]
            sizes = [item.size for item in some]
            for group in batching.plan(sizes, settings.batch_tokens, call_tokens):
                members = [some[index] for index in group.members]
                spent += group.padded
                work = partial(self._predict, members, group)
                if self._takes_turns and settings.device_kind == CUDA:
                    # While the device computes, the next batch is read.
                    self._turns.add([work], whole=True)
                elif self._takes_turns and spent > self._slice_tokens:
                    self._turns.add([work])
                else:
                    self._predict(members, group)

    @property
    def _slice_tokens(self) -> int:
        """Return the most tokens in one slice of work, unless a request cannot be cut."""
        most = self._runner.settings.batch_tokens
        if self._runner.settings.device_kind != CPU:
            return most
        return min(most, max(_LEAST_SLICE, int(self._tokens_per_second * _SLICE_SECONDS)))

    def _add_jobs(self, requests: Sequence[Item], work: Callable[[Item], None]) -> None:
        jobs = self._turns.add([partial(work, item) for item in requests])
        self._jobs.update(zip((item.id for item in requests), jobs, strict=True))

    def _read(self, item: Item) -> bool:
        """Read and measure a request. Returns False if that fails, after sending the error."""
        try:
            self._runner.read_input(item)
        except Exception as error:
            self._send_error(item, error)
            return False
        return True

    def _answer_alone(self, item: Item) -> None:
        """Read, predict and answer one request alone."""
        if "predict_batch_fn" in self._runner.handlers:
            if self._read(item):
                self._predict_alone(item)
        else:
            self._calls += 1
            self._reply(item, partial(self._runner.answer, item))

    def _predict_alone(self, item: Item) -> None:
        """Predict and answer one request that has been read."""
        (group,) = batching.plan([item.size], 0, 0)
        self._predict([item], group)

    def _predict(self, members: Sequence[Item], group: batching.CallGroup) -> None:
        """Predict requests together and answer each.

        A prediction that lasts (a stream, or a function to be called later) becomes a job.
        """
        runner = self._runner
        began, is_whole = time.monotonic(), self._turns.is_outside
        pairs = list(zip(members, runner.predict_batch(members), strict=True))
        lasting = {
            item.id
            for item, prediction in pairs
            if self._takes_turns and (isinstance(prediction, Iterator) or callable(prediction))
        }
        if is_whole and not lasting:
            rate = group.padded / max(1e-6, time.monotonic() - began)
            self._tokens_per_second = 0.8 * self._tokens_per_second + 0.2 * rate
        if "tokens_fn" in runner.handlers:
            self._tokens += group.tokens
            self._padded += group.padded
        self._calls += 1
        # Streams go last, so that complete answers do not wait for them.
        works: dict[str, Callable[[], None]] = {}
        for item, prediction in sorted(pairs, key=lambda pair: isinstance(pair[1], Iterator)):
            encode = partial(runner.finish, item, prediction, self._turns.pause)
            work = partial(self._reply, item, encode)
            if item.id in lasting and item.id not in self._jobs:
                works[item.id] = work
            else:
                work()
        self._jobs.update(zip(works, self._turns.add(list(works.values())), strict=True))

    def _reply(self, item: Item, encode: Callable[[], tuple[Any, str]]) -> None:
        """Send the body that `encode` returns, with its type, or the error that it raises."""
        try:
            body, content_type = encoded = encode()
            if self._takes_turns and not isinstance(body, bytes) and item.id not in self._jobs:
                # Only the result of output_fn shows that it is a stream. Its client may be slow.
                self._add_jobs([item], partial(self._reply, encode=lambda: encoded))
                return
            chunks: Iterator[Any] = iter(())
            is_stream = not isinstance(body, bytes)
            if is_stream:
                # Get the first chunk before the status is sent, so that a generator that fails at
                # once is answered with an error status instead of a truncated answer.
                chunks, body = itertools.chain([next(body, b"")], body), b""
            status, _ = item.context.get_response_status(0)
            content_type = item.context.get_response_content_type(0) or content_type
            answer = messages.Answer(
                id=item.id, status=status, type=" ".join(content_type.split()),
                headers=item.reply_headers, more=is_stream,
            )  # fmt: skip
            self._send_message(answer, body)
            if not is_stream:
                return
            self._credit[item.id] = messages.CHUNKS_AHEAD
            for chunk in chunks:
                if self._takes_turns:
                    self._turns.pause(lambda: self._credit[item.id] > 0)
                    self._credit[item.id] -= 1
                else:
                    # While a batch runs, the front sends cancellations only.
                    cancelled = set()
                    while self._has_news():
                        cancelled.add(self._take_frame())
                    if item.id in cancelled:
                        break
                data = media_types.as_bytes(chunk, content_type)
                self._send_message(messages.Chunk(id=item.id, more=True), data)
            self._send_message(messages.Chunk(id=item.id, more=False))
        except Exception as error:
            self._send_error(item, error)
        finally:
            self._credit.pop(item.id, None)

    def _send_error(self, item: Item, error: Exception) -> None:
        if not isinstance(error, Fault):
            # The stream broke after its status was sent: its last frame reports the error.
            error = Fault(500, "handler_failed", logs.mask(f"{type(error).__name__}: {error}"))
        if error.status >= 500:
            LOG.error("Request %s: %s", item.id, error, exc_info=error.__cause__ or error)
        details = {"code": error.code, "message": str(error), "param": error.param}
        self._send_message(messages.Error(id=item.id, status=error.status, error=details))
