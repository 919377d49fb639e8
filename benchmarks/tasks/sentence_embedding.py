"""Vectors of queries and their passages; the reference is sentence-transformers' trainer.

Both learn by the negatives of the batch (MultipleNegativesRankingLoss).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrieval import LENGTH, queries

ARGUMENTS = ["--task", "sentence-embedding", "--max_length", str(LENGTH)]
SCORE = "nDCG@10"


def data(rows: int, seed: int) -> list[dict[str, Any]]:
    """Pairs; for the test, each query's other passages too."""
    if seed >= 1000:
        return queries(rows, seed, for_tests=True)
    return [{"query": row["query"], "positive": row["documents"][0]}
            for row in queries(rows, seed, for_tests=False)]  # fmt: skip


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The SentenceTransformerTrainer."""
    import datasets
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    encoder = SentenceTransformer(model, device="cpu")
    encoder.max_seq_length = LENGTH
    arguments = SentenceTransformerTrainingArguments(**settings, batch_sampler="no_duplicates")
    return SentenceTransformerTrainer(
        model=encoder,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        loss=losses.MultipleNegativesRankingLoss(encoder),
    )


def judge(folder: Path, rows: list[dict[str, Any]]) -> float:
    """nDCG@10 over the passages of all queries, by the library's evaluator."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import (
        InformationRetrievalEvaluator,
    )

    corpus = {str(n): text for n, text in enumerate(t for row in rows for t in row["documents"])}
    each = len(rows[0]["documents"])
    evaluator: Any = InformationRetrievalEvaluator(
        {str(n): row["query"] for n, row in enumerate(rows)},
        corpus,
        {str(n): {str(n * each)} for n in range(len(rows))},
    )
    scores = evaluator(SentenceTransformer(str(folder), device="cpu"))
    return next(value for name, value in scores.items() if name.endswith("ndcg@10"))
