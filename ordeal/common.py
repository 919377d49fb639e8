"""What the campaigns share: promises that are counted, a tiny model, processes and their ends."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CAMPAIGNS = (
    "kill", "requests", "archives", "data", "fuzz", "ranks", "disk", "drain", "workers", "load",
    "soak", "secrets",
)  # fmt: skip
"""In the order in which they run: `secrets` looks through what the others left."""

PLANTED = {
    "HF_TOKEN": "hf_ordealplantedtokenordealplanted",
    "ORDEAL_DB_PASSWORD": "planted-in-the-environment-8841",
}
"""In the environment of every process of every campaign; no output may hold them."""


@dataclass
class Promise:
    """Something that must hold, and how often it was seen to."""

    times: int = 0
    broken: list[str] = field(default_factory=list)


@dataclass
class Trial:
    """One campaign's run: its randomness, its time, its folder and what was seen."""

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
        """An empty folder, and promises that nobody has tried yet."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kept = {promise: Promise() for promise in promises}
        return cls(name, kept, folder, random.Random(f"{seed} {name}"), seed, short)

    def bound(self, seconds: float) -> None:
        """Let `has_time` be False after so many seconds."""
        self.end = time.monotonic() + seconds

    def has_time(self) -> bool:
        """Whether another round may begin."""
        return time.monotonic() < self.end

    def check(self, promise: str, holds: bool, detail: object = "") -> bool:
        """Note one observation of a promise; a broken one is printed at once."""
        kept = self.promises[promise]
        kept.times += 1
        if not holds:
            kept.broken.append(str(detail)[:2000])
            if len(kept.broken) <= 5:
                print(f"BROKEN {self.name}: {promise}: {str(detail)[:2000]}", flush=True)
        return holds

    def figure(self, name: str, value: Any) -> None:
        """A number worth publishing."""
        self.figures[name] = value

    def count(self, name: str, by: int = 1) -> None:
        """Add to a figure."""
        self.figures[name] = self.figures.get(name, 0) + by

    @property
    def held(self) -> bool:
        """Whether every promise was tried and held each time."""
        return all(kept.times and not kept.broken for kept in self.promises.values())

    def table(self) -> str:
        """For people."""
        rows = [
            f"  {'UNTRIED' if not kept.times else 'BROKEN' if kept.broken else 'held':7} "
            f"{kept.times:7} times, {len(kept.broken)} broken: {name}"
            for name, kept in self.promises.items()
        ]
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return "\n".join([*rows, f"  seed {self.seed}; {figures}"])

    def summary(self) -> dict[str, Any]:
        """For machines."""
        kept = {name: [value.times, value.broken] for name, value in self.promises.items()}
        return {"campaign": self.name, "seed": self.seed, "promises": kept, "figures": self.figures}


WORDS = ("the", "film", "was", "good", "great", "bad", "awful", "truly", "number", ",", ".")


def tiny_model(folder: Path, still: bool = False, writes: bool = False) -> Path:
    """A BERT classifier of two layers, hidden size 32, whose words are WORDS and digits.

    Args:
        still: Without dropout, and with weights so large that the losses of texts differ.
        writes: A T5 instead.
    """
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertTokenizerFast,
        T5Config,
        T5ForConditionalGeneration,
    )

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    digits = [str(digit) for digit in range(10)]
    pieces = [*special, *WORDS, *digits, *(f"##{digit}" for digit in digits)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    more: dict[str, Any] = {}
    if still:
        more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        more["initializer_range"] = 0.3
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, id2label={0: "neg", 1: "pos"},
        label2id={"neg": 0, "pos": 1}, **more,
    )  # fmt: skip
    encoder_decoder = T5Config(
        vocab_size=len(pieces), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
        dropout_rate=0.0 if still else 0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    if writes:
        T5ForConditionalGeneration(encoder_decoder).save_pretrained(folder)
    else:
        BertForSequenceClassification(config).save_pretrained(folder)
    fast = BertTokenizerFast(tokenizer_object=tokenizer, vocab=vocabulary, model_max_length=64)
    fast.save_pretrained(folder)
    return folder


def made_elsewhere(folder: Path) -> Path:
    """`tiny_model`, by a process of its own: this one stays without torch."""
    code = "import sys, pathlib; from ordeal.common import tiny_model; "
    code += "tiny_model(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], check=True, capture_output=True, cwd=ROOT
    )
    return folder


ROOT = Path(__file__).resolve().parents[1]


def reviews(path: Path, count: int) -> Path:
    """A CSV file of so many texts in two classes that a tiny model can tell apart."""
    kinds = [("good", "great", "pos"), ("bad", "awful", "neg")]
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("review", "sentiment"))
        for number in range(count):
            first, second, label = kinds[number % 2]
            writer.writerow((f"the film number {number} was {first} , truly {second}", label))
    return path


def clean_environ(**extra: str) -> dict[str, str]:
    """What a container's process would see: nothing of this one's SM_* and SAGEMAKER_*."""
    prefixes = ("SM_", "SAGEMAKER_", "AMPHORA_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)} | extra


def configure(base: Path, hyperparameters: Mapping[str, Any], **files: Any) -> None:
    """Write input/config of a job's tree."""
    folder = base / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in {"hyperparameters": hyperparameters, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))


def failure(base: Path) -> str:
    """The failure file's text; empty where there is none."""
    path = base / "output" / "failure"
    return path.read_text(errors="replace") if path.is_file() else ""


def start(base: Path, command: str, log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """`amphora train` or `amphora serve` on a tree, all it prints appended to `log`."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "amphora", command],
            env=clean_environ(SAGEMAKER_BASE_DIR=str(base), **environ),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def children(pid: int) -> list[int]:
    """Process ids of the direct children of any of its threads."""
    results: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            results += map(int, task.read_text().split())
        except OSError:
            continue
    return results


def descendants(pid: int) -> list[int]:
    """Everything below a process."""
    return [descendant for child in children(pid) for descendant in (child, *descendants(child))]


def kill_tree(pid: int) -> None:
    """As a container ends: everything, at once."""
    for descendant in (pid, *descendants(pid)):
        send(descendant, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """A signal, to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def free_port() -> int:
    """A port that the kernel gives to nobody else for a minute, which TIME_WAIT is, but to who asks
    for it by its number with SO_REUSEADDR."""
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        client.connect(listening.getsockname())
        listening.accept()[0].close()  # who closes first has the TIME_WAIT
        port: int = listening.getsockname()[1]
        return port


def memory(pids: Sequence[int]) -> float:
    """MB that processes hold together, shared pages counted once (PSS).

    Without files' pages: how many share PyTorch's changes as others on the machine come and go.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kinds = ("Pss_Anon:", "Pss_Shmem:")
        total += sum(int(line.split()[1]) for line in lines if line.startswith(kinds))
    return total / 1024


def descriptors(pids: Sequence[int]) -> int:
    """Open file descriptors of processes."""
    total = 0
    for pid in pids:
        try:
            total += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
    return total
