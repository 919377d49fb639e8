"""Starts model workers: a process loads the model, and is forked if that is safe.

On a CPU one process loads the model and each worker is its fork, which shares the model's pages and
starts in milliseconds. On accelerators, or if the code runs threads or keeps files open, each
worker loads the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

from amphora.common import devices
from amphora.common.errors import AmphoraError
from amphora.serving.pool.user_code import UserCode
from amphora.serving.protocol import messages
from amphora.serving.protocol.messages import Failed, Load, Loaded
from amphora.serving.settings import ServerSettings

LOG = logging.getLogger("amphora.pool")


class ModelLoadError(AmphoraError):
    """The model cannot be loaded, or its workers cannot run."""


# Errors of PyTorch, JAX and TensorFlow when a GPU, or memory, is full.
_FULL = re.compile(
    r"\b(OutOf)?MemoryError\b|\bout of memory\b|RESOURCE_EXHAUSTED|can't allocate memory"
)


class TooLarge(ModelLoadError):
    """The model does not fit: the kernel killed its process, or the device is out of memory."""


class ModelProcess:
    """One started process and its control socket. All methods block."""

    def __init__(
        self, settings: ServerSettings, environ: Mapping[str, str], index: int, share: bool
    ) -> None:
        self._settings = settings
        self._share = share
        self.control, child = socket.socketpair()
        with child:
            argv = [sys.executable, "-m", "amphora.serving.worker.main", str(child.fileno())]
            variables = worker_environment(settings, environ, index, share)
            self.process = subprocess.Popen(argv, env=variables, pass_fds=[child.fileno()])

    def load(self) -> Loaded:
        """Load the model. Raises ModelLoadError with the reason, such as the start-up time-out."""
        settings = self._settings
        order = Load(
            settings=json.loads(json.dumps(vars(settings), default=str)),
            log_level=logging.getLogger("amphora").getEffectiveLevel(),
            share=self._share,
        )
        self.control.settimeout(settings.startup_timeout)
        try:
            self.control.sendall(messages.pack(order))
            outcome, _ = messages.receive(self.control)
        except TimeoutError:
            self.end()
            raise ModelLoadError(
                f"The model was not loaded within {settings.startup_timeout:g} s.",
                "Raise SAGEMAKER_STARTUP_TIMEOUT, or use a smaller model.",
            ) from None
        except (EOFError, OSError) as error:
            code = self.process.wait()
            if code == -signal.SIGKILL:
                raise TooLarge(
                    "The process that loads the model was killed (SIGKILL).",
                    "Most likely the model needs more memory than there is.",
                ) from error
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ModelLoadError(f"The process that loads the model died ({end}).") from error
        self.control.settimeout(None)
        if isinstance(outcome, Failed):
            self.end()
            kind = TooLarge if _FULL.search(outcome.reason) else ModelLoadError
            raise kind(f"The model in {settings.model_dir} cannot be served: {outcome.reason}")
        assert isinstance(outcome, Loaded)
        return outcome

    def fork(self) -> tuple[socket.socket, int]:
        """Fork a worker: return its socket and process id. Raises EOFError, OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [b"F"], [theirs.fileno()])
            forked, _ = messages.receive(self.control)
        return ours, forked.pid

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()


class Spawner:
    """Starts workers and their replacements."""

    def __init__(self, settings: ServerSettings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._share = settings.device_kind == devices.CPU and sys.platform == "linux"
        self._parent: tuple[ModelProcess, Loaded] | None = None
        """The process that is forked."""
        self._processes: dict[int, ModelProcess] = {}
        self._lock = asyncio.Lock()
        self._code = UserCode(settings, environ)
        self._is_prepared = False

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the processes that were started; forks are not among them."""
        return [started.process.pid for started in self._processes.values()]

    async def worker(self, index: int) -> tuple[socket.socket, int, Loaded]:
        """Start a worker that has loaded the model. Raises AmphoraError, EOFError or OSError.

        Await the first one alone: it prepares the user's code.
        """
        if not self._is_prepared:
            code_dir = await asyncio.to_thread(self._code.prepare)
            self._settings = replace(self._settings, code_dir=code_dir)
            self._is_prepared = True
        async with self._lock:
            if self._share and self._parent is None:
                process, loaded = await self._start(index)
                if not loaded.forkable:
                    LOG.info("The code keeps threads or files open: each worker loads the model.")
                    self._share = False
                    return process.control, process.process.pid, loaded
                self._parent = process, loaded
            if self._parent is not None:
                parent, loaded = self._parent
                try:
                    return *await asyncio.to_thread(parent.fork), loaded
                except (EOFError, OSError):
                    LOG.error(
                        "The process that holds the loaded model has ended; it is loaded again."
                    )
                    parent.end()
                    self._parent = None
                    raise
        process, loaded = await self._start(index)
        return process.control, process.process.pid, loaded

    async def _start(self, index: int) -> tuple[ModelProcess, Loaded]:
        """Start the process `index` in place of an earlier one, and load the model in it."""
        if (old := self._processes.pop(index, None)) is not None:
            await asyncio.to_thread(old.end)
        arguments = (self._settings, self._environ, index, self._share)
        process = self._processes[index] = await asyncio.to_thread(ModelProcess, *arguments)
        return process, await asyncio.to_thread(process.load)

    def close(self) -> None:
        """End every process that was started; forks end when their sockets close."""
        self._code.cancel()
        for started in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                started.process.kill()
        for started in self._processes.values():
            started.process.wait()
            started.control.close()


def worker_environment(
    settings: ServerSettings, environ: Mapping[str, str], index: int, share: bool
) -> dict[str, str]:
    """Return the environment of a worker: its device, its threads, the limits of its caches."""
    child = dict(environ)
    child["PYTHONUNBUFFERED"] = "1"
    child["AMPHORA_ADAPTERS"] = str(settings.adapters)
    # A thread pool does not survive a fork; the forks set their own count.
    child["OMP_NUM_THREADS"] = "1" if share else str(settings.threads)
    child.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Bars of downloads and loading fill a log, which is not a terminal.
    child.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if share:
        # Arrow, which sentence-transformers and pandas import, starts a thread of an allocator that
        # it does not use by default. Processes with threads are not forked.
        child.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    if settings.device_kind == devices.CPU:
        # oneDNN keeps a compiled kernel for every shape, and texts have many shapes. A worker grew
        # by 276 MB; with these bounds by 7 MB, for the same CPU time.
        child.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
        child.setdefault("LRU_CACHE_CAPACITY", "1")
    visible = devices.KINDS[settings.device_kind].visible
    if visible is not None:
        numbers = map(str, range(max(1, settings.accelerators)))
        listed = (environ.get(visible) or ",".join(numbers)).split(",")
        child[visible] = listed[index % len(listed)]
    return child
