"""What the campaigns share: promises that are counted, a tiny model, threads and processes."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CAMPAIGNS = (
    "kill", "requests", "archives", "data", "fuzz", "ranks", "disk", "drain", "workers", "load",
    "soak", "secrets",
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


WORDS = ("the", "film", "was", "good", "great", "bad", "awful", "truly", "number", ",", ".")


def tiny_model(folder: Path, still: bool = False, generates: bool = False) -> Path:
    """Save a BERT classifier of two layers, hidden size 32, whose words are WORDS and digits.

    Args:
        still: No dropout, and weights so large that the losses of texts differ.
        generates: Save a T5 instead.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    digits = [str(digit) for digit in range(10)]
    pieces = [*special, *WORDS, *digits, *(f"##{digit}" for digit in digits)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    torch.manual_seed(0)
    if generates:
        model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=len(pieces), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
            dropout_rate=0.0 if still else 0.1,
        ))  # fmt: skip
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(
            vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=64, id2label={0: "neg", 1: "pos"},
            label2id={"neg": 0, "pos": 1}, hidden_dropout_prob=0.0 if still else 0.1,
            attention_probs_dropout_prob=0.0 if still else 0.1,
            initializer_range=0.3 if still else 0.02,
        ))  # fmt: skip
    model.save_pretrained(folder)
    transformers.BertTokenizerFast(
        tokenizer_object=tokenizer, vocab=vocabulary, model_max_length=64
    ).save_pretrained(folder)
    return folder


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


def write_reviews(path: Path, count: int) -> Path:
    """Write a CSV file of `count` texts in two classes that a tiny model can tell apart."""
    kinds = [("good", "great", "pos"), ("bad", "awful", "neg")]
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("review", "sentiment"))
        for number in range(count):
            first, second, label = kinds[number % 2]
            writer.writerow((f"the film number {number} was {first} , truly {second}", label))
    return path


def clean_environ(**extra: str) -> dict[str, str]:
    """Return this process's environment without SM_*, SAGEMAKER_* and AMPHORA_*, plus `extra`."""
    prefixes = ("SM_", "SAGEMAKER_", "AMPHORA_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)} | extra


def configure(base: Path, hyperparameters: Mapping[str, Any], **files: Any) -> None:
    """Write input/config of a job."""
    folder = base / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in {"hyperparameters": hyperparameters, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))


def failure(base: Path) -> str:
    """Return the failure file's text; empty if there is none."""
    path = base / "output" / "failure"
    return path.read_text(errors="replace") if path.is_file() else ""


def start(
    base: Path, command: str, log: Path, launcher: Sequence[str] = (), **environ: str
) -> subprocess.Popen[bytes]:
    """Start `amphora train` or `amphora serve` on a tree; append its output to `log`.

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


def wait_until(condition: Callable[[], object], seconds: float, pause: float = 0.05) -> bool:
    """Wait until a condition is true; return False if it is not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


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


def children(pid: int) -> list[int]:
    """Return the process ids of the direct children of any of its threads."""
    results: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            results += map(int, task.read_text().split())
    return results


def descendants(pid: int) -> list[int]:
    """Return all processes below one."""
    return [descendant for child in children(pid) for descendant in (child, *descendants(child))]


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, as the end of a container does."""
    for descendant in (pid, *descendants(pid)):
        send(descendant, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def free_port() -> int:
    """Return a port in TIME_WAIT: for a minute the kernel gives it only to a process that names it
    with SO_REUSEADDR."""
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        client.connect(listening.getsockname())
        listening.accept()[0].close()  # the side that closes first is in TIME_WAIT
        port: int = listening.getsockname()[1]
        return port


def memory(pids: Sequence[int]) -> float:
    """Return the MB of processes, shared pages counted once (PSS).

    Pages of files are left out: how many processes share PyTorch's depends on the whole machine.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kinds = ("Pss_Anon:", "Pss_Shmem:")
            total += sum(int(line.split()[1]) for line in lines if line.startswith(kinds))
    return total / 1024


def descriptors(pids: Sequence[int]) -> int:
    """Return the number of open file descriptors of processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return total
