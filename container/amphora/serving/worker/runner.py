"""Answers requests with a loaded model: the handlers, run item by item or merged into batches.

One item's fault is that item's answer only. When a merged prediction fails as a whole, its items
are predicted again one at a time, so that the good neighbours of a bad one are answered.
"""

from __future__ import annotations

import itertools
import json
import logging
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import amphora
from amphora.common import logs
from amphora.common.devices import KINDS
from amphora.serving.protocol import batching, framing, media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker.context import Context
from amphora.serving.worker.handlers import Handler, Handlers

LOG = logging.getLogger("amphora.worker")
# Headers of an answer that are the server's to say: a handler's would break the connection.
_SERVERS_OWN = {"content-length", "content-type", "transfer-encoding", "connection"}
# Exceptions that say so by their name alone: sagemaker_inference's, and the image's own.
_UNSUPPORTED = {"UnsupportedFormatError", "UnsupportedContentType"}
_WARM_UP = b'{"inputs": "A sentence to warm up with."}'


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine needs to know of the host; it travels as JSON."""

    model_dir: str
    device_kind: str
    device_index: int
    batch_size: int
    batch_tokens: int
    model_name: str = "model"


@dataclass
class Item:
    """One request in a worker."""

    id: str
    body: bytes
    content_type: str
    accept: str
    context: Context
    session: str = ""
    data: Any = None
    size: batching.Size = batching.UNKNOWN


@dataclass(frozen=True)
class Engine:
    """A loaded model with its handlers."""

    handlers: Handlers
    model: Any
    settings: Settings
    sessions: dict[str, dict[str, Any]]
    description: dict[str, Any] = field(default_factory=dict)
    """What `describe_fn` says of the model, for the front."""

    @cached_property
    def system_properties(self) -> dict[str, Any]:
        """What `Context.system_properties` holds."""
        return {
            "model_dir": self.settings.model_dir,
            # A worker sees its own GPU only, which is then the first.
            "gpu_id": 0 if self.settings.device_kind == "cuda" else None,
            "batch_size": self.settings.batch_size,
            "server_name": "amphora",
            "server_version": amphora.__version__,
            "limit_max_image_pixels": True,
        }

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What `Context.manifest` holds."""
        model = {
            "modelName": self.settings.model_name, "modelVersion": "1.0", "handler": "amphora"
        }  # fmt: skip
        for file in ("model.pt", "model.pth"):
            if (Path(self.settings.model_dir) / file).is_file():
                model["serializedFile"] = file
        return {"runtime": "python", "model": model}

    def context(
        self,
        request_id: str,
        headers: dict[str, str],
        session: dict[str, Any] | None = None,
        path: str = "/invocations",
    ) -> Context:
        """What a handler is told beside the body."""
        return Context(
            request_id, headers, self.system_properties, session, path,
            model_name=self.settings.model_name, manifest=self.manifest,
        )  # fmt: skip


def load(handlers: Handlers, settings: Settings) -> Engine:
    """Load the model, and answer once where a good request is known, so that `/ping` tells true.

    Raises whatever the handlers raise, and Fault where the first answer is an error.
    """
    engine = Engine(handlers, None, settings, {})
    context = engine.context("load", {})
    if handlers.pre_model_fn is not None:
        handlers.pre_model_fn(settings.model_dir, context=context)
    model = handlers.model_fn(settings.model_dir, context=context)
    handlers = handlers.completed(model, settings.model_dir)
    described = handlers.describe_fn
    description = {} if described is None else described(settings.model_dir, model, context=context)
    if not isinstance(description, dict):
        raise TypeError(f"describe_fn returned {description!r}, not a dict that JSON holds")
    # What JSON does not hold is found here, with its reason, and not on the way to the front.
    json.dumps(description)
    engine = replace(engine, handlers=handlers, model=model, description=description)
    if handlers.model_warmup_fn is not None:
        handlers.model_warmup_fn(settings.model_dir, model, context=context)
    elif handlers.image_only:
        item = Item("warm-up", _WARM_UP, media_types.JSON, media_types.JSON, context)
        _body_of(engine, item, _predict_alone(engine, _read_input(engine, item)))
    return engine


def serve(sock: socket.socket, engine: Engine) -> None:
    """Answer batches until the front closes the socket (EOFError)."""
    while True:
        header, body = framing.receive(sock)
        if header["op"] != "batch":
            _notice(engine, header)
            continue
        framing.send(sock, {"op": "begun"})
        tokens, padded, calls = _answer(sock, engine, list(_items(engine, header, body)))
        done = {"op": "idle", "tokens": tokens, "padded": padded, "calls": calls}
        framing.send(sock, done)


def _notice(engine: Engine, header: framing.Header) -> str:
    """Note what the front says beside batches. Returns the request that it cancels, or ''."""
    if header["op"] == "forget":
        engine.sessions.pop(header["session"], None)
    return str(header.get("id", ""))


def _items(engine: Engine, header: framing.Header, body: bytes) -> Iterator[Item]:
    position = 0
    for entry in header["items"]:
        part = body[position : position + entry["size"]]
        position += entry["size"]
        session = engine.sessions.setdefault(entry["session"], {}) if entry["session"] else None
        headers = {"content-type": entry["content_type"], "accept": entry["accept"]}
        headers.update(entry["headers"])
        context = engine.context(entry["id"], headers, session, entry.get("path", "/invocations"))
        yield Item(
            entry["id"], part, entry["content_type"], entry["accept"], context, entry["session"]
        )


def _answer(sock: socket.socket, engine: Engine, items: list[Item]) -> tuple[int, int, int]:
    """Send one answer for each item. Returns tokens, padded tokens and prediction calls."""
    if engine.handlers.predict_batch_fn is None:
        for item in items:
            _answer_alone(sock, engine, item)
        return 0, 0, len(items)
    if items[0].context.session is not None:
        # A session's requests come alone, and have a context that a merged prediction has not.
        _answer_alone(sock, engine, items[0])
        return 0, 0, 1
    ready = [item for item in items if _prepare(sock, engine, item)]
    call_tokens = KINDS[engine.settings.device_kind].call_tokens
    groups = batching.plan([item.size for item in ready], engine.settings.batch_tokens, call_tokens)
    for group in groups:
        _answer_group(sock, engine, [ready[place] for place in group.members])
    counted = engine.handlers.tokens_fn is not None
    tokens, padded = (sum(g.tokens for g in groups), sum(g.padded for g in groups))
    return (tokens, padded, len(groups)) if counted else (0, 0, len(groups))


def _answer_alone(sock: socket.socket, engine: Engine, item: Item) -> None:
    try:
        if engine.handlers.transform_fn is not None:
            _send(sock, engine, item, _transform(engine, item))
            return
        prediction = _predict_alone(engine, _read_input(engine, item))
        _send(sock, engine, item, _body_of(engine, item, prediction))
    except Exception as error:
        _send_error(sock, item, error)


def _prepare(sock: socket.socket, engine: Engine, item: Item) -> bool:
    """Read an item's input and measure it; an item whose input is bad is answered at once."""
    try:
        _read_input(engine, item)
        if engine.handlers.tokens_fn is not None:
            counts = _call(engine.handlers.tokens_fn, item, item.data, engine.model)
            item.size = batching.Size.of(counts)
    except Exception as error:
        _send_error(sock, item, error)
        return False
    return True


def _answer_group(sock: socket.socket, engine: Engine, items: list[Item]) -> None:
    predicted = list(zip(items, _predict_group(engine, items), strict=True))
    # Streams last: the whole answers need not wait for them.
    for item, prediction in sorted(predicted, key=lambda pair: isinstance(pair[1], Iterator)):
        try:
            if isinstance(prediction, Exception):
                raise prediction
            _send(sock, engine, item, _body_of(engine, item, prediction))
        except Exception as error:
            _send_error(sock, item, error)


def _predict_group(engine: Engine, items: list[Item]) -> list[Any]:
    """One prediction or exception for each item."""
    try:
        return _predict_merged(engine, items)
    except Exception as error:
        if len(items) == 1:
            return [error]
        LOG.warning(
            "A merged prediction of %d requests failed (%s: %s); they are predicted one at a time.",
            len(items), type(error).__name__, error,
        )  # fmt: skip
        return [prediction for item in items for prediction in _predict_group(engine, [item])]


def _predict_merged(engine: Engine, items: list[Item]) -> list[Any]:
    handler = _needed(engine.handlers.predict_batch_fn)
    inputs = [item.data for item in items]
    predictions = list(_call(handler, items[0], inputs, engine.model))
    if len(predictions) != len(items):
        raise _fault_of(
            handler, ValueError(f"{len(items)} inputs, but {len(predictions)} predictions")
        )
    return [
        _fault_of(handler, value) if isinstance(value, Exception) else value
        for value in predictions
    ]


def _read_input(engine: Engine, item: Item) -> Item:
    handler = _needed(engine.handlers.input_fn)
    body = handler.body(item.body, item.content_type)
    item.data = _call(handler, item, body, item.content_type)
    return item


def _predict_alone(engine: Engine, item: Item) -> Any:
    return _call(_needed(engine.handlers.predict_fn), item, item.data, engine.model)


def _body_of(engine: Engine, item: Item, prediction: Any) -> tuple[Any, str]:
    handler = _needed(engine.handlers.output_fn)
    return _as_answer(handler, _call(handler, item, prediction, item.accept), item)


def _transform(engine: Engine, item: Item) -> tuple[Any, str]:
    handler = _needed(engine.handlers.transform_fn)
    body = handler.body(item.body, item.content_type)
    result = _call(handler, item, engine.model, body, item.content_type, item.accept)
    return _as_answer(handler, result, item)


def _as_answer(handler: Handler, result: Any, item: Item) -> tuple[Any, str]:
    try:
        return media_types.answer(result, item.accept)
    except TypeError as error:
        raise _fault_of(handler, error) from error


def _needed(handler: Handler | None) -> Handler:
    """A function that `Handlers.completed` has seen to."""
    assert handler is not None
    return handler


def _call(handler: Handler, item: Item, *args: Any) -> Any:
    try:
        return handler(*args, context=item.context)
    except Fault:
        raise
    except Exception as error:
        raise _fault_of(handler, error) from error


def _fault_of(handler: Handler, error: Exception) -> Fault:
    """The answer to a handler's exception: whose fault it is, by its kind and its handler."""
    status = _status_of(handler.name, error)
    code = getattr(error, "code", None) if getattr(error, "status_code", None) == status else None
    if not isinstance(code, str):
        codes = {400: "bad_request", 406: "not_acceptable", 415: "unsupported_content_type"}
        code = codes.get(status, "handler_failed")
    told = str(error) if status < 500 else f"failed: {_told(error)}"
    fault = Fault(status, code, logs.mask(f"{handler.name}: {told}"))
    fault.__cause__ = error
    return fault


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _status_of(name: str, error: Exception) -> int:
    declared = getattr(error, "status_code", None)
    if isinstance(declared, int) and 400 <= declared <= 599:
        return declared
    if type(error).__name__ in _UNSUPPORTED:
        return 406 if name == "output_fn" else 415
    # RecursionError is what json.loads raises for a body that is nested too deeply.
    if isinstance(error, (ValueError, RecursionError)) and name in ("input_fn", "tokens_fn"):
        return 400
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) and name == "transform_fn":
        return 400
    return 500


def _send(sock: socket.socket, engine: Engine, item: Item, answer: tuple[Any, str]) -> None:
    body, content_type = answer
    if isinstance(body, bytes):
        framing.send(sock, _head(engine, item, content_type), body)
    else:
        _stream(sock, engine, item, content_type, body)


def _head(engine: Engine, item: Item, content_type: str) -> framing.Header:
    status, _ = item.context.get_response_status(0)
    content_type = item.context.get_response_content_type(0) or content_type
    content_type = " ".join(content_type.split())
    headers = _reply_headers(item)
    header = {"id": item.id, "status": status, "type": content_type, "headers": headers}
    return {**header, "closed": _closes(engine, item)}


def _closes(engine: Engine, item: Item) -> bool:
    """Whether the handlers have ended the item's session, which is then forgotten."""
    if item.context.session_closed:
        engine.sessions.pop(item.session, None)
    return item.context.session_closed


def _reply_headers(item: Item) -> dict[str, str]:
    """A line break in a value would begin another header, or the body: none is passed on."""
    headers = item.context.response_headers
    return {
        name: " ".join(str(value).split())
        for name, value in headers.items()
        if name.lower() not in _SERVERS_OWN
    }


def _stream(
    sock: socket.socket, engine: Engine, item: Item, content_type: str, chunks: Iterator[Any]
) -> None:
    """Send chunks as they come. The first is awaited before the status is sent, so that a
    generator that fails at once is answered with an error rather than with half an answer."""
    first = next(chunks, b"")
    framing.send(sock, {**_head(engine, item, content_type), "more": True})
    for chunk in itertools.chain([first], chunks):
        if item.id in _cancelled(sock, engine):
            break
        framing.send(sock, {"id": item.id, "more": True}, media_types.as_bytes(chunk))
    framing.send(sock, {"id": item.id, "more": False, "closed": _closes(engine, item)})


def _cancelled(sock: socket.socket, engine: Engine) -> set[str]:
    """The requests whose clients have gone: all that the front writes while a batch runs."""
    found = set()
    while select.select([sock], [], [], 0)[0]:
        header, _ = framing.receive(sock)
        found.add(_notice(engine, header))
    return found


def _send_error(sock: socket.socket, item: Item, error: Exception) -> None:
    if not isinstance(error, Fault):
        # A stream that broke: what was sent cannot be taken back, so that its end says so.
        error = Fault(500, "handler_failed", logs.mask(_told(error)))
    if error.status >= 500:
        LOG.error("Request %s: %s", item.id, error, exc_info=error.__cause__ or error)
    header = {
        "id": item.id, "status": error.status, "headers": _reply_headers(item),
        "error": {"code": error.code, "message": str(error)},
    }  # fmt: skip
    framing.send(sock, header)
