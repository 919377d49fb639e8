"""Runs at the start of every Python process of the user's script, since it is on PYTHONPATH.

- Records the exception that ends a process, so that nobody has to guess it from stderr.
- Puts secret hyperparameters, which must not stand in a command line, back into `sys.argv`.
- Makes stdout and stderr line-buffered.
- After the script imports `evaluate`: `evaluate.load` finds the modules that the image ships.
- After the script imports `accelerate`: `PartialState` respects ACCELERATE_USE_CPU.

Uses the standard library only and imports as little as possible, because it runs in other people's
processes.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import types
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ERROR_DIR = os.environ.get("AMPHORA_ERROR_DIR", "")
_MODULES = os.environ.get("AMPHORA_EVALUATE_MODULES", "")
_IS_LAUNCHER = os.environ.get("AMPHORA_LAUNCHER") == "1" and "RANK" not in os.environ
_SECRET = "amphora-secret:"


def _record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import json
    import time
    import traceback

    chain, handled = _behind(error)
    if _is_mistake(error):
        chain, handled, trace = [error.with_traceback(None)], None, None
    # Which workers torchrun saw fail: the exception that ends it carries them.
    failures = getattr(error, "failures", None)
    failures = failures if isinstance(failures, dict) else {}
    command = getattr(chain[-1], "cmd", None)
    ranks = (os.environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    record = {
        "time": time.time(),
        "pid": os.getpid(),
        "parents": _parents(),
        "rank": next(filter(None, ranks), None),
        "host": os.environ.get("SM_CURRENT_HOST"),
        "script_dir": os.environ.get("AMPHORA_SCRIPT_DIR", ""),
        "errors": [_told(each) for each in chain],
        "handled": handled and _told(handled),
        "command": command if isinstance(command, str) else list(map(str, command or ())),
        "traceback": "".join(traceback.format_exception(kind, error, trace)) if trace else "",
        "workers": [
            {"rank": rank, "pid": f.pid, "exit_code": f.exitcode, "time": f.timestamp}
            for rank, f in failures.items()
        ],
    }
    path = os.path.join(_ERROR_DIR, f"{os.getpid()}.json")
    with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(record, file)
    os.replace(path + ".part", path)


def _behind(error: BaseException) -> tuple[list[BaseException], BaseException | None]:
    """The exceptions from the last raised to the innermost cause; and one that was being handled
    when another, of its own, was raised.

    An exception raised by the `except` block itself stands for the one it handles; one raised by
    what that block calls does not.
    """
    chain: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and all(inner is not each for each in chain):
        chain.append(error := inner)
        group, context = getattr(error, "exceptions", None), error.__context__
        if isinstance(group, tuple) and group and isinstance(group[0], BaseException):
            inner = group[0]
        elif error.__cause__ is not None or error.__suppress_context__ or context is None:
            inner = error.__cause__
        else:
            raised, caught = error.__traceback__, context.__traceback__
            while raised is not None and raised.tb_next is not None:
                raised = raised.tb_next
            if raised is None or caught is None or raised.tb_frame is not caught.tb_frame:
                return chain, context
            inner = context
    return chain, None


def _told(error: BaseException) -> dict[str, Any]:
    """An exception's type, message and frames as JSON."""
    import traceback

    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(error)
        # What a command wrote that was not to be seen: subprocess.run(..., capture_output=True).
        written = getattr(error, "stderr", None) if kind.__name__ == "CalledProcessError" else None
        if isinstance(written, bytes):
            written = written.decode("utf-8", "replace")
        if isinstance(written, str):
            message = "\n".join([message, *written.strip().splitlines()[-5:]])
    except Exception as failing:
        message = f"(its text cannot be shown: {type(failing).__name__} in __str__)"
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": module + kind.__qualname__,
        "message": message,
        "frames": [[f.filename, f.lineno, f.name, f.line] for f in frames],
    }


def _parents() -> list[tuple[int, list[str]]]:
    """This process and those above it: their ids and command lines."""
    chain: list[tuple[int, list[str]]] = []
    pid = os.getpid()
    with contextlib.suppress(OSError):
        while pid > 0:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode("utf-8", "replace").split("\0")[:-1]
            chain.append((pid, words))
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
    return chain


def _is_mistake(error: BaseException) -> bool:
    """Whether the message is all that its reader needs: an error that the recipe marks so, which
    the supervisor logs. A user's own script may call the recipe, and go on."""
    is_marked = bool(getattr(error, "is_users_mistake", False))
    return is_marked and not os.environ.get("SM_USER_ENTRY_POINT")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    is_shown = True
    try:
        # An interrupt has its own exit status, which running code here would take from it.
        if not issubclass(kind, KeyboardInterrupt):
            _record(kind, error, trace)
            is_shown = not _is_mistake(error)  # Else the supervisor logs the message.
    except Exception:
        pass  # On another host of mpirun's the folder is not there. Nothing hides the traceback.
    finally:
        if is_shown:
            _previous_hook(kind, error, trace)


def _record_at_exit() -> None:
    """For a script whose own excepthook does not call the one it found (rich, typer)."""
    error = getattr(sys, "last_value", None)
    is_recorded = os.path.exists(os.path.join(_ERROR_DIR, f"{os.getpid()}.json"))
    if error is not None and not isinstance(error, KeyboardInterrupt) and not is_recorded:
        with_trace = getattr(sys, "last_traceback", None)
        _record(type(error), error, with_trace)


def _chain() -> None:
    """Run the sitecustomize that this one stands in front of, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    folder = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _offer_modules(loading: types.ModuleType) -> None:
    """`evaluate.load("accuracy")` takes the image's module: the hub may be out of reach."""
    original = loading.evaluation_module_factory

    def evaluation_module_factory(
        path: str, module_type: Any = None, revision: Any = None, *args: Any, **options: Any
    ) -> Any:
        brought = os.path.join(_MODULES, path)
        if (
            path.isidentifier()
            and module_type in (None, "metric")
            and revision is None
            and not os.path.isfile(os.path.join(path, f"{path}.py"))  # the script's own
            and os.path.isfile(os.path.join(brought, f"{path}.py"))
        ):
            path = brought
        return original(path, module_type, revision, *args, **options)

    loading.evaluation_module_factory = evaluation_module_factory  # type: ignore[attr-defined]


def _join_on_cpu(state: types.ModuleType) -> None:
    """`PartialState()` heeds ACCELERATE_USE_CPU, as Accelerator() does.

    Without, it makes a world of one of each process, which a later Accelerator() stays in.
    """
    original = state.PartialState.__init__

    def __init__(self: Any, cpu: bool = False, **options: Any) -> None:
        uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
        original(self, cpu or uses_cpu, **options)

    state.PartialState.__init__ = __init__


class _AfterImport:
    """Finds a module as Python would, and changes it when it has been loaded."""

    def __init__(self, changes: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """None for all modules but those that are changed, once each."""
        change = self._changes.pop(name, None)
        if change is None:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                # A library that has changed its inside is used as it is.
                with contextlib.suppress(AttributeError):
                    change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _ERROR_DIR:
    _previous_hook = sys.excepthook
    sys.excepthook = _hook
    atexit.register(_record_at_exit)
    if hasattr(sys, "argv") and not _IS_LAUNCHER:
        # A secret hyperparameter stands in the environment only; in argv a mark holds its place.
        for _index, _argument in enumerate(sys.argv):
            if _argument.startswith(_SECRET):
                sys.argv[_index] = os.environ.get(_argument[len(_SECRET) :], _argument)
    # To a pipe Python holds lines back; unbuffered, it writes the words of several ranks mixed.
    for _stream in (sys.stdout, sys.stderr):
        if isinstance(_stream, io.TextIOWrapper):
            _stream.reconfigure(line_buffering=True, write_through=False)
    _changes: dict[str, Callable[[types.ModuleType], None]] = {"accelerate.state": _join_on_cpu}
    if _MODULES:
        _changes["evaluate.loading"] = _offer_modules
    sys.meta_path.insert(0, _AfterImport(_changes))
_chain()
