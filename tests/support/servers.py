"""Real servers: `python -m amphora serve` on a free port, and the code of models that tests write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.paths import CODE
from tests.support.ports import free_port
from tests.support.preloading import PRELOADED
from tests.support.until import until

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


def serve_with(limits: dict[str, float]) -> tuple[str, ...]:
    """Return the command of a server with other limits.

    `open_files` is the limit of the process, `linger` the seconds that it waits after SIGTERM for
    requests on their way.
    """
    files, linger = int(limits.get("open_files", 4096)), limits.get("linger")
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}));"
        "from amphora.cli import main; from amphora.serving.http import server;"
        f" server._LINGER_SECONDS = {linger} or server._LINGER_SECONDS;"
        " raise SystemExit(main())"
    )
    return (sys.executable, "-c", program, "serve")


RECIPE = {"AMPHORA_CODE_DIR": str(CODE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""Settings of a server whose requests the recipe's handlers answer."""
IN_FLOAT32 = RECIPE | {"AMPHORA_DTYPE": "float32"}


class Running:
    """A server process, its address and its log; as a context it ends with the block."""

    def __init__(
        self, base: Path, environ: Mapping[str, str], command: Sequence[str] = SERVE
    ) -> None:
        self.port = free_port()
        self.log_path = base / "server.log"
        self._log = self.log_path.open("wb")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SAGEMAKER_", "SM_"))}
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
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=240)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """All that the server and its workers have printed."""
        return self.log_path.read_text(errors="replace")

    def ready(self, timeout: float = 240) -> Running:
        """Wait for `/ping` to answer 200."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the server ended with {self.process.returncode}:\n{self.log}"
                )
            # Another test's server may have taken the port before this one came to listen.
            if self.ping() == 200 and self.listens():
                return self
            time.sleep(0.02)
        raise AssertionError(f"not ready after {timeout} s:\n{self.log}")

    def listens(self) -> bool:
        """Whether it is this server that listens on the port."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        # State 0A is LISTEN.
        inodes = {row[9] for row in rows if row[1].endswith(f":{self.port:04X}") and row[3] == "0A"}
        sockets = {f"socket:[{inode}]" for inode in inodes}
        pids = [self.process.pid, *_descendants(self.process.pid)]
        links = (link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*"))
        with contextlib.suppress(OSError):
            return any(str(link.readlink()) in sockets for link in links)
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
        below = _descendants(self.process.pid)
        return [pid for pid in below if not children(pid)]

    def wait_for_workers(self, count: int, timeout: float = 240) -> list[int]:
        """Wait until so many workers run: a server is ready when the first of them is."""
        until(
            lambda: self.metric("amphora_workers") == len(self.workers()) == count,
            timeout,
            self.workers,
        )
        return self.workers()

    def metric(self, name: str) -> float:
        """A metric that has no labels."""
        rows = (row.split() for row in self.http.get("/metrics").text.splitlines())
        return next(float(row[1]) for row in rows if row[:1] == [name])

    def stop(self, timeout: float = 240) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def close(self) -> None:
        """Kill the server and what it started, which a server that is killed cannot end."""
        self.http.close()
        if self.process.poll() is None:
            below = _descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._log.close()


def fault(answer: httpx.Response) -> tuple[int, str]:
    """Return the status of a refusal, and the code of its error."""
    return answer.status_code, answer.json()["error"]["code"]


@contextlib.contextmanager
def served(base: Path, preloaded: Mapping[str, str], **environ: str) -> Iterator[Running]:
    """Serve the model below `base` with the recipe's handlers; yield the server once it is ready."""
    with Running(base, {**preloaded, **RECIPE, **environ}) as server:
        yield server.ready(900)


def children(pid: int) -> list[int]:
    """Process ids of the direct children of any of its threads."""
    results: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread that has just ended has none.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            results += map(int, task.read_text().split())
    return results


def _descendants(pid: int) -> list[int]:
    return [descendant for child in children(pid) for descendant in (child, *_descendants(child))]


Start = Callable[..., Running]


def write_code(base: Path, code: str, program: str, files: dict[str, str] | None) -> None:
    """The handlers of the model under `base`."""
    folder = base / "model" / "code"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {program: code, **(files or {})}.items():
        (folder / name).write_text(textwrap.dedent(text))


STREAM = (
    ECHO
    + """
    import os, time

    def predict_fn(data, model):
        def words():
            for number in range(data["words"]):
                if number == data.get("break"):
                    raise RuntimeError("broken in the middle")
                yield f"word{number} "
                time.sleep(data.get("pause", 0))
                while "after" in data and not os.path.exists(f"{data['after']}{number}"):
                    time.sleep(0.01)
        return words()

    def output_fn(prediction, accept):
        return prediction, "text/event-stream"
"""
)


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


def write_model(folder: Path, code: str) -> str:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text(code)
    return str(folder)


NAMED = """
import json
def model_fn(model_dir): return model_dir.rsplit("/", 1)[1]
def transform_fn(model, body, content_type, accept): return json.dumps([model, json.loads(body)])
"""
