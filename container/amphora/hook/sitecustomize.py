"""Runs at the start of every Python process of the user's script (it lies first on PYTHONPATH).

It records the exception that ends a process, so that the failure file can name it without guessing
from stderr; it puts secret hyperparameters, which never stand in a command line, back into
`sys.argv`; it has output written line by line; and where the script imports `evaluate` or
`accelerate`, it has `evaluate.load` find the modules that the image brings, and
`accelerate.PartialState` take part where processes train on CPUs; and if stalls are looked for, it
shows the progress of the process and writes its stacks when asked. Standard library only, and
nothing is imported until it is needed, since this runs in processes that are not ours.
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
    from typing import Any, TextIO

_ERROR_DIR = os.environ.get("AMPHORA_ERROR_DIR", "")
_MODULES = os.environ.get("AMPHORA_EVALUATE_MODULES", "")
_PROGRESS_DIR = os.environ.get("AMPHORA_PROGRESS_DIR", "")
_IS_LAUNCHER = os.environ.get("AMPHORA_LAUNCHER") == "1" and "RANK" not in os.environ
_SECRET = "amphora-secret:"
_STACK_SIGNAL = 8
"""Above SIGRTMIN. As amphora.training.stalls has it."""


def _record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import json
    import time
    import traceback

    frames = traceback.extract_tb(trace)
    code_dir = os.environ.get("AMPHORA_SCRIPT_DIR", "")
    own = [f for f in frames if code_dir and f.filename.startswith(code_dir + os.sep)]
    last = (own or frames)[-1] if frames else None
    # Which workers torchrun saw fail: the exception that ends it carries them.
    failures = getattr(error, "failures", None)
    failures = failures if isinstance(failures, dict) else {}
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    record = {
        "time": time.time(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "rank": os.environ.get("RANK"),
        "host": os.environ.get("SM_CURRENT_HOST"),
        "type": module + kind.__qualname__,
        "message": str(error),
        "frame": last and [last.filename, last.lineno, last.name, last.line],
        "traceback": "".join(traceback.format_exception(kind, error, trace)),
        "workers": [
            {"rank": rank, "pid": f.pid, "exit_code": f.exitcode, "time": f.timestamp}
            for rank, f in failures.items()
        ],
    }
    path = os.path.join(_ERROR_DIR, f"{os.getpid()}.json")
    with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(record, file)
    os.replace(path + ".part", path)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        # An interrupt has its own exit status, which running code here would take from it.
        if not issubclass(kind, KeyboardInterrupt):
            _record(kind, error, trace)
    except OSError:
        pass  # On another host of mpirun's the folder is not there.
    finally:
        _previous_hook(kind, error, trace)


def _record_at_exit() -> None:
    """For a script whose own excepthook does not call the one it found (rich, typer)."""
    error = getattr(sys, "last_value", None)
    is_recorded = os.path.exists(os.path.join(_ERROR_DIR, f"{os.getpid()}.json"))
    if error is not None and not isinstance(error, KeyboardInterrupt) and not is_recorded:
        with_trace = getattr(sys, "last_traceback", None)
        _record(type(error), error, with_trace)


def _show_progress() -> None:
    """Have the supervisor see this process: its stacks by a signal, its steps by a file's time."""
    import faulthandler
    import json
    import signal
    import threading

    path = os.path.join(_PROGRESS_DIR, str(os.getpid()))
    stacks = open(path + ".stacks", "a")  # noqa: SIM115 - open as long as the process.
    faulthandler.register(signal.SIGRTMIN + _STACK_SIGNAL, file=stacks, all_threads=True)
    global _stacks
    _stacks = stacks
    os.environ["AMPHORA_PROGRESS_FILE"] = path
    with open(path, "w"):
        pass
    about = {
        "parent": os.getppid(),
        "rank": os.environ.get("RANK"),
        "main_thread": threading.main_thread().ident,
    }
    with open(path + ".part", "w") as file:
        json.dump(about, file)
    os.replace(path + ".part", path + ".json")


_stacks: TextIO | None = None


def _touch_after_steps(optimizers: types.ModuleType) -> None:
    """A step of any optimizer is progress, in a script that knows nothing of this."""

    def touch(*_: object) -> None:
        with contextlib.suppress(OSError):
            os.utime(os.environ["AMPHORA_PROGRESS_FILE"])

    optimizers.register_optimizer_step_post_hook(touch)


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
    if _PROGRESS_DIR and not _IS_LAUNCHER:
        with contextlib.suppress(OSError):  # On another host the folder is not there.
            _show_progress()
        if os.environ.get("SM_USER_ENTRY_POINT"):  # The recipe shows its steps by itself.
            _changes["torch.optim.optimizer"] = _touch_after_steps
    sys.meta_path.insert(0, _AfterImport(_changes))
_chain()
