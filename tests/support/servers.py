"""Real servers: `python -m amphora serve` on a free port, and the code of models that tests write."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests.support.paths import CODE
from tests.support.ports import free_port
from tests.support.preloading import PRELOADED
from tests.support.processes import children, descendants, kill_tree
from tests.support.until import until

if TYPE_CHECKING:
    from typing_extensions import Self

ECHO = """
    import json

    def model_fn(model_dir):
        return {"answer": 42}

    def input_fn(body, content_type):
        if content_type != "application/json":
            error = ValueError(f"{content_type} is not application/json")
            error.status_code = 415
            raise error
        return json.loads(body)

    def predict_fn(data, model):
        return {"echo": data, **model}

    def output_fn(prediction, accept):
        return json.dumps(prediction)
"""
SERVE = (sys.executable, "-m", "amphora", "serve")


RECIPE = {"AMPHORA_CODE_DIR": str(CODE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""Settings of a server whose requests the recipe's handlers answer."""
IN_FLOAT32 = RECIPE | {"AMPHORA_DTYPE": "float32"}


class Running:
    """A server process, its address and its log; as a context it ends with the block."""

    def __init__(
        self,
        base: Path,
        environ: Mapping[str, str],
        command: Sequence[str] = SERVE,
        keep_alive: int = 20,
    ) -> None:
        """
        Args:
            keep_alive: Connections that `http` keeps for further requests.
        """
        self.port = free_port()
        self.log_path = base / "server.log"
        self._log = self.log_path.open("ab")
        self._begin = self._log.tell()
        # Variables of the test run that must not reach it.
        prefixes = ("SM_", "SAGEMAKER_", "AMPHORA_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
        if "PRELOADING_SOCKET" in environ:
            # Its model workers are forks of the process with the libraries.
            inherited["PYTHONPATH"] = str(PRELOADED)
        self.process = subprocess.Popen(
            command,
            env={
                **inherited,
                "SAGEMAKER_BASE_DIR": str(base),
                "SAGEMAKER_BIND_TO_PORT": str(self.port),
                "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
                **environ,
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        limits = httpx.Limits(max_keepalive_connections=keep_alive)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=240, limits=limits
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """All that the server and its workers have printed."""
        return self.log_path.read_bytes()[self._begin :].decode(errors="replace")

    def ready(self, timeout: float = 240) -> Self:
        """Wait for `/ping` to answer 200."""

        def serves() -> bool:
            code = self.process.poll()
            assert code is None, f"the server ended with {code}:\n{self.log}"
            # Another test's server may have taken the port before this one came to listen.
            return self.ping() == 200 and self.listens()

        until(serves, timeout, lambda: self.log)
        return self

    def listens(self) -> bool:
        """Whether it is this server that listens on the port."""
        with contextlib.suppress(psutil.Error):
            processes = [psutil.Process(pid) for pid in self.pids()]
            connections = [item for process in processes for item in process.net_connections("tcp")]
            return any(c.status == "LISTEN" and c.laddr.port == self.port for c in connections)
        return False

    def ping(self) -> int:
        """The status of `/ping`; 0 where nothing listens yet."""
        try:
            return self.http.get("/ping").status_code
        except httpx.TransportError:
            return 0

    def invoke(self, value: object, **headers: str) -> httpx.Response:
        """POST a value as JSON."""
        try:
            return self.http.post(
                "/invocations",
                content=json.dumps(value),
                headers={"content-type": "application/json", **headers},
            )
        except httpx.TransportError:
            # Whether the server has ended, or only closed a connection.
            print(f"exit code {self.process.poll()}; the server's log:\n{self.log}")
            raise

    def answer(self, value: object) -> Any:
        """Invoke until the status is 200, and return the JSON: by then a short time-out may pass."""

        def answered() -> httpx.Response | None:
            answer = self.invoke(value)
            return answer if answer.status_code == 200 else None

        return until(answered, what=lambda: self.log).json()

    def workers(self) -> list[int]:
        """Process ids of everything below the server that has no children: the model workers."""
        return [pid for pid in self.pids()[1:] if not children(pid)]

    def pids(self) -> list[int]:
        """Process ids of the server and of everything below it."""
        return [self.process.pid, *descendants(self.process.pid)]

    def wait_for_workers(self, count: int, timeout: float = 240) -> list[int]:
        """Wait until so many workers run: a server is ready when the first of them is."""
        until(
            lambda: self.metric("amphora_workers") == len(self.workers()) == count,
            timeout,
            self.workers,
        )
        return self.workers()

    def metric(self, name: str) -> float:
        """A metric, summed over its labels."""
        rows = self.http.get("/metrics").text.splitlines()
        values = [float(row.rsplit(" ", 1)[1]) for row in rows if re.match(rf"{name}[ {{]", row)]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def stop(self, timeout: float = 240) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def close(self) -> None:
        """Kill the server and what it started, which a server that is killed cannot end."""
        self.http.close()
        if self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.wait()
        self._log.close()


def fault(answer: httpx.Response) -> tuple[int, str]:
    """Return the status of a refusal, and the code of its error."""
    return answer.status_code, answer.json()["error"]["code"]


@contextlib.contextmanager
def served(base: Path, preloaded: Mapping[str, str], **environ: str) -> Iterator[Running]:
    """Serve the model below `base` with the recipe's handlers; yield the server once it is ready."""
    with Running(base, {**preloaded, **RECIPE, **environ}) as server:
        yield server.ready(900)


Start = Callable[..., Running]


def write_code(model: Path, files: Mapping[str, str]) -> Path:
    """Write files below a model's folder; return the folder."""
    for name, text in files.items():
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return model


def write_model(folder: Path, code: str) -> str:
    """Write a model of these handlers; return its folder as a request names it."""
    return str(write_code(folder, {"code/inference.py": code}))


MERGING = """
    import json, os, time

    def model_fn(model_dir):
        return []

    def input_fn(body, content_type):
        text = json.loads(body)
        if not isinstance(text, str):
            raise ValueError("not a text")
        return text

    def tokens_fn(text, model):
        if text == "cannot be measured":
            raise ValueError(text)
        return [len(text)]

    def predict_batch_fn(texts, model):
        time.sleep(0.05)
        if "poison" in texts:
            raise RuntimeError("poison")
        if "crash" in texts:
            os._exit(3)
        sizes = [len(texts), max(map(len, texts)), os.getpid()]
        return [KeyError(text) if text == "bad item" else [text, *sizes] for text in texts]

    def predict_fn(text, model):
        return predict_batch_fn([text], model)[0]

    def output_fn(prediction, accept):
        if prediction[0] == "no output":
            raise RuntimeError("no output")
        return json.dumps(prediction)
"""
