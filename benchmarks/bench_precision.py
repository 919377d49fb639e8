"""Scores of training by bfloat16 copies of the weights, beside autocast and float32, over seeds.

    OMP_NUM_THREADS=1 python benchmarks/bench_precision.py [--seeds 5] [--only MiniLM]

Trains small jobs of the tests, with dropout, and MiniLM on the sentences of examples/demo.py.
Prints a Markdown table of the loss and a score of held-out rows: means over the seeds, and mean
differences to autocast with the same seed, in their standard errors.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common import CODE, ROOT, minilm, parser, table

sys.path.insert(0, str(CODE))
sys.path.insert(0, str(ROOT / "examples"))

import demo  # isort: skip

from tests.support import jobs
from tests.support.tasks import CASES, write

TASKS = {
    "text-classification": "accuracy", "token-classification": "f1",
    "question-answering": "f1", "reranking": "ndcg_at_10",
    "masked-lm": "token_accuracy", "causal-lm": "token_accuracy",
    "causal-lm, LoRA": "token_accuracy",
    "MiniLM": "accuracy",
}  # fmt: skip
WAYS = {
    "float32": ["--bf16", "False"],
    "autocast": ["--bf16", "True"],
    "copies": ["--bf16", "True", "--bf16_weights", "True"],
}
ROWS = 400


def evaluate(task: str, seed: int, way: str, base: Path) -> dict[str, float]:
    """Train with a seed, which also draws the rows; return the metrics of held-out rows."""
    if task == "MiniLM":
        drawn = demo.sentences(240, str(seed)), demo.sentences(120, "test")
        halves = [[{"text": text, "label": label} for text, label in rows] for rows in drawn]
        model, argv = minilm(), ["--epochs", "2", "--lr", "1e-4"]
    else:
        case = CASES[task]
        rows = case.rows(2 * ROWS, seed)
        halves = [rows[:ROWS], rows[ROWS:]]
        model = case.model(base / "start", 0.1)
        argv = [*case.arguments, "--epochs", "6", "--lr", "3e-3"]
    names = ("train", "validation")
    channels = {name: write(base / name, half) for name, half in zip(names, halves, strict=True)}
    given = (*argv, "--seed", str(seed), "--save_strategy", "no", *WAYS[way])
    with contextlib.redirect_stdout(io.StringIO()):
        return jobs.run(base / "job", model, channels, *given)


def main() -> None:
    """Train everything, and print a table."""
    command = parser(__doc__)
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--only", default="", help="the beginning of a task's name")
    options = command.parse_args()
    rows = []
    for task in (name for name in TASKS if name.startswith(options.only)):
        metrics_by_way: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for seed in range(options.seeds):
            for way in WAYS:
                with tempfile.TemporaryDirectory() as folder:
                    metrics = evaluate(task, seed, way, Path(folder))
                metrics_by_way[way].append(
                    [metrics[f"eval_{name}"] for name in ("loss", TASKS[task])]
                )
        row: dict[str, str] = {"task": task}
        for number, name in enumerate(("loss", "score")):
            values = {
                way: [seen[number] for seen in several] for way, several in metrics_by_way.items()
            }
            shown = [f"{statistics.mean(several):.4f}" for several in values.values()]
            row[f"{name}: {', '.join(WAYS)}"] = ", ".join(shown)
            for way in ("float32", "copies"):
                apart = [a - b for a, b in zip(values[way], values["autocast"], strict=True)]
                error = statistics.stdev(apart) / math.sqrt(len(apart)) or math.inf
                row[f"{name}: {way} to autocast"] = f"{statistics.mean(apart) / error:+.1f}"
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
