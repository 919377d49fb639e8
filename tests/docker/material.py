"""A tiny model and tiny data, for jobs of some ten seconds."""

from pathlib import Path

from tests.support.tiny_models import save, tokenizer

GOOD, BAD = "a lovely day", "a dreadful day"


def save_tiny_model(folder: Path) -> None:
    """A real, untrained BERT of 32 units, with a vocabulary of the data's words."""
    reader = tokenizer(32, ["a", "lovely", "dreadful", "day", "evening"], "")
    kind = "BertForSequenceClassification"
    save(kind, folder, 0, reader, num_hidden_layers=1, max_position_embeddings=32,
         initializer_range=0.02)  # fmt: skip


def save_data(folder: Path) -> None:
    """Channels `train` (80 texts) and `test` (20), of two texts that are easily told apart."""
    rows = [f"{text},{label}" for text, label in ((GOOD, 1), (BAD, 0))] * 40
    for channel, size in (("train", 80), ("test", 20)):
        (folder / channel).mkdir(parents=True)
        lines = ["text,label", *rows[:size]]
        (folder / channel / f"{channel}.csv").write_text("\n".join(lines) + "\n")


LEARNS = {"num_train_epochs": 4, "per_device_train_batch_size": 8, "learning_rate": 0.01, "seed": 1}
"""Hyperparameters with which the tiny model learns the tiny data."""
