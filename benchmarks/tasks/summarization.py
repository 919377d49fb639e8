"""Generated texts to a line about each; the reference is run_summarization.py's logic.

    python benchmarks/tasks/summarization.py ENCODER FOLDER

writes a small BART, and the tokenizer of an encoder's folder, to FOLDER: the model to give to
run.py. It has learned to write all animals of a text; what is to be learned is to write those that
are red, in their order.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from teaching import STEPS, TEXTS_A_STEP, teach
from words import ANIMALS, FILLERS

ARGUMENTS = ["--task", "summarization", "--max_length", "128", "--max_target_length", "16"]
COLOURS = ["red", "green", "blue", "black"]


def data(rows: int, seed: int, source: Path | None) -> list[dict[str, Any]]:
    """Texts of 6 to 30 words with their lines, of 1 to 5 words."""
    drawn = random.Random(seed)
    return [_row(drawn, drawn.choice([0, 1, 2, 3]), ["red"]) for _ in range(rows)]


def _row(drawn: random.Random, room: int, facts: list[str]) -> dict[str, Any]:
    """A text of animals with `room` other words before each, and a line of some of them."""
    words: list[str] = []
    line = []
    colours = drawn.choices(["red", drawn.choice(COLOURS[1:])], k=drawn.choice([2, 4, 5]))
    for animal, colour in zip(drawn.sample(ANIMALS, len(colours)), colours, strict=True):
        words += [*drawn.choices(FILLERS, k=room), "the", colour, animal]
        line += [animal] * (colour in facts)
    return {"document": " ".join(words), "summary": " ".join(line or ["none"])}


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The Trainer with Seq2SeqTrainer's collator."""
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    writer = AutoModelForSeq2SeqLM.from_pretrained(model)
    sources = tokenizer([row["document"] for row in rows], truncation=True, max_length=128)
    targets = tokenizer(
        text_target=[row["summary"] for row in rows], truncation=True, max_length=16
    )
    return Trainer(
        model=writer,
        args=TrainingArguments(**settings),
        processing_class=tokenizer,
        train_dataset=[  # type: ignore[arg-type]
            {
                "input_ids": sources["input_ids"][row],
                "attention_mask": sources["attention_mask"][row],
                "labels": targets["input_ids"][row],
            }
            for row in range(len(rows))
        ],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=writer),
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Score what the saved model generates, text by text, without beams (ROUGE-L from 0 to 1), and
    the loss of the tokens that it should have generated."""
    import torch
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(str(folder)).eval()
    scorer = RougeScorer(["rougeL"])
    total, losses, tokens = 0.0, 0.0, 0
    for row in rows:
        encoded = tokenizer(row["document"], return_tensors="pt", truncation=True, max_length=128)
        encoded.pop("token_type_ids", None)
        labels = tokenizer(text_target=row["summary"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            losses += float(model(**encoded, labels=labels).loss) * labels.numel()
            ids = model.generate(**encoded, max_new_tokens=16, num_beams=1, do_sample=False)
        tokens += labels.numel()
        summary = tokenizer.decode(ids[0], skip_special_tokens=True)
        total += scorer.score(row["summary"], summary)["rougeL"].fmeasure
    return {"ROUGE-L": total / len(rows), "loss": losses / tokens}


def make(encoder: str, folder: str) -> None:
    """A BART of three and three layers, 256 wide, that writes the animals of a text."""
    import torch
    from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

    tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=256, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=1024,
        decoder_ffn_dim=1024, max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id,
        decoder_start_token_id=tokenizer.sep_token_id, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)

    def texts(drawn: random.Random) -> tuple[list[str], list[str]]:
        rows = [_row(drawn, drawn.choice([0, 1, 2, 3]), COLOURS) for _ in range(TEXTS_A_STEP)]
        return [row["document"] for row in rows], [row["summary"] for row in rows]

    def rate(step: int) -> float:
        return 5e-4 * min(1, step / 100, 2 * (1 - step / STEPS))

    teach(model, tokenizer, texts, rate)
    model.save_pretrained(folder)
    tokenizer.model_max_length = 256
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
