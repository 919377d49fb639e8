"""A real server of a tiny model, and a client that sends healthy requests meanwhile."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import threading
import time

from ordeal.common import (
    Trial,
    background_threads,
    children,
    descendants,
    descriptors,
    free_port,
    kill_tree,
    make_model,
    memory,
    start,
    wait_until,
)

HEALTHY = {"inputs": "the film was good , truly great"}
JSON = {"content-type": "application/json"}


class Server:
    """`amphora serve` on a free port; all its processes are killed at the end of the block."""

    def __init__(self, trial: Trial, workers: int = 2, **environ: str) -> None:
        self.base = trial.folder
        self.log = trial.folder / "server.log"
        if not (self.base / "model").exists():
            make_model(self.base / "model")
        self.port = free_port()
        self.process: subprocess.Popen[bytes] = start(
            self.base, "serve", self.log,
            SAGEMAKER_BIND_TO_PORT=str(self.port),
            SAGEMAKER_MODEL_SERVER_WORKERS=str(workers),
            **environ,
        )  # fmt: skip

    def __enter__(self) -> Server:
        wait_until(lambda: self.process.poll() is not None or self.ping() == 200, 120, 0.1)
        if self.process.poll() is not None or self.ping() != 200:
            raise AssertionError(f"the server does not answer:\n{self.text[-3000:]}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.wait()

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def ping(self, timeout: float = 10) -> int:
        """Return the status of /ping; 0 if there is no answer."""
        try:
            return self.request("GET", "/ping", timeout=timeout)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> tuple[int, bytes]:
        """Send one request on a new connection; return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def invoke(self, value: object = HEALTHY, timeout: float = 60) -> tuple[int, bytes]:
        """POST a value as JSON; return status and body, or 0 and the error of a connection."""
        try:
            body = json.dumps(value).encode()
            return self.request("POST", "/invocations", body, JSON, timeout)
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()

    def metric(self, name: str) -> float:
        """Return a figure of /metrics, summed over its labels."""
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        named = [line for line in lines if line.startswith(name) and line[len(name)] in " {"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in named)

    @property
    def pids(self) -> list[int]:
        """The front and all processes below it."""
        return [self.process.pid, *descendants(self.process.pid)]

    @property
    def workers(self) -> list[int]:
        """The model workers, which are the processes without children."""
        return [pid for pid in descendants(self.process.pid) if not children(pid)]

    @property
    def weight(self) -> tuple[float, int]:
        """MB (PSS) and open file descriptors of all its processes."""
        return memory(self.pids), descriptors(self.pids)

    def stop(self, timeout: float = 40) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


class Healthy:
    """A client that repeats a healthy request in a block, and records wrong answers."""

    def __init__(self, server: Server) -> None:
        self.answered, self.longest = 0, 0.0
        self.wrong: list[str] = []
        self._server, self._stop = server, threading.Event()
        self._thread = background_threads(self._repeat, stop=self._stop)

    def __enter__(self) -> Healthy:
        self._thread.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.__exit__(None, None, None)

    def _repeat(self) -> None:
        status, expected = self._server.invoke()
        if status != 200:
            self.wrong.append(f"the first answer: {status} {expected[:200]!r}")
            return
        while not self._stop.wait(0.05):
            began = time.monotonic()
            status, body = self._server.invoke()
            self.longest = max(self.longest, time.monotonic() - began)
            if status == 200 and _same(body, expected):
                self.answered += 1
            else:
                self.wrong.append(f"{status} {body[:200]!r}")


def _same(one: bytes, other: bytes) -> bool:
    """Return whether two answers agree; a batch's length changes the last digits of a score."""
    (first,), (second,) = json.loads(one), json.loads(other)
    return bool(first["label"] == second["label"] and abs(first["score"] - second["score"]) < 1e-2)
