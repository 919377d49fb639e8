"""A process that has imported libraries once, and forks for each script that is to use them.

Importing torch and transformers takes most of the time of a small job. Jobs started by `PRELOADED`
(`preloaded/train.py`, which stands in for code/train.py and code/check.py) begin in a fork of this
process, and so do the model workers of servers that get the same variables. What they do from there on is what they do by themselves: Python runs the real script with
its arguments, environment, streams, signals and exit. `run_script` does so with other libraries.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2] / "code"
PRELOADED = Path(__file__).parent / "preloaded"
STOP_AT_LINE = "PRELOADING_STOP_AT_LINE"
"""The variable of a job that is to get a signal (SIGTERM) as it prints a line that begins so."""
STOP_BY = "PRELOADING_SIGNAL"
WITHOUT_REPORT = {"PRELOADING_WITHOUT": "matplotlib"}
"""The variables of a job that ends without its report, which takes more time than a tiny training:
a job whose report cannot be drawn succeeds all the same."""
LOADED_TO_SERVE = "loaded_to_serve"
_LIBRARIES = (
    "datasets", "accelerate", "peft", "jinja2", "torch.distributed.fsdp", "torch.distributed.tensor",
    "transformers.trainer", "transformers.models.bert.modeling_bert", "sentence_transformers",
    "transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit", "matplotlib.backends.backend_svg",
)  # fmt: skip


@contextlib.contextmanager
def preloading(
    folder: Path, python: str = sys.executable, imports: Sequence[str] = (), **more: str
) -> Iterator[dict[str, str]]:
    """Run such a process; yield the variables of jobs that use it.

    Args:
        imports: Modules in place of the recipe's.
        more: Variables of the process.
    """
    path = folder / "socket"
    ready, ready_end = os.pipe()
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
    command = [python, __file__, str(path), str(ready_end), *imports]
    with subprocess.Popen(command, env=environ, pass_fds=[ready_end]) as process:
        os.close(ready_end)
        try:
            assert os.read(ready, 1), "the process with the libraries has ended"
            yield _variables(path)
        finally:
            os.close(ready)
            process.terminate()


def _variables(path: Path) -> dict[str, str]:
    return {"PRELOADING_SOCKET": str(path), "AMPHORA_CODE_DIR": str(PRELOADED),
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip


@contextlib.contextmanager
def preloading_for_all(folder: Path) -> Iterator[dict[str, str]]:
    """Run one such process for all test processes that give this folder: to start it takes long.

    The one that starts it ends it when the others have done with it.
    """
    folder.mkdir(exist_ok=True)
    # Locks of a process, which its forks do not hold.
    with (folder / "users").open("a+") as users, (folder / "start").open("a+") as start:
        fcntl.lockf(users, fcntl.LOCK_SH)
        fcntl.lockf(start, fcntl.LOCK_EX)
        if (folder / "socket").exists():
            fcntl.lockf(start, fcntl.LOCK_UN)
            yield _variables(folder / "socket")
            return
        with preloading(folder) as variables:
            fcntl.lockf(start, fcntl.LOCK_UN)
            yield variables
            fcntl.lockf(users, fcntl.LOCK_EX)


def run_script(
    variables: Mapping[str, str],
    argv: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path,
    module: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a Python script, or a module, to its end in a fork of the process of `variables`."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        server.connect(variables["PRELOADING_SOCKET"])
        given = {"argv": [*argv], "environ": dict(environ), "cwd": str(cwd), "module": module}
        socket.send_fds(server, [json.dumps(given).encode()], [file.fileno() for file in files])
        server.recv(64)
        server.settimeout(240)
        code = int(server.recv(64))
        for file in files:
            file.seek(0)
        return subprocess.CompletedProcess(argv, code, files[1].read(), files[2].read())


class _Stopping:
    """A stdout that sends this process a signal once a line is written."""

    def __init__(self, stream: Any, start: str, number: int) -> None:
        self._stream, self._start, self._number = stream, start, number

    def write(self, text: str) -> Any:
        written = self._stream.write(text)
        if text.startswith(self._start):
            self._stream.flush()
            os.kill(os.getpid(), self._number)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _serve(path: str, ready_end: int) -> dict[str, Any]:
    """Fork for each request; return the request in the fork."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        os.write(ready_end, b"x")
        os.close(ready_end)
        while True:
            client, _ = listening.accept()
            size = array.array("i").itemsize
            content, ancillary, _, _ = client.recvmsg(1 << 20, socket.CMSG_SPACE(4 * size))
            streams = array.array("i", ancillary[0][2])
            if not (pid := os.fork()):
                for number, stream in enumerate(streams[:3]):
                    os.dup2(stream, number)
                    os.close(stream)
                client.close()
                return {**json.loads(content), "descriptors": list(map(str, streams[3:]))}
            for stream in streams:
                os.close(stream)
            client.send(str(pid).encode())
            # Python code in threads: the fork has this one only, which holds no lock.
            threading.Thread(target=_report, args=(client, pid), daemon=True).start()


def _report(client: socket.socket, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    with client, contextlib.suppress(OSError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict[str, Any]) -> None:
    """Run the script that the request names, as a new Python process would."""
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    folders = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:0] = [folder for folder in folders if folder != str(PRELOADED)]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # Those of this process are of other files, which may be of another kind.
        stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [*request["argv"], *request["descriptors"]]
    sys.orig_argv = [sys.executable, *sys.argv]
    if left_out := os.environ.get("PRELOADING_WITHOUT"):
        sys.modules |= {name: None for name in sys.modules if name.split(".")[0] == left_out}  # type: ignore[misc]
    for folder in folders:
        if (Path(folder) / "sitecustomize.py").is_file():
            runpy.run_path(str(Path(folder) / "sitecustomize.py"), run_name="sitecustomize")
    if line := os.environ.get(STOP_AT_LINE):
        number = int(os.environ.get(STOP_BY, signal.SIGTERM))
        sys.stdout = _Stopping(sys.stdout, line, number)
    script = Path(sys.argv[0])
    if script.parent == PRELOADED:
        script = CODE / script.name
    sys.path.insert(0, str(script.parent))
    code: Any = 0
    try:
        if module := request.get("module"):
            runpy.run_module(module, run_name="__main__")
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    # To take hundreds of modules apart would take longer than many a script.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            output.flush()
    os._exit(code & 0xFF)


def _warm_up(folder: Path) -> None:
    """Import the libraries and the recipe, and let the libraries fill their caches.

    First what serving imports: the names of those modules go into a file.
    """
    sys.path.insert(0, str(CODE))
    with contextlib.suppress(ImportError):
        importlib.import_module("inference")
        from recipe.task_table import SERVED, resolve

        for served in SERVED.values():
            resolve(served.load)
        (folder / LOADED_TO_SERVE).write_text("\n".join(sys.modules))
        # A worker loads its model's file by this name.
        del sys.modules["inference"]
    names = [module.name for module in pkgutil.walk_packages([str(CODE / "recipe")], "recipe.")]
    for name in (*_LIBRARIES, *names):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from matplotlib.figure import Figure
    from transformers import BertConfig, BertModel

    figure = Figure()
    figure.add_subplot().set_title("-1")
    for kind in ("png", "svg"):
        figure.savefig(folder / f"warm.{kind}")
    config = BertConfig(hidden_size=2, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    BertModel(config).save_pretrained(folder / "warm")
    BertModel.from_pretrained(folder / "warm")
    sys.path.remove(str(CODE))


if __name__ == "__main__":
    sys.path.pop(0)
    _, _path, _ready_end, *_imports = sys.argv
    # A collection in a fork would copy the pages of all objects.
    gc.disable()
    if _imports:
        for _name in _imports:
            importlib.import_module(_name)
    else:
        _warm_up(Path(_path).parent)
    gc.freeze()
    gc.enable()
    _become(_serve(_path, int(_ready_end)))
