"""A task of the recipe beside its reference: HF Trainer with the logic of the example scripts.

    python benchmarks/tasks/run.py token_classification --model FOLDER
    python benchmarks/tasks/run.py question_answering --model FOLDER --rows 2000 --seeds 3

Needs the recipe's environment and the folder of an encoder (such as MiniLM's). A module beside this
file has a task's generated data, whose truth is known; its reference; and what judges both. Both
learn the same rows in as many steps of as many samples in float32, by the same rate and schedule,
taking turns seed by seed. A variant's speed is training rows by CPU-seconds of the training alone
(evaluations off), on one thread. Each training is a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recipe_training import cpu_seconds

OURS, THEIRS = "recipe", "reference"
TASKS = [
    *("token_classification", "question_answering"),
    *("masked_lm", "summarization", "image_classification", "preference"),
]


def ours(options: argparse.Namespace, folder: Path, more: list[str]) -> float:
    """Train by the recipe; the CPU-seconds of the training."""
    argv = ["--model_id", options.model, "--use_cpu", "True", "--bf16", "False"]
    argv += ["--epochs", str(options.epochs), "--lr", str(options.lr)]
    argv += ["--batch_size", str(options.batch_size), "--seed", str(options.seed)]
    return cpu_seconds([*argv, "--eval_strategy", "no", "--save_strategy", "no", *more], folder)


def train_arguments(options: argparse.Namespace, folder: Path) -> Any:
    """The reference's TrainingArguments, of the same values."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        warmup_steps=0.1,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )


def child(options: argparse.Namespace) -> None:
    """Train one variant once, and print what came of it."""
    import torch
    from transformers import set_seed

    torch.set_num_threads(1)
    task = importlib.import_module(options.task)
    folder = Path(options.folder)
    rows = task.data(options.rows, options.seed)
    test = task.data(options.rows // 5, options.seed + 1000)
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if options.child == OURS:
        seconds = ours(options, folder, task.ARGUMENTS)
    else:
        arguments = train_arguments(options, folder)
        set_seed(arguments.seed)
        trainer = task.reference(options.model, rows, arguments)
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        trainer.save_model(str(folder / "model"))
    score = task.judge(folder / "model", test)
    speed = len(rows) * options.epochs / seconds
    print(f"\nchild {json.dumps({'score': score, 'speed': speed})}", flush=True)


def main() -> None:
    """Both variants, seed by seed; the means and the ratio of the speeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument(
        "--model", required=True, help="folder of an encoder, or of what a task's module makes"
    )
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=[OURS, THEIRS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    for seed in range(options.seeds):
        for variant in (OURS, THEIRS) if seed % 2 == 0 else (THEIRS, OURS):
            with tempfile.TemporaryDirectory() as base:
                command = [sys.executable, __file__, *sys.argv[1:], "--seed", str(seed)]
                command += ["--child", variant, "--folder", str(Path(base) / "job")]
                threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": base}
                done = subprocess.run(
                    command, env=os.environ | threads, capture_output=True, text=True
                )
            if done.returncode:
                sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
            (line,) = [each for each in done.stdout.splitlines() if each.startswith("child ")]
            found[variant].append(json.loads(line.removeprefix("child ")))
            one = found[variant][-1]
            print(f"seed {seed} {variant}: score {one['score']:.4f}, {one['speed']:.1f} rows/CPU-s",
                  flush=True)  # fmt: skip
    ratios = [a["speed"] / b["speed"] for a, b in zip(found[OURS], found[THEIRS], strict=True)]
    for variant, runs in found.items():
        scores = [each["score"] for each in runs]
        speeds = statistics.mean(each["speed"] for each in runs)
        each_score = ", ".join(f"{each:.4f}" for each in scores)
        mean = statistics.mean(scores)
        print(f"{variant}: score {mean:.4f} ({each_score}), {speeds:.1f} rows/CPU-s")
    print(f"speed of the recipe: {statistics.mean(ratios):.2f} times the reference's "
          f"({', '.join(f'{each:.2f}' for each in ratios)})")  # fmt: skip


if __name__ == "__main__":
    main()
