"""vLLM's server as a child process: its output in the log, its end, and the reason for that."""

from __future__ import annotations

import asyncio
import codecs
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
# What vLLM's logger puts before a line: the process, level, time, place.
_HEAD = re.compile(r"^\([\w.-]+ pid=\d+\) ?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b|error)(?::|$)")
_USAGE = re.compile(r"\berror: ")
# What follows from the error of another process.
_EFFECT = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|See root")
# Reasons that a user would otherwise have to look up.
_REMEDIES = (
    (
        re.compile(
            r"out of memory|OutOfMemory|No available memory for the cache|KV cache is needed"
        ),
        "Set SM_VLLM_MAX_MODEL_LEN lower, SM_VLLM_GPU_MEMORY_UTILIZATION higher, or take a larger"
        " instance.",
    ),
    (
        re.compile(r"unrecognized arguments|invalid choice|invalid .* value|expected .*argument"),
        "The arguments come from SM_VLLM_* and OPTION_*: SM_VLLM_MAX_MODEL_LEN is --max-model-len.",
    ),
)


class ServerProcess:
    """One started server. Its processes are a group of their own, which ends together."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    async def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it."""
        self._process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._relay = asyncio.create_task(self._pass_on())

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    async def wait(self) -> str:
        """Wait for its end. Returns the reason, for people."""
        assert self._process is not None and self._relay is not None
        code = await self._process.wait()
        self._signal(signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._relay, _STOP_SECONDS)
        return reason([*self._lines], code)

    async def stop(self) -> None:
        """End it, with a moment to give devices back, and everything that it has started."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        self._signal(signal.SIGKILL)
        await self._process.wait()
        if self._relay is not None:
            self._relay.cancel()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def _pass_on(self) -> None:
        """Print its output with secrets masked, and keep the last lines."""
        assert self._process is not None and self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        while data := await self._process.stdout.read(_READ_BYTES):
            *lines, rest = (rest + decoder.decode(data)).split("\n")
            if len(rest) > _READ_BYTES:
                lines, rest = [*lines, rest], ""
            for line in lines:
                self._note(line)
        if rest:
            self._note(rest)

    def _note(self, line: str) -> None:
        line = logs.mask(line.rpartition("\r")[2])
        self._lines.append(line)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def reason(lines: Sequence[str], code: int) -> str:
    """Why vLLM's server has ended: the last error in its output that is not another one's effect,
    and a remedy if there is one."""
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL): most likely it needs more memory than there is."
    texts = [_HEAD.sub("", line) for line in lines]
    found = f"exit code {code}"
    for place in range(len(texts) - 1, -1, -1):
        text = texts[place].strip()
        is_error = _ERROR.match(text) or _USAGE.search(text)
        if is_error and not _EFFECT.search(text):
            # pydantic's go on in lines that are indented.
            more = [line.strip() for line in texts[place + 1 : place + 3] if line.startswith("  ")]
            found = " ".join([text, *more])
            break
    remedy = next((remedy for sign, remedy in _REMEDIES if sign.search(found)), "")
    return f"{found} {remedy}".strip()
