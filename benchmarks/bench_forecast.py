"""How wrong the forecast and the budget of a job are, on a classifier of texts.

    .venv/bin/python benchmarks/bench_forecast.py [--minutes 5]

Trains MiniLM-L6 twice from `code/train.py`: with `max_minutes`, and for as many steps without it.
Prints each `estimate` line, and its error against the time from the first line of the log.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import CODE, minilm, parser, write_texts


def main() -> None:
    """Train with a budget, then without one."""
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=5)
    arguments.add_argument("--rows", type=int, default=2_000)
    arguments.add_argument("--words", type=int, default=25, help="the most of a text")
    arguments.add_argument("--batch_size", default="8")
    options = arguments.parse_args()
    size = ("--batch_size", options.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_texts(data / "rows.csv", options.rows, options.words)
        budget = ["--max_minutes", str(options.minutes), "--epochs", "100"]
        seconds, output = train(Path(folder) / "a", data, *size, *budget)
        print(f"budget {options.minutes:g} min: it took {seconds:.0f} s")
        print("\n".join(re.findall(r"^(?:budget|estimate) .*", output, re.MULTILINE)))
        steps = re.findall(r"(\d+) of \d+ steps fit", output)[-1]
        seconds, output = train(Path(folder) / "b", data, *size, "--max_steps", steps)
        print(f"{steps} steps: it took {seconds:.0f} s")
        for line in re.findall(r"^estimate .*", output, re.MULTILINE):
            minutes, rest = re.findall(r"takes (?:(\d+) min )?(\d+) s", line)[0]
            error = (60 * int(minutes or 0) + int(rest)) / seconds - 1
            print(f"{line}: wrong by {error:+.1%}")


def train(base: Path, data: Path, *arguments: str) -> tuple[float, str]:
    """Run a job; return its seconds from its first line on, and its log."""
    command = [sys.executable, str(CODE / "train.py"), "--model_id", str(minilm())]
    with subprocess.Popen(
        [*command, "--max_length", "128", *arguments],
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(data)},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        lines = [job.stdout.readline()]
        started = time.monotonic()
        lines += job.stdout
    assert job.returncode == 0
    return time.monotonic() - started, "".join(lines)


if __name__ == "__main__":
    main()
