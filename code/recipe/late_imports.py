"""Defer imports that libraries need for one rarely used function, until that function is called.

transformers' losses of object detectors import scipy.optimize, whatever the model is, and a command
of accelerate's boto3: 0.25 CPU-seconds and 30 MB of each start of a server (docs/LAB.md).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def imported_by_call(name: str, function: str) -> Iterator[None]:
    """Let `from name import function` return a function that imports `name` when it is called.

    Any other attribute of the module imports it immediately.

    Args:
        name: The module. Nothing changes if it is already imported or not installed.
        function: The name whose import is deferred.
    """
    spec = None
    if name not in sys.modules:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
    if spec is None:
        yield
        return

    def load() -> ModuleType:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return importlib.import_module(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(load(), function)(*args, **kwargs)

    # inspect looks at the file of all modules, which the specification provides.
    stand_in = importlib.util.module_from_spec(spec)
    stand_in.__dict__.update(
        {function: call, "__getattr__": lambda attribute: getattr(load(), attribute)}
    )
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        # Later imports get the module itself.
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
