"""Runs at the start of every Python process of the user's script, since it is on PYTHONPATH.

- Records the exception that ends a process.
- Puts secret hyperparameters, which are not in the command line, back into `sys.argv`.
- Makes stdout and stderr line-buffered.
- Makes accelerate and Lightning join the processes of a training on CPUs.
- Leaves trackers that the job has not configured out of `report_to="all"`.
- Names the arguments that no parser of the script has taken.

It uses the standard library only and imports as little as possible, because it runs in the user's
processes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import sys
import types
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ERROR_DIR = os.environ.get("AMPHORA_ERROR_DIR", "")
_IS_LAUNCHER = os.environ.get("AMPHORA_LAUNCHER") == "1" and "RANK" not in os.environ
_SECRET = "amphora-secret:"


def _record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import json
    import time
    import traceback

    chain, handled = _causes(error)
    if _is_users_mistake(error):
        chain, handled, trace = [error.with_traceback(None)], None, None
    # The exception that ends torchrun lists the workers that failed.
    failures = getattr(error, "failures", None)
    failures = failures if isinstance(failures, dict) else {}
    # This process and its ancestors.
    parents: list[tuple[int, list[str]]] = []
    pid = os.getpid()
    with contextlib.suppress(OSError):
        while pid > 0:
            with open(f"/proc/{pid}/cmdline", "rb") as status:
                words = status.read().decode("utf-8", "replace").split("\0")[:-1]
            parents.append((pid, words))
            with open(f"/proc/{pid}/stat", "rb") as status:
                pid = int(status.read().rpartition(b")")[2].split()[1])
    command = getattr(chain[-1], "cmd", None)
    ranks = (os.environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    record = {
        "time": time.time(),
        "pid": os.getpid(),
        "parents": parents,
        "rank": next(filter(None, ranks), None),
        "host": os.environ.get("SM_CURRENT_HOST"),
        "script_dir": os.environ.get("AMPHORA_SCRIPT_DIR", ""),
        "errors": [_as_json(cause) for cause in chain],
        "handled": handled and _as_json(handled),
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


def _causes(error: BaseException) -> tuple[list[BaseException], BaseException | None]:
    """Return the exceptions from the last raised to the innermost cause, and the one being handled.

    An exception that an `except` block itself raises replaces the one it handles, which is its
    cause. One that is raised by a function called in that block has its own cause.
    """
    chain: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and all(inner is not known for known in chain):
        if chain and type(inner).__name__ == "CancelledError":
            break  # It causes asyncio's time-outs, but explains nothing.
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


def _as_json(error: BaseException) -> dict[str, Any]:
    """Return an exception's type, message and frames for JSON."""
    import traceback

    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(error)
        # The output of subprocess.run(..., capture_output=True) is in no log.
        output = getattr(error, "stderr", None) if kind.__name__ == "CalledProcessError" else None
        if isinstance(output, bytes):
            output = output.decode("utf-8", "replace")
        if isinstance(output, str):
            message = "\n".join([message, *output.strip().splitlines()[-5:]])
    except Exception as failing:
        message = f"(its text cannot be shown: {type(failing).__name__} in __str__)"
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": module + kind.__qualname__,
        "message": message,
        "frames": [[f.filename, f.lineno, f.name, f.line] for f in frames],
    }


def _is_users_mistake(error: BaseException) -> bool:
    """Return whether the recipe marks an error as a user's mistake, whose message is enough.

    The supervisor logs it. In a user's script, which may call the recipe, no error is a mistake.
    """
    is_marked = bool(getattr(error, "is_users_mistake", False))
    return is_marked and not os.environ.get("SM_USER_ENTRY_POINT")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    is_shown = True
    try:
        # Running code here would change the exit status of an interrupt.
        if not issubclass(kind, KeyboardInterrupt):
            _record(kind, error, trace)
            is_shown = not _is_users_mistake(error)
    except Exception:
        pass  # The folder does not exist on other hosts of mpirun. The traceback is shown.
    finally:
        if is_shown:
            _previous_hook(kind, error, trace)


def _record_at_exit() -> None:
    """Record the exception if the script's own excepthook does not call ours (rich, typer)."""
    error = getattr(sys, "last_value", None)
    is_recorded = os.path.exists(os.path.join(_ERROR_DIR, f"{os.getpid()}.json"))
    if error is not None and not isinstance(error, KeyboardInterrupt) and not is_recorded:
        _record(type(error), error, getattr(sys, "last_traceback", None))


def _configured(trackers: list[Any]) -> list[Any]:
    """Return the trackers that "all" means in a plain script, and log the others.

    mlflow-skinny and wandb, which the image has, report only if the job or script has set where to.
    """
    kept = []
    for tracker in trackers:
        is_configured = True
        if str(tracker) == "mlflow":
            usual = f"file://{os.environ.get('SM_OUTPUT_DATA_DIR')}/mlflow"
            is_configured = os.environ.get("MLFLOW_TRACKING_URI") not in (None, usual)
        elif str(tracker) == "wandb" and not {"WANDB_API_KEY", "WANDB_MODE"} & set(os.environ):
            import wandb

            # Another version of wandb, which the script itself has brought, knows no `prompt`.
            with contextlib.suppress(TypeError):
                is_configured = bool(wandb.login(prompt=False, verify=False))
        if is_configured:
            kept.append(tracker)
    if left_out := ", ".join(str(tracker) for tracker in trackers if tracker not in kept):
        note = "they are not configured (MLFLOW_TRACKING_URI, WANDB_API_KEY)"
        print(f"amphora: of all trackers {left_out} are left out: {note}", file=sys.stderr)
    return kept


_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_CHANGED = {"accelerate.state", *(f"{_library}.accelerators.cpu" for _library in _LIGHTNING)}
if os.environ.get("SM_USER_ENTRY_POINT"):  # The recipe checks its trackers itself.
    _CHANGED |= {"transformers.integrations.integration_utils", "accelerate.tracking", "argparse"}


def _change(name: str, module: Any) -> None:
    """Change a module of `_CHANGED`."""
    if name == "accelerate.state":
        # `PartialState()` applies ACCELERATE_USE_CPU, as Accelerator() does. Otherwise each process
        # becomes a world of one, in which a later Accelerator() stays.
        original = module.PartialState.__init__

        def __init__(self: Any, cpu: bool = False, **options: Any) -> None:
            value = os.environ.get("ACCELERATE_USE_CPU", "").lower()
            original(self, cpu or value in ("1", "true", "yes", "on"), **options)

        module.PartialState.__init__ = __init__
    elif name == "argparse" and not _IS_LAUNCHER:
        # Most scripts drop the arguments that parse_known_args does not know.
        parse = module.ArgumentParser.parse_known_args
        known: set[str] = set()
        left: set[str] = set()

        def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
            values, rest = parse(self, args, namespace)
            known.update(self._option_string_actions)
            is_whole = args is None or args == sys.argv[1:]  # HfArgumentParser passes them on
            if is_whole and sys._getframe(1).f_code.co_name != "parse_args":
                left.update(word.partition("=")[0] for word in rest if word.startswith("--"))
            return values, rest

        def name_left() -> None:
            # After an exception or on other ranks, the line would only be in the way.
            is_shown = not hasattr(sys, "last_value") and os.environ.get("RANK", "0") == "0"
            for name in sorted(left - known) if is_shown else ():
                import difflib

                near = "".join(difflib.get_close_matches(name, known, 1))
                note = f"no parser of the script takes {name}"
                print(f"amphora: {note}{near and f'; it takes {near}'}", file=sys.stderr)

        module.ArgumentParser.parse_known_args = parse_known_args
        atexit.register(name_left)
    elif name == "accelerate.tracking":  # Accelerator(log_with="all")
        select = module.filter_trackers

        def filter_trackers(log_with: Any, *arguments: Any, **options: Any) -> list[Any]:
            trackers = select(log_with, *arguments, **options)
            names = log_with if isinstance(log_with, (list, tuple)) else [log_with]
            return _configured(trackers) if "all" in map(str, names) else trackers

        module.filter_trackers = filter_trackers
    elif name == "transformers.integrations.integration_utils":
        # report_to="all", the default of transformers 4
        available = module.get_available_reporting_integrations
        module.get_available_reporting_integrations = lambda: _configured(available())
    else:
        # Lightning's `devices="auto"` counts torchrun's processes on CPUs, as it does on GPUs.
        module.CPUAccelerator.auto_device_count = staticmethod(
            lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        )


class _AfterImport:
    """Finds the modules of `_CHANGED` as Python would, and changes each once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return None for all other modules."""
        if name not in _CHANGED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                # A version of the library with other internals is left unchanged.
                with contextlib.suppress(AttributeError):
                    _change(name, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _ERROR_DIR:
    with contextlib.suppress(Exception):  # No stderr, or one without a file.
        faulthandler.enable()  # Names the line of a SIGSEGV or SIGABRT.
    _previous_hook = sys.excepthook
    sys.excepthook = _hook
    atexit.register(_record_at_exit)
    if hasattr(sys, "argv") and not _IS_LAUNCHER:
        # argv has a placeholder for a secret hyperparameter, whose value is in the environment.
        for _index, _argument in enumerate(sys.argv):
            if _argument.startswith(_SECRET):
                sys.argv[_index] = os.environ.get(_argument[len(_SECRET) :], _argument)
    # Python buffers output to a pipe; without any buffer, the lines of ranks would mix.
    for _stream in (sys.stdout, sys.stderr):
        if isinstance(_stream, io.TextIOWrapper):
            _stream.reconfigure(line_buffering=True, write_through=False)
    sys.meta_path.insert(0, _AfterImport())
# Run the next sitecustomize on the path, if there is one.
_folder = os.path.dirname(os.path.abspath(__file__))
_others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _folder]
_spec = PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
