"""A worker's conversation with the front process: batches of requests in, their answers out.

One request's fault is that request's answer only.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
from collections.abc import Iterator
from typing import Any

from amphora.common import logs
from amphora.common.devices import KINDS
from amphora.serving.protocol import batching, framing, media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker.runner import Item, ModelRunner

LOG = logging.getLogger("amphora.worker")


def serve(sock: socket.socket, runner: ModelRunner) -> None:
    """Answer batches until the front process closes the socket (EOFError)."""
    while True:
        header, body = framing.receive(sock)
        if header["op"] != "batch":
            _heed(runner, header)
            continue
        framing.send(sock, {"op": "begun"})
        tokens, padded, calls = answer(sock, runner, list(items(runner, header, body)))
        framing.send(sock, {"op": "idle", "tokens": tokens, "padded": padded, "calls": calls})


def _heed(runner: ModelRunner, notice: framing.Header) -> str:
    """Do what a notice between batches says. Returns the request that it cancels, or ''."""
    if notice["op"] == "forget":
        runner.sessions.pop(notice["session"], None)
    return str(notice.get("id", ""))


def items(runner: ModelRunner, header: framing.Header, body: bytes) -> Iterator[Item]:
    """The requests of a batch's frame."""
    position = 0
    for entry in header["items"]:
        part = body[position : position + entry["size"]]
        position += entry["size"]
        session = runner.sessions.setdefault(entry["session"], {}) if entry["session"] else None
        headers = {"content-type": entry["content_type"], "accept": entry["accept"]}
        headers.update(entry["headers"])
        context = runner.context(entry["id"], headers, session, entry.get("path", "/invocations"))
        yield Item(
            entry["id"], part, entry["content_type"], entry["accept"], context, entry["session"]
        )


def answer(sock: socket.socket, runner: ModelRunner, batch: list[Item]) -> tuple[int, int, int]:
    """Send one answer for each item. Returns tokens, padded tokens and prediction calls."""
    # A session's requests come alone, and have a context, which a merged prediction lacks.
    if runner.handlers.predict_batch_fn is None or batch[0].context.session is not None:
        for item in batch:
            try:
                _send(sock, runner, item, runner.answer(item))
            except Exception as error:
                _send_error(sock, item, error)
        return 0, 0, len(batch)
    readable = []
    for item in batch:
        try:
            runner.read_input(item)
            runner.measure(item)
            readable.append(item)
        except Exception as error:
            _send_error(sock, item, error)
    call_tokens = KINDS[runner.settings.device_kind].call_tokens
    sizes = [item.size for item in readable]
    groups = batching.plan(sizes, runner.settings.batch_tokens, call_tokens)
    for group in groups:
        members = [readable[place] for place in group.members]
        pairs = zip(members, runner.predict_batch(members), strict=True)
        # Streams last: the whole answers need not wait for them.
        for item, prediction in sorted(pairs, key=lambda pair: isinstance(pair[1], Iterator)):
            try:
                if isinstance(prediction, Exception):
                    raise prediction
                _send(sock, runner, item, runner.encode(item, prediction))
            except Exception as error:
                _send_error(sock, item, error)
    if runner.handlers.tokens_fn is None:
        return 0, 0, len(groups)
    tokens, padded = (sum(group.tokens for group in groups), sum(group.padded for group in groups))
    return tokens, padded, len(groups)


def _send(sock: socket.socket, runner: ModelRunner, item: Item, encoded: tuple[Any, str]) -> None:
    body, content_type = encoded
    chunks: Iterator[Any] | None = None
    if not isinstance(body, bytes):
        # The first chunk is awaited before the status is sent, so that a generator that fails at
        # once is answered with an error instead of with half an answer.
        chunks, body = itertools.chain([next(body, b"")], body), b""
    status, _ = item.context.get_response_status(0)
    content_type = item.context.get_response_content_type(0) or content_type
    header = {
        "id": item.id, "status": status, "type": " ".join(content_type.split()),
        "headers": item.reply_headers, "closed": runner.ends_session(item),
    }  # fmt: skip
    if chunks is None:
        framing.send(sock, header, body)
        return
    framing.send(sock, {**header, "more": True})
    for chunk in chunks:
        # All that the front writes while a batch runs are notices.
        cancelled = set()
        while select.select([sock], [], [], 0)[0]:
            notice, _ = framing.receive(sock)
            cancelled.add(_heed(runner, notice))
        if item.id in cancelled:
            break
        framing.send(sock, {"id": item.id, "more": True}, media_types.as_bytes(chunk))
    framing.send(sock, {"id": item.id, "more": False, "closed": runner.ends_session(item)})


def _send_error(sock: socket.socket, item: Item, error: Exception) -> None:
    if not isinstance(error, Fault):
        # A stream broke: what was sent cannot be taken back, so that its end says so.
        error = Fault(500, "handler_failed", logs.mask(f"{type(error).__name__}: {error}"))
    if error.status >= 500:
        LOG.error("Request %s: %s", item.id, error, exc_info=error.__cause__ or error)
    header = {
        "id": item.id, "status": error.status, "headers": item.reply_headers,
        "error": {"code": error.code, "message": str(error)},
    }  # fmt: skip
    framing.send(sock, header)
