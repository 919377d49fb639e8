"""A tiny model and tiny data, for jobs of some ten seconds."""

from pathlib import Path

GOOD, BAD = "a lovely day", "a dreadful day"


def save_tiny_model(folder: Path) -> None:
    """A real, untrained BERT of 32 units, with a vocabulary of the data's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "lovely", "dreadful", "day", "evening"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def save_data(folder: Path) -> None:
    """Channels `train` (80 texts) and `test` (20), of two texts that are easily told apart."""
    rows = [f"{text},{label}" for text, label in ((GOOD, 1), (BAD, 0))] * 40
    for channel, size in (("train", 80), ("test", 20)):
        (folder / channel).mkdir(parents=True)
        lines = ["text,label", *rows[:size]]
        (folder / channel / f"{channel}.csv").write_text("\n".join(lines) + "\n")


LEARNS = {"num_train_epochs": 4, "per_device_train_batch_size": 8, "learning_rate": 0.01, "seed": 1}
"""Hyperparameters with which the tiny model learns the tiny data."""
