"""Ranking data with known answers, and trainings in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def triplets(count: int) -> list[dict[str, Any]]:
    """Return triplets: the positive text has the number of the query, the negative the next."""
    return [
        {
            "query": f"film number {at}",
            "positive": f"the great film was number {at} , truly",
            "negative": f"the great film was number {at + 1} , truly",
        }
        for at in range(count)
    ]


def scored(count: int) -> list[dict[str, Any]]:
    """Return scored pairs of texts that share a number, an ending, or nothing."""
    second = ["the bad {} was awful", "film number {}", "the film number {}"]
    return [
        {"sentence1": f"the film number {at}", "sentence2": second[score].format(
            at if score == 2 else at + 7), "score": score / 2}
        for at in range(count) for score in range(3)
    ]  # fmt: skip


def lists(count: int, texts: int = 4) -> list[dict[str, Any]]:
    """Return lists of texts, of which the one with the number of the query is relevant."""
    return [
        {
            "query": f"film number {at}",
            "documents": [f"the film was number {at + n * 11} , {'good' * (n % 2)}" for n in range(texts - at % 2)],
            "labels": [int(n == 0) for n in range(texts - at % 2)],
        }
        for at in range(count)
    ]  # fmt: skip


def rows_of(of_lists: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each text of a list."""
    return [
        {"query": row["query"], "passage": text, "label": label}
        for row in of_lists
        for text, label in zip(row["documents"], row["labels"], strict=True)
    ]


def write(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "train") -> Path:
    """Write a channel with one file of the rows; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def places_of(base: Path, channels: Mapping[str, Path]) -> Any:
    """Return the folders of a job below `base` with these channels."""
    from recipe.paths import Places

    return Places(
        channels=channels,
        model_dir=base / "model",
        output_data_dir=base / "output",
        checkpoints=base / "checkpoints",
        tensorboard=base / "tensorboard",
    )


def run(base: Path, model: Path, channels: Mapping[str, Path], *argv: str) -> dict[str, float]:
    """Train in this process below `base`, in float32 on the CPU; return the metrics."""
    from recipe import arguments
    from recipe.training import run as training

    places = places_of(base, channels)
    base.mkdir(parents=True, exist_ok=True)
    usual = ["--model_name_or_path", str(model), "--use_cpu", "True", "--bf16", "False"]
    given = arguments.parse([*usual, *argv], places)
    return training.run(given, places, dict(os.environ))
