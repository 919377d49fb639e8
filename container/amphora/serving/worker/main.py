"""A model worker: a process of its own that loads the model and answers what the front sends it.

Started as `python -m amphora.serving.worker.main FD`. After `Load`, it serves itself, or forks
workers that serve on sockets of their own and share the loaded model's pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from amphora.common import logs
from amphora.common.errors import AmphoraError
from amphora.serving import handler_files
from amphora.serving.protocol import messages
from amphora.serving.protocol.messages import Failed, Forked, Load, Loaded
from amphora.serving.settings import ServerSettings
from amphora.serving.worker import conversation, handlers, runner

LOG = logging.getLogger("amphora.worker")


def main(argv: list[str] | None = None) -> int:
    """Serve the socket whose descriptor is the only argument, until the front closes it."""
    control = socket.socket(fileno=int((argv or sys.argv[1:])[0]))
    # A signal to the process group must not end a worker before its requests. Programs that user
    # code starts would inherit SIG_IGN, but not a function.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(EOFError, ConnectionError):
        load, _ = messages.receive(control)
        logs.configure(load.log_level)
        logs.remember(logs.secret_values(os.environ))
        logs.mask_printing()
        model_runner, is_forkable = _load(control, load)
        if model_runner is None:
            return 0
        while is_forkable:
            # The descriptor of the next worker's socket; none once the front has closed its own.
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return 0
            _fork(control, descriptors[0], model_runner)
        _serve(control, model_runner)
    return 0


def _load(control: socket.socket, order: Load) -> tuple[runner.ModelRunner | None, bool]:
    """Load the model, report the outcome to the front, and return whether to wait for forks."""
    started, opened = time.monotonic(), _count("fd")
    # Imports leave no garbage, and the collector would take a quarter of their time.
    gc.disable()
    try:
        names = ("model_dir", "code_dir", "image_code")
        paths = {name: Path(order.settings[name]).absolute() for name in names}
        settings = ServerSettings(**{**order.settings, **paths})
        has_handlers = handler_files.has_handlers(settings.code_dir, settings.program)
        if has_handlers and settings.model_dir.is_dir():
            # AWS's model servers run there, and users' files open others by relative paths.
            os.chdir(settings.model_dir)
        resolved = handlers.resolve(
            settings.code_dir, settings.program, settings.image_code, settings.model_dir
        )
        # Imported objects are never freed, and a collection of them takes a tenth of the start.
        gc.freeze()
        model_runner = runner.load(resolved, settings)
    except (Exception, SystemExit) as error:
        reason = str(error)
        if not isinstance(error, AmphoraError):
            if not getattr(error, "is_users_mistake", False):  # an error of the recipe's own
                LOG.exception("The model could not be loaded.")
            reason = f"{type(error).__name__}: {error}"
        messages.send(control, Failed(reason=logs.mask(reason)))
        return None, False
    if is_forkable := order.share:
        # tqdm starts a thread with its first progress bar, and all bars have ended.
        for thread in threading.enumerate():
            if type(thread).__name__ == "TMonitor":
                cast(Any, thread).exit()
        # A fork loses other threads, and keeps their locks. Of an open file it shares the position,
        # and of a connection the answers: one fork would read what another has asked for.
        is_forkable = _count("task") == 1 and _count("fd") <= opened
    loaded = Loaded(
        batches="predict_batch_fn" in model_runner.handlers, forkable=is_forkable,
        turns="turns_fn" in model_runner.handlers, description=model_runner.description,
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip
    gc.enable()
    # Return memory that loading has freed to the system, so that forks do not keep it.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    messages.send(control, loaded)
    return model_runner, is_forkable


def _count(kind: str) -> int:
    """Return how many threads ("task") or descriptors ("fd") this process has; 0 without Linux."""
    folder = Path("/proc/self", kind)
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _fork(control: socket.socket, descriptor: int, model_runner: runner.ModelRunner) -> None:
    def reap(*_: object) -> None:
        """Reap children that have ended, and log signals and exit codes that ended them."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                child, code = ended[0], os.waitstatus_to_exitcode(ended[1])
                if code < 0:
                    LOG.error(
                        "Model worker %d was killed by %s.", child, signal.Signals(-code).name
                    )
                elif code > 0:
                    LOG.error("Model worker %d ended with exit code %d.", child, code)

    signal.signal(signal.SIGCHLD, reap)
    # The collector would write to every object, which copies the shared pages.
    gc.collect()
    gc.freeze()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        messages.send(control, Forked(pid=pid))
        return
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        # It ends by EOFError or SystemExit, when the front closes the socket.
        _serve(socket.socket(fileno=descriptor), model_runner)
    except (EOFError, SystemExit):
        status = 0
    except Exception:
        LOG.exception("A model worker failed.")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(sock: socket.socket, model_runner: runner.ModelRunner) -> None:
    # Loading used one thread, so that no thread pool was lost in a fork.
    threads = model_runner.settings.threads
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    conversation.Conversation(sock, model_runner).serve()


if __name__ == "__main__":
    sys.exit(main())
