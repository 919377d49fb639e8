"""Runs vLLM's server as a child process, logs its output, and finds the reason for its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from amphora.common import logs

_KEPT_LINES = 400
_READ_BYTES = 1 << 16
_STOP_SECONDS = 3.0
# vLLM's logger puts the process, level, time and place before a line.
_HEAD = re.compile(r"^\([\w.-]+ pid=\d+\) ?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b|error)(?::|$)|\berror: "
)
# Errors that result from the error of another process.
_EFFECT = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|See root|engine dead"
    r"|EngineCore encountered an issue|died unexpectedly"
)
_ENGINE_DIED = re.compile(r"EngineCore encountered an issue|Engine core proc.* died unexpectedly")
_REMEDIES = {
    r"out of memory|OutOfMemory|No available memory for the cache|KV cache is needed": (
        "Set SM_VLLM_MAX_MODEL_LEN lower, SM_VLLM_GPU_MEMORY_UTILIZATION higher, or take a larger"
        " instance."
    ),
    r"unrecognized arguments|invalid choice|invalid .* value|expected .*argument": (
        "The arguments come from SM_VLLM_* (SM_VLLM_MAX_MODEL_LEN is --max-model-len), and --dtype"
        " from AMPHORA_DTYPE."
    ),
}


class ServerProcess:
    """One started server. Its processes are a group of their own, which ends together."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._relay = asyncio.create_task(self._pass_on())

    @classmethod
    async def start(cls, command: Sequence[str], environ: Mapping[str, str]) -> ServerProcess:
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environ), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        return cls(process)

    async def wait(self) -> str:
        """Wait for its end, and return the reason."""
        code = await self._process.wait()
        self._kill()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._relay, _STOP_SECONDS)
        return reason([*self._lines], code)

    async def stop(self) -> None:
        """End it and its processes, with a moment to release devices."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        self._kill()
        await self._process.wait()
        self._relay.cancel()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _pass_on(self) -> None:
        """Print its output with secrets masked, and keep the last lines."""
        assert self._process.stdout is not None
        rest = b""
        while (data := await self._process.stdout.read(_READ_BYTES)) or rest:
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _READ_BYTES or not data:
                lines, rest = [*lines, rest], b""
            for line in lines:
                # A progress bar overwrites its line.
                text = logs.mask(line.decode(errors="replace").rpartition("\r")[2])
                self._lines.append(text)
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(text + "\n")
                    sys.stderr.flush()


def reason(lines: Sequence[str], code: int) -> str:
    """Return why vLLM's server has ended: the last error in its output that is not an effect of
    another one, with a remedy if one is known."""
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL): most likely it needs more memory than there is."
    reported = f"exit code {code}"
    if any(map(_ENGINE_DIED.search, lines)):
        # The server's errors, of earlier requests among them, are not the engine's.
        lines = [line for line in lines if line.startswith(("(EngineCore", "(Worker"))]
        reported = "its engine core exited unexpectedly."
    texts = [_HEAD.sub("", line) for line in lines]
    for index in range(len(texts) - 1, -1, -1):
        text = texts[index].strip()
        if _ERROR.search(text) and not _EFFECT.search(text):
            # pydantic's errors continue in indented lines.
            more = [line.strip() for line in texts[index + 1 : index + 3] if line.startswith("  ")]
            reported = " ".join([text, *more])
            break
    remedy = next((_REMEDIES[sign] for sign in _REMEDIES if re.search(sign, reported)), "")
    return f"{reported} {remedy}".strip()
