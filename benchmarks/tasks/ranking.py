"""Vectors of sentences and rerankers beside sentence-transformers' own trainers, with equal steps.

    python benchmarks/tasks/ranking.py sentence-embedding --model FOLDER
    python benchmarks/tasks/ranking.py reranking --model FOLDER --rows 2000 --seeds 3

The data is generated and its truth known: a concept has one word in queries and another in
passages, and which of these go together is to be learned; queries of the test are combinations that
no training row has. Both learn the same rows in as many steps of as many samples in float32, by the
same loss, rate and schedule, one after the other, seed by seed, and are judged by the library's own
evaluators. A variant's speed is training rows by CPU-seconds of the training alone (evaluations
off), on one thread. Each is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recipe_training import cpu_seconds

CONCEPTS, IN_A_QUERY, NEGATIVES = 60, 3, 3
FILLERS = ["please", "find", "the", "document", "that", "was", "written", "about", "in", "these"]


def words(random_: random.Random) -> list[str]:
    """Invented words that tell nothing of each other."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < 2 * CONCEPTS:
        found["".join(random_.choices(syllables, k=3))] = None
    return list(found)


def sentence(random_: random.Random, chosen: list[str]) -> str:
    """The chosen words in any order among fillers, of which there are 3 to 20."""
    mixed = [*chosen, *random_.choices(FILLERS, k=random_.randrange(3, 21))]
    random_.shuffle(mixed)
    return " ".join(mixed)


def data(rows: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Queries with a passage of the same concepts, and passages that share some of them."""
    random_ = random.Random(seed)
    vocabulary = words(random.Random(0))
    combinations: dict[tuple[int, ...], None] = {}
    while len(combinations) < rows + rows // 5:
        combinations[tuple(sorted(random_.sample(range(CONCEPTS), IN_A_QUERY)))] = None
    made = []
    for concepts in combinations:
        others = []
        for _ in range(NEGATIVES):
            other = random_.choice([each for each in range(CONCEPTS) if each not in concepts])
            others.append([other, *concepts[1:]])
        passages = [
            sentence(random_, [vocabulary[2 * each + 1] for each in one])
            for one in (concepts, *others)
        ]
        query = sentence(random_, [vocabulary[2 * each] for each in concepts])
        made.append({"query": query, "documents": passages, "labels": [1, *[0] * NEGATIVES]})
    return {"train": made[:rows], "test": made[rows:]}


def as_columns(task: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pairs for vectors (negatives are those of the batch), labelled rows for rerankers."""
    if task == "sentence-embedding":
        return [{"query": row["query"], "positive": row["documents"][0]} for row in rows]
    return [
        {"query": row["query"], "passage": text, "label": label}
        for row in rows
        for text, label in zip(row["documents"], row["labels"], strict=True)
    ]


def ours(options: argparse.Namespace, folder: Path) -> float:
    """Train by the recipe; the CPU-seconds of the training."""
    argv = ["--task", options.task, "--model_id", options.model, "--use_cpu", "True"]
    argv += ["--bf16", "False", "--epochs", str(options.epochs), "--lr", str(options.lr)]
    argv += ["--batch_size", str(options.batch_size), "--seed", str(options.seed)]
    argv += ["--eval_strategy", "no", "--save_strategy", "no", "--max_length", "64"]
    return cpu_seconds(argv, folder)


def theirs(options: argparse.Namespace, folder: Path) -> float:
    """Train by sentence-transformers; the CPU-seconds of the training."""
    import datasets
    from sentence_transformers import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers import cross_encoder as cross
    from sentence_transformers import sentence_transformer as sentences

    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    common: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": options.lr,
        "warmup_ratio": 0.1,
        "seed": options.seed,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    table = datasets.Dataset.from_list(rows)
    made: Any
    if options.task == "sentence-embedding":
        model: Any = SentenceTransformer(options.model, device="cpu")
        model.max_seq_length = 64
        arguments: Any = SentenceTransformerTrainingArguments(
            batch_sampler="no_duplicates", **common
        )
        loss: Any = sentences.losses.MultipleNegativesRankingLoss(model)
        made = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=table, loss=loss
        )
    else:
        model = CrossEncoder(options.model, num_labels=1, max_length=64, device="cpu")
        arguments = CrossEncoderTrainingArguments(**common)
        loss = cross.losses.BinaryCrossEntropyLoss(model)
        made = CrossEncoderTrainer(model=model, args=arguments, train_dataset=table, loss=loss)
    start = time.process_time()
    made.train()
    spent = time.process_time() - start
    model.save_pretrained(str(folder / "model"))
    return spent


def judge(task: str, folder: Path, rows: list[dict[str, Any]]) -> float:
    """nDCG@10 by the library's evaluators."""
    if task == "sentence-embedding":
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.evaluation import (
            InformationRetrievalEvaluator,
        )

        corpus = {
            str(n): text for n, text in enumerate(t for row in rows for t in row["documents"])
        }
        evaluator: Any = InformationRetrievalEvaluator(
            {str(n): row["query"] for n, row in enumerate(rows)},
            corpus,
            {str(n): {str(n * (NEGATIVES + 1))} for n in range(len(rows))},
        )
        scores = evaluator(SentenceTransformer(str(folder), device="cpu"))
    else:
        from sentence_transformers import CrossEncoder
        from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

        samples: Any = [
            {"query": row["query"], "positive": row["documents"][:1],
             "negative": row["documents"][1:]} for row in rows
        ]  # fmt: skip
        scores = CrossEncoderRerankingEvaluator(samples)(CrossEncoder(str(folder), device="cpu"))
    return next(value for name, value in scores.items() if name.endswith("ndcg@10"))


def child(options: argparse.Namespace) -> None:
    """Train one variant once, and print what came of it."""
    folder = Path(options.folder)
    rows = data(options.rows, options.seed)
    (folder / "data").mkdir(parents=True)
    lines = as_columns(options.task, rows["train"])
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    seconds = {"ours": ours, "theirs": theirs}[options.variant](options, folder)
    rate = len(lines) * options.epochs / seconds
    print("result", json.dumps([judge(options.task, folder / "model", rows["test"]), rate]))


def main() -> None:
    """Both variants in turns, and a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=("sentence-embedding", "reranking"))
    parser.add_argument("--model", required=True, help="a folder: an encoder with its tokenizer")
    parser.add_argument("--rows", type=int, default=4000, help="queries to train on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        child(options)
        return
    found: dict[str, list[list[float]]] = {"ours": [], "theirs": []}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for seed in range(options.seeds):
        for variant in found if seed % 2 == 0 else reversed(found):
            with tempfile.TemporaryDirectory() as folder:
                arguments = [*sys.argv[1:], "--variant", variant, "--seed", str(seed)]
                done = subprocess.run(
                    [sys.executable, __file__, *arguments, "--folder", folder],
                    env=environment, text=True, capture_output=True, check=False,
                )  # fmt: skip
            results = [line for line in done.stdout.splitlines() if line.startswith("result ")]
            if not results:
                raise SystemExit(done.stderr)
            found[variant].append(json.loads(results[-1].removeprefix("result ")))
            ndcg, rate = found[variant][-1]
            print(
                f"seed {seed} {variant}: nDCG@10 {ndcg:.4f}, {rate:.1f} rows a CPU-second",
                flush=True,
            )
    print("| variant | nDCG@10 (mean of seeds) | rows a CPU-second (median) |\n|---|---|---|")
    for variant, runs in found.items():
        scores, rates = zip(*runs, strict=True)
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        mean, rate = statistics.mean(scores), statistics.median(rates)
        print(f"| {variant} | {mean:.4f} ± {spread:.4f} | {rate:.1f} |")
    ratio = [a[1] / b[1] for a, b in zip(found["ours"], found["theirs"], strict=True)]
    print(f"ours by theirs, in pairs of a seed: {', '.join(f'{each:.2f}' for each in ratio)}")


if __name__ == "__main__":
    main()
