"""What to run first while a GPU is lent, most telling first, each step within its seconds.

    make gpu-lent ARGS="--seconds 570"

Calls in turn the stages of this folder with some of their checks. After each step it writes
`lent.json`; a later call continues there, so that several short calls do what a long one does. A
step that takes too long is ended: its stage's own JSON has the checks until then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stage import ROOT, parser, table

GPU = "benchmarks/gpu"
STEPS: tuple[tuple[str, int, str], ...] = (
    ("attention by length", 60, f"{GPU}/speed.py --only rate,attention"),
    ("batch 32 by a graph", 100, f"{GPU}/speed.py --only MiniLM_32"),
    ("step of BERT-base", 170, f"{GPU}/speed.py --only BERT-base"),
    ("compiled layers", 240, f"{GPU}/compiled.py"),
    ("predicted memory", 60, f"{GPU}/truth.py --only memory"),
    ("accuracy of bf16 weights", 240, "benchmarks/bench_precision.py --only MiniLM"),
    ("decoder beside TRL", 180, f"{GPU}/speed.py --only decoder"),
    ("ModernBERT-base", 150, f"{GPU}/speed.py --only ModernBERT"),
    ("serving", 240, f"{GPU}/serve.py --only rows,calls,classification_1,classification_graphs"),
    ("correctness", 300, f"{GPU}/truth.py"),
)
"""Names, limits in seconds, and what is run: 29 minutes in all. `_` is a space in a name."""


def run_step(words: list[str], seconds: float, log: Path) -> str:
    """Run a step; return how it ended."""
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT,
                timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "too long"
    return "failed" if done.returncode else "ok"


def main() -> None:
    """Run the steps that are not done yet and fit into the time; exit 1 if one failed."""
    began = time.monotonic()
    command = parser(__doc__)
    command.add_argument("--smoke", action="store_true", help="small sizes, on any device")
    command.add_argument("--seconds", type=float, default=1750, help="the time limit")
    command.add_argument("--only", default="", help="the beginning of a step's name")
    command.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "lent")
    options = command.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "lent.json"
    records: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    done = {record["step"] for record in records}
    for number, (name, limit, call) in enumerate(STEPS):
        if name in done or not name.startswith(options.only):
            continue
        left = options.seconds - (time.monotonic() - began)
        if left < limit and not options.smoke:
            print(f"{name}: {limit} s do not fit into {left:.0f} s; call again")
            break
        words = [word.replace("_", " ") if "/" not in word else word for word in call.split()]
        folder = options.out / f"{number} {name}"
        folder.mkdir(exist_ok=True)
        if GPU in call:
            words += ["--out", str(folder), "--seconds", str(left if options.smoke else limit)]
            words += ["--smoke"] * options.smoke
        elif options.smoke:
            words += ["--seeds", "2"]
        started = time.monotonic()
        outcome = run_step(words, left if options.smoke else limit, folder / "log.txt")
        seconds = round(time.monotonic() - started, 1)
        records.append({"step": name, "outcome": outcome, "seconds": seconds})
        path.write_text(json.dumps(records, indent=1) + "\n")
        print(f"{outcome:8} {name} ({seconds} s)", flush=True)
    print(f"\n{table(records)}\n{path}")
    sys.exit(any(record["outcome"] != "ok" for record in records))


if __name__ == "__main__":
    main()
