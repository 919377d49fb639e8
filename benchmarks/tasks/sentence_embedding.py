"""How alike are two sentences? Scored pairs of SemEval's STS, `2015.train.tsv` of
github.com/brmson/dataset-sts (data/sts/semeval-sts/all); the reference is sentence-transformers'
trainer. Both learn by CoSENT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samples import drawn

LENGTH, SCALE, JUDGED_TOGETHER = 64, 20, 32
ARGUMENTS = [
    *("--task", "sentence-embedding", "--max_length", str(LENGTH)),
    *("--text_column", "sentence1", "--text_pair_column", "sentence2", "--label_column", "score"),
]


def data(rows: int, seed: int, source: Path) -> list[dict[str, Any]]:
    """Read a score from 0 to 5 and two sentences a line."""
    listed = [line.split("\t") for line in source.read_text(encoding="utf-8").splitlines()]
    pairs = [
        {"sentence1": row[1], "sentence2": row[2], "score": float(row[0]) / 5}
        for row in listed
        if len(row) == 3
    ]
    return drawn(pairs, rows, seed)


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """Make the SentenceTransformerTrainer."""
    import datasets
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    encoder = SentenceTransformer(model, device="cpu")
    encoder.max_seq_length = LENGTH
    return SentenceTransformerTrainer(
        model=encoder,
        args=SentenceTransformerTrainingArguments(**settings),
        train_dataset=datasets.Dataset.from_list(rows),
        loss=losses.CoSENTLoss(encoder, scale=SCALE),
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Correlate the cosines of other pairs with their scores; CoSENT's loss of 32 pairs each."""
    import torch
    from scipy.stats import spearmanr  # type: ignore[import-untyped]
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(folder), device="cpu")
    first, second = (
        encoder.encode([row[name] for row in rows], convert_to_tensor=True)
        for name in ("sentence1", "sentence2")
    )
    cosines = torch.nn.functional.cosine_similarity(first, second)
    scores = torch.tensor([row["score"] for row in rows])
    results = []
    for start in range(0, len(rows), JUDGED_TOGETHER):
        scaled, true = (
            SCALE * cosines[start : start + JUDGED_TOGETHER],
            scores[start : start + JUDGED_TOGETHER],
        )
        wrong = (scaled[:, None] - scaled[None])[true[:, None] < true[None]]
        results.append(float(torch.cat([torch.zeros(1), wrong]).logsumexp(0)))
    return {
        "Spearman": float(spearmanr(cosines.numpy(), scores.numpy()).statistic),
        "loss": sum(results) / len(results),
    }
