"""What the campaigns share: promises that are counted, a tiny model, threads and processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.job_tree import clean_environ
from tests.support.paths import ROOT
from tests.support.tiny_models import review_tokenizer, save

CAMPAIGNS = (
    "kill", "requests", "archives", "data", "fuzz", "ranks", "disk", "drain", "workers", "load",
    "soak", "models", "secrets",
)  # fmt: skip
"""In the order in which they run: `secrets` searches the files of the others."""

PLANTED = {
    "HF_TOKEN": "hf_ordealplantedtokenordealplanted",
    "ORDEAL_DB_PASSWORD": "planted-in-the-environment-8841",
}
"""In the environment of every process of every campaign; no output may hold them."""


@dataclass
class Promise:
    """Something that must hold: how often it was tried, and how it was broken."""

    times: int = 0
    broken: list[str] = field(default_factory=list)


@dataclass
class Trial:
    """One run of a campaign: its random numbers, time limit, folder and results."""

    name: str
    promises: dict[str, Promise]
    folder: Path
    random: random.Random
    seed: int
    short: bool
    figures: dict[str, Any] = field(default_factory=dict)
    end: float = float("inf")

    @classmethod
    def begin(
        cls, name: str, promises: Sequence[str], folder: Path, seed: int, short: bool
    ) -> Trial:
        """Return a trial with an empty folder and promises that were not tried."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kept = {promise: Promise() for promise in promises}
        return cls(name, kept, folder, random.Random(f"{seed} {name}"), seed, short)

    def limit_time(self, seconds: float) -> None:
        """Set how many seconds the campaign has left."""
        self.end = time.monotonic() + seconds

    def has_time(self) -> bool:
        """Return whether another round may begin."""
        return time.monotonic() < self.end

    def check(self, promise: str, holds: bool, detail: object = "") -> bool:
        """Record one observation of a promise; print a broken one at once."""
        kept = self.promises[promise]
        kept.times += 1
        if not holds:
            kept.broken.append(str(detail)[:2000])
            if len(kept.broken) <= 5:
                print(f"BROKEN {self.name}: {promise}: {str(detail)[:2000]}", flush=True)
        return holds

    def figure(self, name: str, value: Any) -> None:
        """Set a number worth publishing."""
        self.figures[name] = value

    def count(self, name: str, by: int = 1) -> None:
        """Add to a figure."""
        self.figures[name] = self.figures.get(name, 0) + by

    def longest(self, name: str, seconds: float) -> None:
        """Keep the longest of some times as a figure."""
        self.figures[name] = max(self.figures.get(name, 0), round(seconds, 2))

    @property
    def held(self) -> bool:
        """Return whether every promise was tried and held each time."""
        return all(kept.times and not kept.broken for kept in self.promises.values())

    def table(self) -> str:
        """Return the results as text."""
        rows = [
            f"  {'UNTRIED' if not kept.times else 'BROKEN' if kept.broken else 'held':7} "
            f"{kept.times:7} times, {len(kept.broken)} broken: {name}"
            for name, kept in self.promises.items()
        ]
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return "\n".join([*rows, f"  seed {self.seed}; {figures}"])

    def summary(self) -> dict[str, Any]:
        """Return the results as JSON's types."""
        kept = {name: [value.times, value.broken] for name, value in self.promises.items()}
        return {"campaign": self.name, "seed": self.seed, "promises": kept, "figures": self.figures}


def tiny_model(folder: Path, still: bool = False, generates: bool = False) -> Path:
    """Save a BERT classifier of two layers, hidden size 32, for `tests.support.words` and numbers.

    Args:
        still: No dropout, and weights so large that the losses of texts differ.
        generates: Save a T5 instead.
    """
    reader, rate = review_tokenizer("."), 0.0 if still else 0.1
    if generates:
        return save("T5ForConditionalGeneration", folder, 0, reader, dropout_rate=rate)
    return save(
        "BertForSequenceClassification", folder, 0, reader, max_position_embeddings=64,
        id2label={0: "neg", 1: "pos"}, label2id={"neg": 0, "pos": 1}, hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate, initializer_range=0.3 if still else 0.02,
    )  # fmt: skip


_made: list[Path] = []


def make_model(folder: Path) -> Path:
    """Save `tiny_model` in another process, so that this one does not import torch, or copy it."""
    if _made and _made[0].exists():
        return Path(shutil.copytree(_made[0], folder))
    code = "import sys, pathlib; from ordeal.common import tiny_model; "
    code += "tiny_model(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], check=True, capture_output=True, cwd=ROOT
    )
    _made[:] = [folder]
    return folder


def failure(base: Path) -> str:
    """Return the failure file's text; empty if there is none."""
    path = base / "output" / "failure"
    return path.read_text(errors="replace") if path.is_file() else ""


def start(
    base: Path, command: str, log: Path, launcher: Sequence[str] = (), **environ: str
) -> subprocess.Popen[bytes]:
    """Start a command of `amphora` on a tree; append its output to `log`.

    Args:
        launcher: A command that runs the command behind it.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            [*launcher, sys.executable, "-m", "amphora", command],
            env=clean_environ(SAGEMAKER_BASE_DIR=str(base), **environ),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def exit_code(pid: int, seconds: float, kill: Callable[[], None]) -> int | None:
    """Return the exit code of a child; after so many seconds call `kill`, and return None."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    kill()
    os.waitpid(pid, 0)
    return None


@contextmanager
def background_threads(
    *targets: Callable[[], None], stop: threading.Event | None = None
) -> Iterator[None]:
    """Run functions in threads during a block; at its end set `stop`, and wait for them."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        if stop is not None:
            stop.set()
        for thread in threads:
            thread.join()


def descriptors(pids: Sequence[int]) -> int:
    """Return the number of open file descriptors of processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return total
