"""Passages of queries with labels; the reference is sentence-transformers' CrossEncoderTrainer.

Both learn a logit of each pair by binary cross-entropy. `rows` are pairs, four for a query.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrieval import LENGTH, NEGATIVES, queries

ARGUMENTS = ["--task", "reranking", "--max_length", str(LENGTH)]
SCORE = "nDCG@10"


def data(rows: int, seed: int) -> list[dict[str, Any]]:
    """A row for each passage of a query; for the test, one for each query."""
    if seed >= 1000:
        return queries(rows, seed, for_tests=True)
    return [
        {"query": row["query"], "passage": text, "label": int(at == 0)}
        for row in queries(rows // (NEGATIVES + 1), seed, for_tests=False)
        for at, text in enumerate(row["documents"])
    ]


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The CrossEncoderTrainer."""
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


def judge(folder: Path, rows: list[dict[str, Any]]) -> float:
    """nDCG@10 of each query's own passages, by the library's evaluator."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    samples: Any = [
        {"query": row["query"], "positive": row["documents"][:1], "negative": row["documents"][1:]}
        for row in rows
    ]
    scores = CrossEncoderRerankingEvaluator(samples)(CrossEncoder(str(folder), device="cpu"))
    return next(value for name, value in scores.items() if name.endswith("ndcg@10"))
