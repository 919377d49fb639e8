"""What size costs: from rows to the first batch, and the plan of many hosts. No training.

    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --rows 10000 100000 --formats csv parquet
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --rows 100000 --tasks causal-lm masked-lm
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --planned 1000000 1000000000
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --hosts 64 --processes 8

Each number of rows is measured twice, in processes of its own: without and with what the first has
cached. Prints seconds (clock, and CPU in parentheses) until data is read, its report is made,
tokens are kept and, for texts with labels, the first batch is laid out; MB of the file and of the
kept tokens; and how much the process's memory grew: anonymous, and with the pages of mapped files,
which the system reclaims when it needs them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import CODE, minilm, parser, table

sys.path.insert(0, str(CODE))

_WORDS = 25
_BATCH = 32
_TASKS: dict[str, dict[str, Any]] = {
    "causal-lm": {}, "masked-lm": {}, "token-classification": {}, "question-answering": {},
    "summarization": {"text_column": "source", "label_column": "target"},
    "sentence-embedding": {}, "reranking": {},
}  # fmt: skip
"""Tasks with their further hyperparameters."""


def main() -> None:
    """Measure what was requested."""
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, nargs="*", default=[], help="read and tokenized")
    arguments.add_argument("--formats", nargs="*", default=["csv"], choices=["csv", "parquet"])
    what = "tokenize JSON Lines for these, in place of texts with labels"
    arguments.add_argument("--tasks", nargs="*", default=[], choices=list(_TASKS), help=what)
    arguments.add_argument("--planned", type=int, nargs="*", default=[], help="lengths only")
    arguments.add_argument("--hosts", type=int, default=0)
    arguments.add_argument("--processes", type=int, default=8, help="of each host")
    arguments.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child is not None:
        print(json.dumps(measure_rows(int(options.child[0]), options.child[1])), flush=True)
        return
    measured = []
    for rows, kind in itertools.product(options.rows, options.tasks or options.formats):
        with tempfile.TemporaryDirectory() as cache:
            variables = {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1", "TMPDIR": cache}
            command = [sys.executable, __file__, "--child", str(rows), kind]
            for state in ("first start", "start again"):
                done = subprocess.run(
                    command, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE
                )
                measured.append({"start": state, **json.loads(done.stdout.splitlines()[-1])})
                print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
    if measured:
        print(table(measured), flush=True)
    for rows in options.planned:
        print(json.dumps(measure_plan(rows)), flush=True)
    if options.hosts:
        print(json.dumps(measure_hosts(options.hosts, options.processes)), flush=True)


def _memory(name: str) -> int:
    """Return MB of this process: RssAnon, or VmRSS with mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith(name))


class _Meter(threading.Thread):
    """Times since its start, and the growth of this process's memory, read 20 times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = {name: _memory(name) for name in ("RssAnon", "VmRSS")}
        self._peaks = dict(self._before)
        self._is_over = threading.Event()
        self.seconds: dict[str, str] = {}
        self._clock, self._cpu = time.perf_counter(), time.process_time()
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.05):
            self._peaks = {name: max(peak, _memory(name)) for name, peak in self._peaks.items()}

    def lap(self, name: str) -> None:
        """Note the seconds since the start."""
        clock, cpu = time.perf_counter() - self._clock, time.process_time() - self._cpu
        self.seconds[name] = f"{clock:.2f} ({cpu:.2f})"

    def growth(self) -> dict[str, int]:
        """Stop, and return MB."""
        self._is_over.set()
        self.join()
        anonymous, whole = (self._peaks[name] - self._before[name] for name in self._peaks)
        return {"MB anonymous": anonymous, "MB with mapped files": whole}


def _row(kind: str, number: int, words: list[str], draw: random.Random) -> dict[str, Any]:
    """Return a random row of about 30 tokens."""
    some = draw.choices(words, k=draw.randint(1, 2 * _WORDS // 3))
    text, other = " ".join(some), " ".join(draw.choices(words, k=4))
    rows: dict[str, dict[str, Any]] = {
        "token-classification": {
            "tokens": some,
            "ner_tags": [draw.choice(["O", "O", "B-X", "I-X"]) for _ in some],
        },
        "question-answering": {
            "question": f"{other}?",
            "context": f"{text} {other}",
            "answers": {"text": [some[0]], "answer_start": [0]},
        },
        "summarization": {"source": text, "target": other},
        "sentence-embedding": {"anchor": other, "positive": text},
        "reranking": {"query": other, "positive": text, "negative": f"{other} {some[0]}"},
        "causal-lm": {"text": text},
        "masked-lm": {"text": text},
    }
    return rows.get(kind, {"text": f"{text} {number}", "label": number % 2})


def _write_rows(path: Path, rows: int, kind: str) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(4_000)]
    path.parent.mkdir()
    if kind in _TASKS:
        with path.open("w") as stream:
            stream.writelines(
                json.dumps(_row(kind, number, words, draw)) + "\n" for number in range(rows)
            )
        return
    schema = pa.schema([("text", pa.string()), ("label", pa.int64())])
    kinds: dict[str, Any] = {"csv": csv.CSVWriter, "parquet": parquet.ParquetWriter}
    with kinds[kind](str(path), schema) as writer:
        for start in range(0, rows, 100_000):
            numbers = range(start, min(rows, start + 100_000))
            part = [_row(kind, number, words, draw) for number in numbers]
            writer.write_table(pa.Table.from_pylist(part, schema))


def measure_rows(rows: int, kind: str) -> dict[str, Any]:
    """Measure from a file to kept tokens and, for texts with labels, to the first batch."""
    from transformers import AutoTokenizer

    from recipe import task_table
    from recipe.batching import packing
    from recipe.batching.batches import Packed, Training, training_loader
    from recipe.hyperparameters import Hyperparameters
    from recipe.plan import data_report

    name = kind if kind in _TASKS else "text-classification"
    task_class = task_table.load(name)  # its imports are not measured
    suffix = "jsonl" if kind in _TASKS else kind
    path = Path(tempfile.gettempdir()) / f"rows-{rows}-{kind}" / f"rows.{suffix}"
    if not path.exists():
        _write_rows(path, rows, kind)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(minilm()))
    if kind == "causal-lm":
        tokenizer.eos_token = tokenizer.sep_token
    meter = _Meter()
    options = Hyperparameters(task=name, **_TASKS.get(kind, {}))
    task = task_class({"train": path.parent}, options)
    meter.lap("read")
    data_report.inspect(
        task, tokenizer, task.lengths(tokenizer, data_report.sampled_rows(task)), 128
    )
    meter.lap("data report")
    if hasattr(task.objective, "longest_target"):
        task.objective.longest_target = 128
    samples = task.samples(tokenizer, 128)["train"]
    meter.lap("tokens kept")
    samples.fingerprint()
    meter.lap("fingerprint")
    if kind not in _TASKS:
        training = Training(samples=samples, size=_BATCH)
        shape = packing.shape([samples.lengths[some] for some in training.typical(True)])
        loader = training_loader(training, Packed(shape, _BATCH, 0, 0), pin_memory=False)
        next(iter(loader))
        meter.lap("first batch")
    return {
        "rows": rows,
        "of": kind,
        "file MB": round(path.stat().st_size / 1e6, 1),
        "tokens MB": round(samples.token_ids.nbytes / 1e6, 1),
        **meter.seconds,
        **meter.growth(),
    }


def _lengths(rows: int, seed: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).lognormal(3, 0.7, rows)
    return np.clip(drawn, 3, 128).astype(np.int32)


def measure_plan(rows: int, most: int = 5) -> dict[str, Any]:
    """Measure the first `most` portions of an epoch of one process, from lengths in a file."""
    from recipe.batching import packing

    with tempfile.NamedTemporaryFile() as file:
        for start in range(0, rows, 10**7):
            _lengths(min(10**7, rows - start), start).astype(np.uint8).tofile(file)
        file.flush()
        lengths = np.asarray(np.memmap(file.name, np.uint8, mode="r"))
        meter, began = _Meter(), time.process_time()
        steps = packing.steps(lengths, _BATCH, 0, 0, True)
        steps[0]
        meter.lap("first step")
        portion_steps = max(1, packing.PORTION // _BATCH)
        portions = -(-len(steps) // portion_steps)
        for number in range(1, min(most, portions)):
            steps[number * portion_steps]
        spent = (time.process_time() - began) / min(most, portions)
        start = time.perf_counter()
        packing.steps(lengths, _BATCH, 0, 0, True)[len(steps) - 2]
        resumed = time.perf_counter() - start
    return {
        "planned rows": rows,
        "steps": len(steps),
        "bytes of lengths": lengths.nbytes,
        **meter.seconds,
        "seconds to the last step but one, as a resume": round(resumed, 2),
        "CPU-seconds of a whole epoch": round(spent * portions, 1),
        **meter.growth(),
    }


def measure_hosts(hosts: int, processes: int, rows: int = 20_000) -> dict[str, Any]:
    """Measure the exchange and the plan of hosts with `rows` different rows each."""
    from recipe.batching.batches import Training, World
    from recipe.batching.samples import Samples, sharded

    names = [f"algo-{host + 1}" for host in range(hosts) for _ in range(processes)]
    host_samples = []
    for host in range(hosts):
        lengths = _lengths(rows, host)
        ids, starts = np.zeros(lengths.sum(), np.int32), np.cumsum([0, *lengths])
        host_samples.append(Samples(ids, starts, np.arange(rows) % 2))
    collected: list[Any] = [None] * len(names)
    for host, samples in enumerate(host_samples):
        narrow = np.diff(samples.starts).astype(np.uint8)
        collected[host * processes] = (narrow, samples.labels, samples.fingerprint())
    start = time.perf_counter()
    joined, _ = sharded(host_samples[0], names, 0, lambda _: collected)
    exchanged = time.perf_counter() - start
    training = Training(samples=joined, size=_BATCH, world=World(processes=len(names)))
    start = time.perf_counter()
    epoch = training.epoch(0, True)
    planned = time.perf_counter() - start
    excess = []
    for number in range(0, len(epoch), max(1, len(epoch) // 20)):
        tokens = [int(joined.lengths[batch].sum()) for batch, _ in epoch[number]]
        excess.append(max(tokens) / (sum(tokens) / len(tokens)) - 1)
    return {
        "hosts": hosts,
        "processes": len(names),
        "rows": len(joined),
        "steps": len(epoch),
        "bytes sent by a host": len(pickle.dumps(collected[0])),
        "seconds of the exchange": round(exchanged, 2),
        "seconds of the plan": round(planned, 2),
        "most tokens of a process above the mean, worst": round(max(excess), 4),
        "the same, mean": round(sum(excess) / len(excess), 4),
    }


if __name__ == "__main__":
    main()
