"""Modules that a library imports for one function that hardly anybody calls: imported by the call.

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
    """While it is open, `from name import function` gives a function that imports `name` when it is
    called. Whatever else is asked of the module imports it at once, as ever.

    Args:
        name: The module. Nothing changes if it is imported already, or is not there.
        function: The only name of it that need not be there at once.
    """
    spec = None if name in sys.modules else _spec_of(name)
    if spec is None:
        yield
        return

    def load() -> ModuleType:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return importlib.import_module(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(load(), function)(*args, **kwargs)

    # Who looks through all modules (inspect) asks for its file, which the specification tells.
    stand_in = importlib.util.module_from_spec(spec)
    stand_in.__dict__.update(
        {function: call, "__getattr__": lambda attribute: getattr(load(), attribute)}
    )
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        # What is imported from now on finds the module itself.
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


def _spec_of(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
