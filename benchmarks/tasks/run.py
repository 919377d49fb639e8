"""A task of the recipe beside its reference: the Trainer of an example script, of
sentence-transformers or of TRL.

    python benchmarks/tasks/run.py token_classification --model FOLDER --data wnut17train.conll
    python benchmarks/tasks/run.py question_answering --model FOLDER --data dev-v1.1.json

Needs the recipe's environment and the folder of an encoder (such as MiniLM's), or of what the
task's module makes. A module beside this file has a task's data, and where its file is from; its
reference; and what judges both. Both learn the same rows in as many steps of as many samples, by
the same rate and schedule and at the same precision (bfloat16 is torch's autocast), taking turns
seed by seed; a seed draws other rows, also to judge by, so that the spread over seeds has all that
chance does. What is saved is judged in float32. A variant's speed is training rows by CPU-seconds
of the training alone (evaluations off), on one thread. Each training is a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from recipe_training import cpu_seconds
from samples import JUDGED_FROM

OURS, THEIRS = "recipe", "reference"
SPEED = "rows/CPU-s"
TASKS = [
    *("film_reviews", "text_pairs", "token_classification", "question_answering"),
    *("sentence_embedding", "reranking", "summarization", "causal_lm", "masked_lm"),
    *("preference", "image_classification"),
]
GROUPED = {
    *("token_classification", "question_answering", "summarization", "film_reviews"),
    *("text_pairs", "causal_lm"),
}
"""Tasks whose reference can draw texts of like length together: sentence-transformers' trainers
cannot, and the samples of the others are of one length."""
LIBRARIES = {
    "sentence_embedding": ["sentence_transformers"],
    "reranking": ["sentence_transformers"],
    "preference": ["trl"],
}


def ours(options: argparse.Namespace, seed: int, folder: Path, more: list[str]) -> float:
    """Train by the recipe; the CPU-seconds of the training."""
    argv = ["--model_id", options.model, "--use_cpu", "True"]
    argv += ["--bf16", str(options.dtype == "bfloat16")]
    argv += ["--epochs", str(options.epochs), "--lr", str(options.lr)]
    argv += ["--batch_size", str(options.batch_size), "--seed", str(seed)]
    return cpu_seconds([*argv, "--eval_strategy", "no", "--save_strategy", "no", *more], folder)


def settings(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """The reference's TrainingArguments, of the same values."""
    return {
        "output_dir": str(folder / "out"),
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": options.lr,
        "warmup_steps": 0.1,
        "seed": seed,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": options.dtype == "bfloat16",
        "disable_tqdm": True,
        **({"train_sampling_strategy": "group_by_length"} if options.grouped else {}),
    }


def trained(variant: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The scores and the speed of one variant, trained once in this process."""
    import torch
    from transformers import set_seed

    torch.set_num_threads(1)
    task = importlib.import_module(options.task)
    rows = task.data(options.rows, seed, options.data)
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if variant == OURS:
        seconds = ours(options, seed, folder, task.ARGUMENTS)
    else:
        set_seed(seed)
        trainer = task.reference(options.model, rows, settings(options, seed, folder))
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        trainer.save_model(str(folder / "model"))
    unseen = task.data(options.test_rows, seed + JUDGED_FROM, options.data)
    scores = task.judge(folder / "model", unseen, options.model)
    return {**scores, SPEED: len(rows) * options.epochs / seconds}


def apart(variant: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """The same in a process of its own, forked from this one, which has imported all there is."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            status = 1
            with (Path(folder) / "log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                try:
                    result = trained(variant, seed, options, Path(folder))
                    (Path(folder) / "result").write_text(json.dumps(result))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit((Path(folder) / "log").read_text()[-6000:])
        result: dict[str, float] = json.loads((Path(folder) / "result").read_text())
    return result


def main() -> None:
    """Both variants, seed by seed; the means and the ratio of the speeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument(
        "--model", required=True, help="folder of an encoder, or of what a task's module makes"
    )
    parser.add_argument("--data", type=Path, help="the file that the task's module names")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--test-rows", type=int, default=200)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--grouped", action="store_true", help="the reference draws texts of like length together"
    )
    options = parser.parse_args()
    if options.grouped and options.task not in GROUPED:
        parser.error(f"--grouped is for {', '.join(sorted(GROUPED))}")
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": home}
        for module in (
            "transformers.trainer",
            "recipe.training.run",
            *LIBRARIES.get(options.task, ()),
        ):
            importlib.import_module(module)
        results: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
        for seed in range(options.seeds):
            for variant in (OURS, THEIRS) if seed % 2 == 0 else (THEIRS, OURS):
                one = apart(variant, seed, options)
                results[variant].append(one)
                figures = ", ".join(f"{name} {value:.4f}" for name, value in one.items())
                print(f"seed {seed} {variant}: {figures}", flush=True)
    summarise(results)


def summarise(results: dict[str, list[dict[str, float]]]) -> None:
    """Means over the seeds with one standard error, and the ratio of the speeds."""
    pairs = list(zip(results[OURS], results[THEIRS], strict=True))
    for name in results[OURS][0]:
        for variant, runs in results.items():
            listed = ", ".join(f"{run[name]:.4f}" for run in runs)
            print(f"{variant}: {name} {_mean([run[name] for run in runs])} ({listed})")
        if name != SPEED:
            gains = [ours[name] - theirs[name] for ours, theirs in pairs]
            print(f"difference, seed by seed: {_mean(gains)}")
    ratios = [ours[SPEED] / theirs[SPEED] for ours, theirs in pairs]
    print(f"speed of the recipe: {statistics.mean(ratios):.2f} times the reference's "
          f"({', '.join(f'{ratio:.2f}' for ratio in ratios)})")  # fmt: skip


def _mean(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
