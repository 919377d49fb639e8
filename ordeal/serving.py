"""A real server over a tiny model, and healthy clients beside whatever is done to it."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ordeal.common import (
    Trial,
    children,
    descendants,
    descriptors,
    free_port,
    kill_tree,
    made_elsewhere,
    memory,
    start,
)

HEALTHY = {"inputs": "the film was good , truly great"}
JSON = {"content-type": "application/json"}


class Server:
    """`amphora serve` on a free port; on leaving the block everything of it is ended."""

    def __init__(self, trial: Trial, workers: int = 2, **environ: str) -> None:
        self.base = trial.folder
        self.log = trial.folder / "server.log"
        if not (self.base / "model").exists():
            made_elsewhere(self.base / "model")
        self.port = free_port()
        self.process: subprocess.Popen[bytes] = start(
            self.base, "serve", self.log,
            SAGEMAKER_BIND_TO_PORT=str(self.port),
            SAGEMAKER_MODEL_SERVER_WORKERS=str(workers),
            **environ,
        )  # fmt: skip

    def __enter__(self) -> Server:
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            if self.ping() == 200:
                return self
            time.sleep(0.1)
        raise AssertionError(f"the server does not answer:\n{self.text[-3000:]}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.wait()

    @property
    def text(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace")

    def ping(self, timeout: float = 10) -> int:
        """The status of /ping; 0 where nothing answers."""
        try:
            return self.ask("GET", "/ping", timeout=timeout)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> tuple[int, bytes]:
        """One request on a connection of its own: status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def invoke(self, value: object = HEALTHY, timeout: float = 60) -> tuple[int, bytes]:
        """POST a value as JSON."""
        return self.ask("POST", "/invocations", json.dumps(value).encode(), JSON, timeout)

    def metric(self, name: str) -> float:
        """A figure of /metrics, summed over its labels."""
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        named = [line for line in lines if line.startswith(name) and line[len(name)] in " {"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in named)

    @property
    def pids(self) -> list[int]:
        """The front and everything below it."""
        return [self.process.pid, *descendants(self.process.pid)]

    @property
    def workers(self) -> list[int]:
        """The model workers: what has no children."""
        return [pid for pid in descendants(self.process.pid) if not children(pid)]

    @property
    def weight(self) -> tuple[float, int]:
        """MB (PSS) and open descriptors of all its processes."""
        return memory(self.pids), descriptors(self.pids)

    def stop(self, timeout: float = 40) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@dataclass
class Healthy:
    """A client that asks for something good, again and again, and notes what is not answered so."""

    server: Server
    pause: float = 0.05
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0

    def __enter__(self) -> Healthy:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        expected = self.server.invoke()[1]
        while not self._stop.wait(self.pause):
            began = time.monotonic()
            try:
                status, body = self.server.invoke()
            except (OSError, http.client.HTTPException) as error:
                status, body = 0, repr(error).encode()
            self.longest = max(self.longest, time.monotonic() - began)
            if status == 200 and _same(body, expected):
                self.answered += 1
            else:
                self.wrong.append(f"{status} {body[:200]!r}")


def _same(one: bytes, other: bytes) -> bool:
    """Whether two answers agree; batches of other lengths change the last digits of a score."""
    (first,), (second,) = json.loads(one), json.loads(other)
    return bool(first["label"] == second["label"] and abs(first["score"] - second["score"]) < 1e-2)


def copy_model(source: Path, target: Path) -> Path:
    """A model folder to damage."""
    shutil.copytree(source, target)
    return target
