"""Runs a `handler_service.py` of AWS's model servers: `handle(data, context)`, or a class.

Such a file drives the whole request by itself, often with `sagemaker_inference`'s
`DefaultHandlerService` and `Transformer`, which look for the user's functions on their own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from amphora.common.errors import CodeError
from amphora.serving import handler_files
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker import modules
from amphora.serving.worker.context import Context

LOG = logging.getLogger("amphora.worker")
Entry = Callable[[Any, Context], Any]


def find(code_dir: Path, program: str | None) -> ModuleType | None:
    """Return the module of `handler_service.py`, or None if the code folder has none that serves.

    Raises:
        CodeError: It cannot be imported, or has neither `handle` nor a class of a service.
    """
    path = code_dir / f"{handler_files.HANDLER_SERVICE}.py"
    if not path.is_file():
        return None
    module = modules.load(path, handler_files.HANDLER_SERVICE, code_dir)
    if serves(module):
        return module
    if program is not None and handler_files.program_path(code_dir, program) == path:
        raise CodeError(
            f"{path} has neither a function handle(data, context) nor a class with the methods"
            " initialize(context) and handle(data, context).",
            "Write one of them, or define model_fn, input_fn, predict_fn and output_fn"
            " in inference.py.",
        )
    return None


def serves(module: ModuleType) -> bool:
    """Return whether a module is a handler service."""
    return callable(getattr(module, "handle", None)) or bool(_classes(module))


def _classes(module: ModuleType) -> list[type[Any]]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and callable(getattr(value, "handle", None))
        and callable(getattr(value, "initialize", None))
    ]


def open_service(module: ModuleType) -> Callable[[str, Context], Entry]:
    """Return the `model_fn` of a service, which initializes it and returns its entry."""
    handle = getattr(module, "handle", None)
    if callable(handle):

        def start(model_dir: str, context: Context) -> Entry:
            # AWS's servers make this call at start, and a service then loads its model.
            handle(None, context)
            entry: Entry = handle
            return entry

        return start
    classes = _classes(module)
    if len(classes) > 1:
        names = ", ".join(kind.__name__ for kind in classes)
        raise CodeError(f"{module.__file__} has several services: {names}.", "Leave one of them.")

    def start_class(model_dir: str, context: Context) -> Entry:
        service = classes[0]()
        service.initialize(context)
        entry: Entry = service.handle
        return entry

    return start_class


def call_service(
    entry: Entry, body: bytes, content_type: str, accept: str, context: Context
) -> tuple[Any, str]:
    """Answer a batch of one request, as `transform_fn`.

    Raises:
        Fault: The service set a status of 400 or more; its text is in the log.
    """
    result = entry([{"body": bytearray(body)}], context)
    if not isinstance(result, (list, tuple)) or len(result) != 1:
        raise TypeError(f"handle returned {str(result)[:80]!r}, not a list with one answer")
    status, phrase = context.get_response_status(0)
    if status >= 400:
        LOG.error("Request %s: the service answered %d: %s", context.request_id, status, result[0])
        code = "handler_failed" if status >= 500 else "bad_request"
        raise Fault(status, code, f"{handler_files.HANDLER_SERVICE}: {phrase or 'failed'}")
    return result[0], context.get_response_content_type(0) or ""
