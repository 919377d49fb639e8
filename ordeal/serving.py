"""A real server of a tiny model, and a client that sends healthy requests meanwhile."""

from __future__ import annotations

import json
import threading
import time

import httpx

from ordeal.common import Trial, background_threads, descriptors, make_model
from tests.support.processes import memory
from tests.support.servers import Running

HEALTHY = {"inputs": "the film was good , truly great"}


class Server(Running):
    """`amphora serve` with two workers, each request on a connection of its own."""

    def __init__(self, trial: Trial, workers: int = 2, **environ: str) -> None:
        if not (trial.folder / "model").exists():
            make_model(trial.folder / "model")
        super().__init__(
            trial.folder, {"SAGEMAKER_MODEL_SERVER_WORKERS": str(workers), **environ}, keep_alive=0
        )

    def __enter__(self) -> Server:
        return self.ready(120)

    def post(self, value: object = HEALTHY, timeout: float = 60) -> tuple[int, bytes]:
        """POST a value as JSON; return status and body, or 0 and the error of a connection."""
        try:
            answer = self.http.post("/invocations", json=value, timeout=timeout)
            return answer.status_code, answer.content
        except httpx.TransportError as error:
            return 0, repr(error).encode()

    @property
    def weight(self) -> tuple[float, int]:
        """MB and open file descriptors of all its processes.

        Pages of files are left out: the whole machine decides how many processes share them.
        """
        return memory(self.pids(), ("Pss_Anon:", "Pss_Shmem:")), descriptors(self.pids())


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
        status, expected = self._server.post()
        if status != 200:
            self.wrong.append(f"the first answer: {status} {expected[:200]!r}")
            return
        while not self._stop.wait(0.05):
            began = time.monotonic()
            status, body = self._server.post()
            self.longest = max(self.longest, time.monotonic() - began)
            if status == 200 and _same(body, expected):
                self.answered += 1
            else:
                self.wrong.append(f"{status} {body[:200]!r}")


def _same(one: bytes, other: bytes) -> bool:
    """Return whether two answers agree; a batch's length changes the last digits of a score."""
    (first,), (second,) = json.loads(one), json.loads(other)
    return bool(first["label"] == second["label"] and abs(first["score"] - second["score"]) < 1e-2)
