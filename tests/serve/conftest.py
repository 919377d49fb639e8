"""Real servers: `python -m amphora serve` on a free port, over a model that a test writes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

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
WORDS = ["the", "film", "was", "good", "bad", "in", "paris", "anna", "said", "again"]


class Running:
    """A server process, its address and its log."""

    def __init__(self, base: Path, environ: dict[str, str], command: Sequence[str] = SERVE) -> None:
        self.port = free_port()
        self.log_path = base / "server.log"
        self._log = self.log_path.open("wb")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SAGEMAKER_", "SM_"))}
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
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    @property
    def log(self) -> str:
        """All that the server and its workers have printed."""
        return self.log_path.read_text(errors="replace")

    def ready(self, timeout: float = 30) -> Running:
        """Wait for `/ping` to answer 200."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the server ended with {self.process.returncode}:\n{self.log}"
                )
            if self.ping() == 200:
                return self
            time.sleep(0.02)
        raise AssertionError(f"not ready after {timeout} s:\n{self.log}")

    def ping(self) -> int:
        """The status of `/ping`; 0 where nothing listens yet."""
        try:
            return self.http.get("/ping").status_code
        except httpx.TransportError:
            return 0

    def invoke(self, value: object, **headers: str) -> httpx.Response:
        """POST a value as JSON."""
        return self.http.post(
            "/invocations",
            content=json.dumps(value),
            headers={"content-type": "application/json", **headers},
        )

    def workers(self) -> list[int]:
        """Process ids of everything below the server that has no children: the model workers."""
        below = _descendants(self.process.pid)
        return [pid for pid in below if not children(pid)]

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def close(self) -> None:
        """End whatever still runs."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


def children(pid: int) -> list[int]:
    """Process ids of the direct children of any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def _descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *_descendants(child))]


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


Start = Callable[..., Running]


@pytest.fixture(autouse=True)
def forget_handlers() -> Iterator[None]:
    """A test that loads handlers here leaves the name `inference` to whoever comes next."""
    folders = list(sys.path)
    yield
    sys.path[:] = folders
    sys.modules.pop("inference", None)


def write_code(base: Path, code: str, program: str, files: dict[str, str] | None) -> None:
    """The handlers of the model under `base`."""
    folder = base / "model" / "code"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {program: code, **(files or {})}.items():
        (folder / name).write_text(textwrap.dedent(text))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(code, program="inference.py", files={...}, **environ): a server over that code."""
    servers: list[Running] = []

    def _start(
        code: str = ECHO,
        program: str = "inference.py",
        files: dict[str, str] | None = None,
        **environ: str,
    ) -> Running:
        write_code(tmp_path, code, program, files)
        servers.append(Running(tmp_path, environ))
        return servers[-1]

    yield _start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """As `start`, but for tests that leave a server as it was: those of a module share one."""
    servers: dict[object, Running] = {}

    def _shared(code: str = ECHO, **environ: str) -> Running:
        key = (code, *sorted(environ.items()))
        if key not in servers:
            base = tmp_path_factory.mktemp("shared")
            write_code(base, code, "inference.py", None)
            servers[key] = Running(base, environ)
        return servers[key]

    yield _shared
    for server in servers.values():
        server.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Whole words, four special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=32,
    )  # fmt: skip
