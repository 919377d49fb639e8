"""Calls the handlers of a loaded model, for one request or for a merged batch."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amphora.common import logs, transformers4
from amphora.common.errors import CodeError
from amphora.serving.api import exchange
from amphora.serving.api.canonical import ModelTraits
from amphora.serving.api.exchange import Exchange
from amphora.serving.protocol import batching, media_types, routes
from amphora.serving.protocol.media_types import Fault
from amphora.serving.protocol.messages import Adapt, Adapted
from amphora.serving.settings import ServerSettings
from amphora.serving.worker.context import Context
from amphora.serving.worker.handlers import Handler, Handlers

LOG = logging.getLogger("amphora.worker")
# Headers that only the server sets: a handler's value would break the connection.
_RESERVED_HEADERS = {"content-length", "content-type", "transfer-encoding", "connection"}
# Exceptions of sagemaker_inference and of the image's handlers, recognised by name.
_UNSUPPORTED = {"UnsupportedFormatError", "UnsupportedContentType"}
_ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
"""Header that names a LoRA adapter."""
_HUB_CLIENTS = ("hf_hub/", "@huggingface/inference/")
"""Clients that read the labels of a text from a list in a list, by their User-Agent."""
_FULL = 507
"""A multi-model endpoint unloads other models and asks again."""
_NO_MEMORY = re.compile(
    r"CUDA (driver )?error: out of memory|_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
)
"""What CUDA and its libraries say, of which torch makes a RuntimeError."""


@dataclass
class Item:
    """One request in a worker."""

    id: str
    body: bytes
    content_type: str
    accept: str
    context: Context
    data: Any = None
    """What `input_fn` returned; of an `exchange` a list, with what `request_fn` returned for each
    of its requests, or why it was refused."""
    exchange: Exchange | None = None
    """The requests in the body, if the handlers declare `request_fn`."""
    size: batching.Size = batching.UNKNOWN

    @property
    def inputs(self) -> list[Any]:
        """Return what `predict_batch_fn` takes of it."""
        if self.exchange is None:
            return [self.data]
        return [part for part in self.data if not isinstance(part, Fault)]

    @property
    def reply_headers(self) -> dict[str, str]:
        """Return the headers that the handlers added to the answer, without those of the server.

        Line breaks in a value become spaces, since they would start another header or the body.
        """
        return {
            name: " ".join(str(value).split())
            for name, value in self.context.get_response_headers(0).items()
            if name.lower() not in _RESERVED_HEADERS
        }


@dataclass(frozen=True)
class ModelRunner:
    """A loaded model with its handlers. Methods raise Fault if a handler fails."""

    handlers: Mapping[str, Handler]
    model: Any
    settings: ServerSettings
    description: dict[str, Any] = field(default_factory=dict)
    """The result of `describe_fn`, for the front process."""
    traits: ModelTraits = field(default_factory=ModelTraits)
    """What `describe_fn` says of bodies, if `request_fn` takes parsed requests."""

    def answer(self, item: Item) -> tuple[Any, str]:
        """Answer one request: return its body (bytes, or an iterator to stream) and type."""
        if (handler := self.handlers.get("transform_fn")) is None:
            self.read_input(item)
            prediction = _call(self.handlers["predict_fn"], item, item.data, self.model)
            return self.encode(item, prediction)
        body = handler.body(item.body, item.content_type)
        result = _call(handler, item, self.model, body, item.content_type, item.accept)
        return _as_answer(handler, result, item)

    def read_input(self, item: Item) -> None:
        """Set the item's data, by `input_fn`, and its size if the handlers count tokens."""
        if "request_fn" in self.handlers:
            self._read_requests(item)
            return
        handler = self.handlers["input_fn"]
        body = handler.body(item.body, item.content_type)
        item.data = _call(handler, item, body, item.content_type)
        self._measure(item, [item.data])

    def _read_requests(self, item: Item) -> None:
        """Read a body's requests, and prepare each by `request_fn`. A record that is refused fails
        alone, unless it is the only one."""
        name = item.context.headers.get(_ADAPTER, "")
        if name and self.traits.adapters is None:
            raise Fault(
                404,
                "model_not_found",
                f"{_ADAPTER} is {name!r}, and this model has no adapters: AMPHORA_ADAPTERS is the"
                " most that encoders, and decoders by vLLM, may have. Leave the header out.",
            )
        traits = self.traits.addressed(name)
        item.exchange = exchange.read(
            item.context.path, item.body, item.content_type, traits,
            is_transform=self.settings.is_transform,
        )  # fmt: skip
        if routes.PREDICT in traits.routes:
            agent = item.context.headers.get("User-Agent", "")
            item.exchange.nests_labels = any(map(agent.__contains__, _HUB_CLIENTS))
        item.data = []
        spent: dict[Any, int] = {}
        is_first = True
        while (index := len(item.data)) < len(item.exchange.requests):
            request = item.exchange.requests[index]
            try:
                adapter = request.adapter or traits.adapter
                values = {**request.values, "spent": spent, "adapter": adapter}
                item.data.append(_call(self.handlers["request_fn"], item, values, self.model))
            except Fault as fault:
                if fault.status >= 500:
                    raise
                if fault.status == 400 and fault.param is None and item.exchange.split(index):
                    continue
                message, param = map(request.renamed, (str(fault), fault.param or ""))
                item.data.append(Fault(fault.status, fault.code, message, param or None))
                if is_first:  # only it may be raised; the frames of others would take memory
                    item.data[-1].__cause__, is_first = fault.__cause__, False
        if not item.inputs:
            # Raises the first, but in a batch transform.
            item.exchange.write(item.data, item.accept)
        self._measure(item, item.inputs)

    def adapt(self, order: Adapt) -> Adapted:
        """Load or unload an adapter. Its requests are those that name it from now on."""
        known = self.traits.adapters
        handler = self.handlers.get("load_adapter_fn" if order.folder else "unload_adapter_fn")
        if known is None or handler is None:
            return Adapted(name=order.name, description={}, reason="the handlers take no adapters")
        context = Context("adapt", {}, self.settings)
        try:
            if not order.folder:
                known.pop(order.name, None)
                handler(order.name, self.model, context=context)
                return Adapted(name=order.name, description={})
            folder = str(self.settings.model_dir)
            described = handler(order.name, order.folder, folder, self.model, context=context)
        except Exception as error:
            reason = str(error)
            if not getattr(error, "is_users_mistake", False):
                LOG.exception("The adapter %s could not be loaded.", order.name)
                reason = f"{type(error).__name__}: {error}"
            return Adapted(name=order.name, description={}, reason=logs.mask(reason))
        known[order.name] = replace(
            ModelTraits.from_description(described), name=order.name, adapter=order.name
        )
        described = {key: value for key, value in described.items() if key != "bodies"}
        return Adapted(name=order.name, description=described)

    def _measure(self, item: Item, parts: Sequence[Any]) -> None:
        if "tokens_fn" not in self.handlers:
            return
        counts: list[int] = []
        for part in parts:
            count = _call(self.handlers["tokens_fn"], item, part, self.model)
            counts += [count] if isinstance(count, int) else count
        pads = self.description.get("padding") is not False
        item.size = batching.Size.from_tokens(counts, pads)

    def predict_batch(self, items: Sequence[Item]) -> list[Any]:
        """Return a prediction or an exception for each item, by `predict_batch_fn`.

        If the prediction fails as a whole, its items are predicted again one at a time, so that
        the good neighbours of a bad one are answered. Raises nothing.
        """
        handler = self.handlers["predict_batch_fn"]
        try:
            groups = [item.inputs for item in items]
            inputs = [data for group in groups for data in group]
            flat = list(_call(handler, items[0], inputs, self.model)) if inputs else []
            if len(flat) != len(inputs):
                counts = f"{len(inputs)} inputs, but {len(flat)} predictions"
                raise _fault_of(handler, ValueError(counts))
            rest = iter(flat)
            grouped = [[next(rest) for _ in group] for group in groups]
            predictions = [some[0] if len(some) == 1 else _joined(some) for some in grouped]
        except Exception as error:
            _free_device(error)
            if len(items) == 1:
                return [error if isinstance(error, Fault) else _fault_of(handler, error)]
            LOG.warning(
                "A merged prediction of %d requests failed (%s: %s)."
                " They are predicted one at a time.",
                len(items), type(error).__name__, error,
            )  # fmt: skip
            return [prediction for item in items for prediction in self.predict_batch([item])]
        return [
            _fault_of(handler, value) if isinstance(value, Exception) else value
            for value in predictions
        ]

    def encode(
        self, item: Item, prediction: Any, pause: Callable[[], None] = lambda: None
    ) -> tuple[Any, str]:
        """Return the body and type of an answer, by `output_fn` or in the form of its API."""
        if item.exchange is None:
            handler = self.handlers["output_fn"]
            return _as_answer(handler, _call(handler, item, prediction, item.accept), item)
        rest = iter([prediction] if len(item.inputs) == 1 else prediction)
        handler, predictions = self.handlers["predict_batch_fn"], []
        for part in item.data:
            part = part if isinstance(part, Fault) else next(rest)
            is_fault = isinstance(part, Exception) and not isinstance(part, Fault)
            predictions.append(_fault_of(handler, part) if is_fault else part)
            if isinstance(predictions[-1], Fault) and predictions[-1].status >= 500:
                raise predictions[-1]
        try:
            answer = item.exchange.write(predictions, item.accept, pause)
        except Fault:
            raise
        except Exception as error:
            raise _fault_of(handler, error) from error
        for name, value in item.exchange.headers.items():
            item.context.add_response_property(name, value)
        return answer

    def finish(
        self, item: Item, prediction: Any, pause: Callable[[], None] = lambda: None
    ) -> tuple[Any, str]:
        """Return the body and type of an answer, for a prediction of `predict_batch_fn`.

        If the handlers take turns, that may be a function to be called later.
        """
        if "turns_fn" in self.handlers and callable(prediction):
            handler = self.handlers["predict_batch_fn"]
            prediction = _call(replace(handler, function=prediction, takes_context=False), item)
        if isinstance(prediction, Exception):
            raise prediction
        return self.encode(item, prediction, pause)


def _joined(parts: Sequence[Any]) -> Any:
    """Return the predictions of one body as one: a function that returns them, if one is."""
    if not any(map(callable, parts)):
        return list(parts)

    def later() -> list[Any]:
        results: list[Any] = []
        for part in parts:
            try:
                results.append(part() if callable(part) else part)
            except Exception as error:
                results.append(error)
        return results

    return later


def load(handlers: Handlers, settings: ServerSettings) -> ModelRunner:
    """Load the model, and let the handlers answer a test request before `/ping` is 200.

    Raises whatever the handlers raise.
    """
    folder, functions = str(settings.model_dir), handlers.functions
    context = Context("load", {}, settings)
    if "pre_model_fn" in functions:
        functions["pre_model_fn"](folder, context=context)
    try:
        model = functions["model_fn"](folder, context=context)
    except Exception as error:
        if not (advice := transformers4.remedy_of(error)):
            raise
        raise CodeError(f"model_fn: {type(error).__name__}: {error}.", advice) from error
    functions, description = handlers.completed(model).functions, {}
    if "describe_fn" in functions:
        description = functions["describe_fn"](folder, model, context=context)
    if not isinstance(description, dict):
        raise TypeError(f"describe_fn returned {description!r}, not a dict that JSON can hold")
    traits = ModelTraits.from_description(description)
    if description.get("adapters"):
        traits = replace(traits, adapters={})
    description = {name: value for name, value in description.items() if name != "bodies"}
    # Fails here if JSON cannot hold it, with the reason.
    json.dumps(description)
    runner = ModelRunner(functions, model, settings, description=description, traits=traits)
    if "model_warmup_fn" in functions:
        functions["model_warmup_fn"](folder, model, context=context)
    return runner


def _call(handler: Handler, item: Item, *args: Any) -> Any:
    try:
        return handler(*args, context=item.context)
    except Fault:
        raise
    except (Exception, SystemExit) as error:
        _free_device(error)
        raise _fault_of(handler, error) from error


def _free_device(error: BaseException) -> None:
    """Free the device memory of a call that ran out of it.

    The error's frames hold the call's tensors, and torch's cache holds what was freed, so that
    later requests, and other models on the same device, would run out of memory too.
    """
    if not _is_full(error):
        return
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _is_full(error: BaseException) -> bool:
    """Return whether a device is out of memory, by the name of torch's exception or its text."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
        return True
    return "OutOfMemoryError" in kinds or getattr(error, "status_code", None) == _FULL


def _as_answer(handler: Handler, result: Any, item: Item) -> tuple[Any, str]:
    try:
        return media_types.answer(result, item.accept)
    except TypeError as error:
        raise _fault_of(handler, error) from error


def _fault_of(handler: Handler, error: BaseException) -> Fault:
    """Return the error for a handler's exception, with a status by its kind and handler."""
    status = 500
    declared = getattr(error, "status_code", None)
    # json.loads raises RecursionError for a body that is nested too deeply.
    is_unreadable = isinstance(error, (ValueError, RecursionError))
    is_undecodable = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
    if isinstance(declared, int) and 400 <= declared <= 599:
        status = declared
    elif _is_full(error):
        status = _FULL
    elif type(error).__name__ in _UNSUPPORTED:
        status = 406 if handler.name == "output_fn" else 415
    elif (handler.name in ("input_fn", "request_fn", "tokens_fn") and is_unreadable) or (
        handler.name == "transform_fn" and is_undecodable
    ):
        status = 400
    code = getattr(error, "code", None) if declared == status else None
    if not isinstance(code, str):
        codes = {400: "bad_request", 406: "not_acceptable", 415: "unsupported_content_type"}
        code = "out_of_memory" if status == _FULL else codes.get(status, "handler_failed")
    reason = str(error)
    if status >= 500:
        reason = f"failed: {type(error).__name__}: {error}"
        if advice := transformers4.remedy_of(error):
            reason = f"{reason.rstrip('.')}. {advice}"
    # An error that declares its status is written for clients, who do not know the functions.
    if status >= 500 or declared != status:
        reason = f"{handler.name}: {reason}"
    param = getattr(error, "param", None) if status < 500 else None
    fault = Fault(status, code, logs.mask(reason), param)
    fault.__cause__ = error
    return fault
