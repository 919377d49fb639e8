"""Long texts cut (`long_texts` not given) and in windows (`long_texts=split`), by the recipe and by
the Trainer.

    python benchmarks/tasks/long_texts.py --model FOLDER --sentences FILE

FOLDER is that of an encoder such as MiniLM's; FILE has real prose, such as gensim's
test_data/lee_background.cor. A text is of sentences drawn from it, of as many words as IMDB's
reviews (log-normal, `--words` on average: 230), and one of them, anywhere, says whether somebody
liked a film. Without FILE texts are IMDB's reviews themselves (`film_reviews`).

The reference is what a knowing user writes: windows by the tokenizer's `return_overflowing_tokens`,
each with its text's label, the Trainer, and the mean of a text's logits. All learn the same rows,
taking turns, in bfloat16 on one thread; a test row counts as long where it has more than the model
reads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import film_reviews
from recipe_training import cpu_seconds

CUT, SPLIT, REFERENCE = "cut", "split", "reference"
LIKED = ["wonderful", "superb", "delightful", "brilliant", "lovely", "excellent"]
DISLIKED = ["awful", "terrible", "dreadful", "boring", "horrible", "miserable"]

_SPREAD = 0.73


def texts(sentences: list[str], rows: int, seed: int, words: float) -> list[dict[str, Any]]:
    """Rows, of which every other one is of a text that likes a film."""
    drawn = random.Random(seed)
    middle = math.log(words) - _SPREAD**2 / 2
    made = []
    for number in range(rows):
        wanted = min(9 * words, max(words / 10, drawn.lognormvariate(middle, _SPREAD)))
        chosen: list[str] = []
        while sum(len(each.split()) for each in chosen) < wanted:
            chosen.append(drawn.choice(sentences))
        word = drawn.choice((DISLIKED, LIKED)[number % 2])
        chosen.insert(drawn.randint(0, len(chosen)), f"I thought that the film was {word}.")
        made.append({"text": " ".join(chosen), "label": ("no", "yes")[number % 2]})
    return made


def data(options: argparse.Namespace, rows: int, seed: int) -> list[dict[str, Any]]:
    """Made texts, or reviews."""
    if options.sentences is None:
        return film_reviews.drawn(film_reviews.IMDB, rows, seed)
    prose = Path(options.sentences).read_text(encoding="utf-8")
    sentences = [each for each in re.split(r"(?<=\.)\s+", prose) if 5 <= len(each.split()) <= 60]
    return texts(sentences, rows, seed, options.words)


def of_recipe(
    options: argparse.Namespace,
    seed: int,
    rate: str,
    rows: list[Any],
    test: list[Any],
    more: list[str],
) -> tuple[list[bool], float]:
    """Whether each test row was answered rightly, and the CPU-seconds of the training."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        for channel, each in (("data", rows), ("test", test)):
            (folder / channel).mkdir()
            (folder / channel / "rows.jsonl").write_text("\n".join(map(json.dumps, each)))
        argv = ["--model_id", options.model, "--use_cpu", "True", "--bf16", "True"]
        argv += ["--max_length", str(options.length), "--epochs", str(options.epochs)]
        argv += ["--lr", rate, "--batch_size", "16", "--seed", str(seed)]
        argv += ["--eval_strategy", "no", "--save_strategy", "no", "--do_predict", "True"]
        seconds = cpu_seconds([*argv, *more], folder, test=folder / "test")
        lines = (folder / "output" / "predictions.jsonl").read_text().splitlines()
    return [said["label"] == said["true"] for said in map(json.loads, lines)], seconds


def of_trainer(
    options: argparse.Namespace, seed: int, rate: str, rows: list[Any], test: list[Any]
) -> tuple[list[bool], float]:
    """The same by the Trainer on windows."""
    import numpy as np
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)

    def windows(some: list[Any]) -> tuple[list[dict[str, Any]], Any]:
        cut = tokenizer(
            [row["text"] for row in some],
            truncation=True, max_length=options.length, return_overflowing_tokens=True,
        )  # fmt: skip
        owners = cut["overflow_to_sample_mapping"]
        found = [
            {"input_ids": ids, "attention_mask": [1] * len(ids),
             "labels": int(some[owner]["label"] == "yes")}
            for ids, owner in zip(cut["input_ids"], owners, strict=True)
        ]  # fmt: skip
        return found, np.asarray(owners)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2),
            args=TrainingArguments(
                output_dir=folder, num_train_epochs=options.epochs, learning_rate=float(rate),
                per_device_train_batch_size=16, warmup_steps=options.warmup, seed=seed,
                use_cpu=True, bf16=True, save_strategy="no", report_to="none", disable_tqdm=True,
            ),
            train_dataset=windows(rows)[0],  # type: ignore[arg-type]
            data_collator=DataCollatorWithPadding(tokenizer),
        )  # fmt: skip
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        asked, owners = windows(test)
        logits = trainer.predict(asked).predictions  # type: ignore[arg-type]
    means = [logits[owners == number].mean(axis=0) for number in range(len(test))]
    yes = [bool(mean[1] > mean[0]) for mean in means]
    return [said == (row["label"] == "yes") for said, row in zip(yes, test, strict=True)], seconds


def main() -> None:
    """A line for each seed, rate and variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--sentences", help="a file of prose")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--test-rows", type=int, default=200)
    parser.add_argument("--length", type=int, default=256, help="tokens that the model reads")
    parser.add_argument("--words", type=float, default=230)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup", type=float, default=0.1)
    parser.add_argument("--lr", default="2e-4", help="one, or several with commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--variants", default=f"{CUT},{SPLIT},{REFERENCE}")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    variants = options.variants.split(",")
    for seed in range(options.first, options.first + options.seeds):
        rows = data(options, options.rows, seed)
        test = data(options, options.test_rows, seed + 1000)
        is_long = [
            len(ids) > options.length
            for ids in tokenizer([row["text"] for row in test])["input_ids"]
        ]
        for rate in options.lr.split(","):
            for name in variants if seed % 2 == 0 else variants[::-1]:
                if name == REFERENCE:
                    right, seconds = of_trainer(options, seed, rate, rows, test)
                else:
                    more = ["--long_texts", "split"] if name == SPLIT else []
                    right, seconds = of_recipe(options, seed, rate, rows, test, more)
                of_long = [ok for ok, long in zip(right, is_long, strict=True) if long]
                print(
                    f"seed {seed} lr {rate} {name}: accuracy {sum(right) / len(right):.3f}, of the "
                    f"{len(of_long)} long ones {sum(of_long) / len(of_long):.3f}, "
                    f"{options.rows * options.epochs / seconds:.2f} rows a CPU-second",
                    file=sys.stderr, flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
