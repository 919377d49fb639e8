"""A user's training script: a plain PyTorch loop, for script_*.py.

It finds its channels and the model's folder in the environment, and its hyperparameters in argv,
as in any SageMaker image. Data: csv files with the columns text and label (0, 1, ...). The
metric lines are the recipe's, so that its metric definitions read them.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    options = parser.parse_args()

    texts, labels = read(Path(os.environ["SM_CHANNEL_TRAIN"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model_name_or_path, num_labels=max(labels) + 1
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    batches = DataLoader(list(zip(texts, labels, strict=True)), options.batch_size, shuffle=True)
    step = 0
    for _ in range(options.epochs):
        for batch, wanted in batches:
            inputs = tokenizer(list(batch), padding=True, truncation=True, return_tensors="pt")
            loss = model(**inputs.to(device), labels=wanted.to(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"metric step={step} loss={loss.item():.6g}", flush=True)
    model.save_pretrained(os.environ["SM_MODEL_DIR"])
    tokenizer.save_pretrained(os.environ["SM_MODEL_DIR"])


def read(folder: Path) -> tuple[list[str], list[int]]:
    """Texts and labels of all csv files in a folder."""
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    return [row["text"] for row in rows], [int(row["label"]) for row in rows]


if __name__ == "__main__":
    main()
