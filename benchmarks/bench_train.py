"""Training speed of the recipe, compared with HF Trainer (padded to 128 tokens, grouped by length).

    OMP_NUM_THREADS=1 python benchmarks/bench_train.py [--data folder/with/train.csv] [--rounds 3]

Without --data, texts of random words are trained on. Variants take turns, each in a process of its
own (the recipe sets how the C library keeps memory), each round a few optimizer steps. Prints a
Markdown table of medians: samples per CPU-second (of all threads), which other work on the machine
disturbs least, and the share of the machine's bfloat16 matrix rate, measured in the same rounds;
only real tokens count as work.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common import CODE, minilm, parser, table, take_turns, training_arguments, write_texts

sys.path.insert(0, str(CODE))

import datasets
import torch
from transformers import DataCollatorWithPadding, Trainer

from recipe import arguments, compat
from recipe.data import classification
from recipe.models import pretrained
from recipe.plan.batch_layout import TrainableModel
from recipe.plan.table import Table
from recipe.runtime import memory
from recipe.tasks.text_classification.task import CLASSES
from recipe.tokenization import texts
from recipe.training import engine
from recipe.training.preparation import lay_out

BATCH, PADDED = 32, 128
MATRIX = 2048


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: `steps` optimizer steps a round."""

    name: str
    is_recipe: bool
    bf16: bool
    steps: int
    groups: bool = False
    """Whether the Trainer draws texts of similar lengths together, and pads to the longest."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of a round."""

    samples: float
    """Per CPU-second."""
    flops: float
    """Floating-point operations per CPU-second, of real tokens only."""


VARIANTS = (
    Variant("HF Trainer, padded to 128, float32", is_recipe=False, bf16=False, steps=4),
    Variant("HF Trainer, padded to 128, bfloat16", is_recipe=False, bf16=True, steps=4),
    Variant("HF Trainer, grouped, float32", is_recipe=False, bf16=False, steps=16, groups=True),
    Variant("HF Trainer, grouped, bfloat16", is_recipe=False, bf16=True, steps=32, groups=True),
    Variant("recipe, float32", is_recipe=True, bf16=False, steps=24),
    Variant("recipe, bfloat16", is_recipe=True, bf16=True, steps=60),
)


def main() -> None:
    """Measure and print a table."""
    command = parser(__doc__)
    command.add_argument("--data", type=Path, help="a folder with train.csv")
    command.add_argument("--model", default=str(minilm()))
    command.add_argument("--rounds", type=int, default=3)
    options = command.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder)
        if options.data is None:
            write_texts(data / "train.csv", 4000, 17)
        pools = [ProcessPoolExecutor(1, mp_context=spawn) for _ in VARIANTS]
        ways: dict[str, Callable[[], Speed]] = {"matrix": matrix_rate}
        for pool, variant in zip(pools, VARIANTS, strict=True):
            ways[variant.name] = lambda pool=pool, variant=variant: (  # type: ignore[misc]
                pool.submit(train, variant, options.model, data).result()
            )
        results = take_turns(ways, options.rounds)
        for pool in pools:
            pool.shutdown()
    rate = statistics.median(speed.flops for speed in results.pop("matrix"))
    speeds = {
        name: (statistics.median(speed.samples for speed in rounds), rounds[0])
        for name, rounds in results.items()
    }
    first, _ = speeds[VARIANTS[0].name]
    print(f"bfloat16 products: {rate / 1e9:.0f} GFLOP per CPU-second\n")
    print(table([
        {
            "variant": name, "samples per CPU-second": f"{median:.1f}",
            "ratio": f"{median / first:.1f}",
            "share of the matrix rate": f"{median * speed.flops / speed.samples / rate:.0%}",
        }
        for name, (median, speed) in speeds.items()
    ]))  # fmt: skip


@functools.cache
def load(model: str, data: Path) -> tuple[Any, Any, Any]:
    """Return the model, the tokenizer and the tokenized training data."""
    compat.quieten()
    datasets.disable_progress_bars()
    options = arguments.parse(["--model_name_or_path", model, "--batch_size", str(BATCH)])
    channels = {"train": data / "train.csv"}
    splits = classification.load(channels, options)
    source = pretrained.find(model, channels)
    loaded, tokenizer = pretrained.load(source, splits.labels, options)
    return loaded, tokenizer, texts.samples(splits.train, tokenizer, PADDED)


def train(variant: Variant, model: str, data: Path) -> Speed:
    """Train a copy of the model for the steps of a round."""
    loaded, tokenizer, samples = load(model, data)
    with tempfile.TemporaryDirectory() as folder:
        strategy = {"train_sampling_strategy": "group_by_length"} if variant.groups else {}
        args = training_arguments(folder, BATCH, variant.steps, bf16=variant.bf16, **strategy)
        if variant.is_recipe:
            memory.keep_freed()
            to_train = TrainableModel(
                model=copy.deepcopy(loaded), tokenizer=tokenizer, arguments=args,
                objective=CLASSES, packing=True,
            )  # fmt: skip
            trainer: Trainer = engine.build(
                lay_out(to_train, {"train": samples, "evaluation": samples}, Table())
            )
        else:
            ids = [samples.tokens(row) for row in range(len(samples))]
            rows = datasets.Dataset.from_dict({"input_ids": ids, "label": samples.labels})
            fixed = {} if variant.groups else {"padding": "max_length", "max_length": PADDED}
            collator = DataCollatorWithPadding(tokenizer, **fixed)
            trainer = Trainer(
                model=copy.deepcopy(loaded), args=args, train_dataset=rows, data_collator=collator
            )
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
    speed = variant.steps * BATCH / seconds
    length = float(samples.lengths.mean())
    return Speed(speed, 6 * loaded.num_parameters(exclude_embeddings=True) * length * speed)


def matrix_rate() -> Speed:
    """Measure a large bfloat16 product."""
    left = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16)
    right = left.t().contiguous()
    torch.mm(left, right)
    started = time.process_time()
    for _ in range(10):
        torch.mm(left, right)
    return Speed(0, 10 * 2 * MATRIX**3 / (time.process_time() - started))


if __name__ == "__main__":
    main()
