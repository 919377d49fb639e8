"""Time from a container's start to a script's first line: ours beside sagemaker-training's.

    .venv/bin/python benchmarks/bench_start.py [--runs 15]

Each run is a whole process on the same job, the two taking turns; `python script.py` alone is the
floor. Prints the medians in seconds, and each pair's ratio. Needs sagemaker-training (`make setup`
installs it where there is a C compiler).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = (
    "import pathlib, time\npathlib.Path(__file__).with_name('first').write_text(str(time.time()))\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        base = write_job(Path(folder))
        commands = {
            "python": [sys.executable, str(base / "code" / "script.py")],
            "amphora train": [sys.executable, "-m", "amphora", "train"],
            "sagemaker-training": [str(Path(sys.executable).with_name("train"))],
        }
        for command in commands.values():
            measure(command, base)
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                taken[name].append(measure(command, base))
    for name, seconds in taken.items():
        middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
        print(f"{name:20} median {middle:.3f} s  ({low:.3f} to {high:.3f})")
    ratios = [
        a / b for a, b in zip(taken["amphora train"], taken["sagemaker-training"], strict=True)
    ]
    print(f"amphora / sagemaker-training, pair by pair: median {statistics.median(ratios):.2f}")


def write_job(base: Path) -> Path:
    configuration = {
        "hyperparameters": {"sagemaker_program": "script.py", "epochs": "3"},
        "inputdataconfig": {},
        "resourceconfig": {"current_host": "localhost", "hosts": ["localhost"]},
    }
    for name, content in configuration.items():
        path = base / "input" / "config" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    (base / "code").mkdir()
    (base / "code" / "script.py").write_text(SCRIPT)
    return base


def measure(command: list[str], base: Path) -> float:
    """Seconds from the start of `command` to the script's first line."""
    for name in ("output", "model"):
        shutil.rmtree(base / name, ignore_errors=True)
        (base / name).mkdir()
    first = base / "code" / "first"
    first.unlink(missing_ok=True)
    environ = {**os.environ, "SAGEMAKER_BASE_DIR": str(base), "AWS_DEFAULT_REGION": "eu-west-1"}
    started = time.time()
    subprocess.run(command, env=environ, capture_output=True, check=True)
    return float(first.read_text()) - started


if __name__ == "__main__":
    main()
