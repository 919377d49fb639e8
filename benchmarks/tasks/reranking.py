"""Which sentences answer a question? TREC's, `train.csv` of github.com/brmson/dataset-sts
(data/anssel/wang); the reference is sentence-transformers' CrossEncoderTrainer.

Both learn a logit of each pair by binary cross-entropy. `--rows` are pairs; `--test-rows` too, but
all of a question's are taken together.
"""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

from samples import JUDGED_FROM, drawn

LENGTH = 64
ARGUMENTS = ["--task", "reranking", "--max_length", str(LENGTH)]


def data(rows: int, seed: int, source: Path) -> list[dict[str, Any]]:
    """Read the questions that have a right and a wrong sentence, 30 sentences each at most."""
    with source.open(encoding="utf-8", newline="") as stream:
        listed = list(csv.DictReader(stream))
    lists = []
    for _, group in itertools.groupby(listed, key=lambda row: row["qtext"]):
        pairs = [
            {"query": row["qtext"], "passage": row["atext"], "label": int(row["label"])}
            for row in group
        ][:30]
        if len({pair["label"] for pair in pairs}) == 2:
            lists.append(pairs)
    chosen = list(itertools.chain.from_iterable(drawn(lists, len(lists), seed)))
    return chosen[:rows] if seed >= JUDGED_FROM else drawn(chosen, rows, seed + JUDGED_FROM)


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """Make the CrossEncoderTrainer."""
    import datasets
    from sentence_transformers import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder import losses

    ranker = CrossEncoder(model, num_labels=1, max_length=LENGTH, device="cpu")
    return CrossEncoderTrainer(
        model=ranker,
        args=CrossEncoderTrainingArguments(**settings),
        train_dataset=datasets.Dataset.from_list(rows),
        loss=losses.BinaryCrossEntropyLoss(ranker),
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Rank each question's own sentences, and measure the loss of all pairs."""
    import numpy as np
    import torch
    from sentence_transformers import CrossEncoder
    from sklearn.metrics import ndcg_score

    ranker = CrossEncoder(str(folder), device="cpu")
    pairs = [(row["query"], row["passage"]) for row in rows]
    logits = ranker.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    labels = torch.tensor([float(row["label"]) for row in rows])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
    results = []
    for _, group in itertools.groupby(range(len(rows)), key=lambda index: rows[index]["query"]):
        members = list(group)
        if labels[members].any() and len(members) > 1:
            results.append(ndcg_score([labels[members].numpy()], [logits[members].numpy()], k=10))
    return {"nDCG@10": float(np.mean(results)), "loss": float(loss)}
