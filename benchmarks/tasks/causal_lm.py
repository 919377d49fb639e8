"""Python's own documentation, which is real text, continued; the reference is run_clm.py's collator
and the Trainer, a text of at most 128 tokens a sample, each ended by the end token.

Its model is what `small_llama.py` writes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from samples import drawn

LENGTH = 128
ARGUMENTS = ["--task", "causal-lm", "--max_length", str(LENGTH)]
_SECTION = 120
"""Characters of a text: fewer than 128 tokens."""


def data(rows: int, seed: int, source: Path | None) -> list[dict[str, Any]]:
    """Sections of the documentation that pydoc carries; `source` is not read."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(" ".join(text.split()) for _, text in sorted(topics.items()))
    texts = [whole[index : index + _SECTION].strip() for index in range(0, len(whole), _SECTION)]
    return [{"text": text} for text in drawn(texts, rows, seed)]


def _ids(tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    encoded = tokenizer([row["text"] for row in rows])["input_ids"]
    return [[*ids[: LENGTH - 1], tokenizer.eos_token_id] for ids in encoded]


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """Make the Trainer with batches padded to their longest text."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=TrainingArguments(**settings),
        processing_class=tokenizer,
        train_dataset=[{"input_ids": ids} for ids in _ids(tokenizer, rows)],  # type: ignore[arg-type]
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Score the next token of other texts, by the saved model in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    losses, right = [], []
    for ids in _ids(tokenizer, rows):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(
            logits, tokens[0, 1:], reduction="none"
        ).tolist()
        right += (logits.argmax(-1) == tokens[0, 1:]).tolist()
    mean = sum(losses) / len(losses)
    return {
        "share of tokens": sum(right) / len(right), "perplexity": math.exp(mean), "loss": mean
    }  # fmt: skip
