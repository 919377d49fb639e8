"""What planning an epoch and laying out a batch cost, by the rows and by the size of a batch.

    python benchmarks/bench_planning.py [--code FOLDER ...] [--rows 16000 160000] [--limit 40]

Each FOLDER is a `code` folder (of another checkout, to compare with); they take turns, each case in
a process of its own. Lengths are drawn as those of tweets. CPU seconds; nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[1] / "code"
SIZES = (32, 256, 512, 1024)
EPOCHS = 3
LAID_OUT = 15


def measured(code: str, rows: int, size: int) -> dict[str, Any]:
    """Of one case, in this process."""
    sys.path.insert(0, code)
    import numpy as np

    from recipe.batching import batches, packing

    # Before the module had versions, all epochs were planned before the first step.
    is_lazy = hasattr(packing, "VERSION")
    random = np.random.default_rng(1)
    lengths = np.clip(random.normal(28, 12, rows), 4, 80).astype(np.int64)
    ids = random.integers(4, 50, lengths.sum()).astype(np.int32)
    samples = batches.Samples(ids, np.append(0, np.cumsum(lengths)), np.zeros(rows, dtype=np.int64))
    training = batches.Training(samples=samples, size=size, seed=1)
    start = time.process_time()
    drawn = training.rows(1 if is_lazy else EPOCHS, True)
    of_batches: list[Any] = [samples.lengths[rows] for rows in drawn]
    shape = packing.shape(of_batches if is_lazy else [batch.tolist() for batch in of_batches])
    before_the_first = time.process_time() - start
    start = time.process_time()
    list(training.epoch(1, True))
    an_epoch = time.process_time() - start
    layout = batches.Packed(shape, size, 0, 0)
    spent = []
    for rows_of_one in drawn[:LAID_OUT]:
        start = time.process_time()
        layout.tensors(samples, rows_of_one)
        spent.append(time.process_time() - start)
    whole = [batch.sum() for batch in of_batches if len(batch) == size]
    return {
        "before the first step, s": round(before_the_first, 3),
        "an epoch, s": round(an_epoch, 3),
        "a batch, ms": round(1000 * statistics.median(spent), 2),
        "real": round(float(np.mean(whole)) / shape.tokens, 3),
        "shape": f"{shape.rows} x {shape.length}",
    }


def main() -> None:
    """Print a line of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--code", nargs="+", default=[str(CODE)])
    parser.add_argument("--rows", nargs="+", type=int, default=[16_000, 160_000])
    parser.add_argument("--limit", type=float, default=40)
    parser.add_argument("--case", nargs=3)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(options.case[0], int(options.case[1]), int(options.case[2]))))
        return
    for rows in options.rows:
        too_slow = set()
        for size in SIZES:
            for code in options.code:
                case = [code, str(rows), str(size)]
                results = f"not within {options.limit:g} s"
                if code not in too_slow:
                    command = [sys.executable, __file__, "--case", *case]
                    try:
                        done = subprocess.run(
                            command,
                            capture_output=True,
                            text=True,
                            check=True,
                            timeout=options.limit,
                        )
                        results = done.stdout.strip()
                    except subprocess.TimeoutExpired:
                        too_slow.add(code)  # with a larger batch, too
                print(*case[1:], Path(code).parent.name, results, flush=True)


if __name__ == "__main__":
    main()
