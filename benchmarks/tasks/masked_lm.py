"""Masks in Python's own documentation, which is real text; the reference is run_mlm.py's logic:
texts end to end in pieces of one length, its collator and the Trainer.

    python benchmarks/tasks/masked_lm.py ENCODER

says how well frequencies alone would do. An encoder that was saved without its head for masks gets
a new one from both.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

LENGTH = 64
ARGUMENTS = ["--task", "masked-lm", "--max_length", str(LENGTH)]
_SHARE = 0.15
_SECTION = 2000
"""Characters of a text."""


def data(rows: int, seed: int, source: Path | None) -> list[dict[str, Any]]:
    """Texts of the documentation that pydoc carries. Seeds from 1000 on have texts that the others
    have not; `source` is not read."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(" ".join(text.split()) for _, text in sorted(topics.items()))
    texts = [whole[index : index + _SECTION] for index in range(0, len(whole), _SECTION)]
    random.Random(0).shuffle(texts)
    kept = texts[:40] if seed >= 1000 else texts[40:]
    chosen = random.Random(seed).sample(kept, min(rows, len(kept)))
    return [{"text": text} for text in chosen]


def _pieces(tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """As run_mlm.py makes them: texts end to end, cut; what is left over at the end is dropped."""
    encoded = tokenizer([row["text"] for row in rows], verbose=False)["input_ids"]
    joined = [token for ids in encoded for token in ids]
    whole = len(joined) // LENGTH * LENGTH
    return [joined[index : index + LENGTH] for index in range(0, whole, LENGTH)]


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The Trainer, for as many steps as the recipe takes, whose pieces are each of one text."""
    from transformers import (
        AutoModelForMaskedLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    pieces = _pieces(tokenizer, rows)
    room = LENGTH - tokenizer.num_special_tokens_to_add()
    texts = tokenizer([row["text"] for row in rows], add_special_tokens=False, verbose=False)
    windows = sum(math.ceil(len(ids) / room) for ids in texts["input_ids"])
    steps = settings["num_train_epochs"] * math.ceil(
        windows / settings["per_device_train_batch_size"]
    )
    return Trainer(
        model=AutoModelForMaskedLM.from_pretrained(model),
        args=TrainingArguments(**settings, max_steps=steps),
        processing_class=tokenizer,
        train_dataset=[{"input_ids": piece} for piece in pieces],  # type: ignore[arg-type]
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=_SHARE),
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """What the saved model says of the same masks in other texts."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForMaskedLM.from_pretrained(str(folder)).eval()
    drawn = torch.Generator().manual_seed(0)
    losses, right = [], []
    for piece in _pieces(tokenizer, rows):
        ids = torch.tensor(piece)
        special = (ids == tokenizer.cls_token_id) | (ids == tokenizer.sep_token_id)
        index = (torch.rand(len(ids), generator=drawn) < _SHARE) & ~special
        with torch.no_grad():
            masked = ids.masked_fill(index, tokenizer.mask_token_id)[None]
            logits = model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits[0][
                index
            ]
        losses += torch.nn.functional.cross_entropy(logits, ids[index], reduction="none").tolist()
        right += (logits.argmax(-1) == ids[index]).tolist()
    mean = sum(losses) / len(losses)
    return {
        "share of tokens": sum(right) / len(right), "perplexity": math.exp(mean), "loss": mean
    }  # fmt: skip


def frequencies(encoder: str) -> None:
    """Print the perplexity of the other texts by how often a token stands in the first ones."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
    first, other = (
        Counter(token for piece in _pieces(tokenizer, data(1000, seed, None)) for token in piece)
        for seed in (0, 1000)
    )
    for token in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        del first[token], other[token]
    total = first.total() + len(tokenizer)
    loss = -sum(n * math.log((first[t] + 1) / total) for t, n in other.items()) / other.total()
    often = first.most_common(1)[0][0]
    print(f"{first.total()} tokens: perplexity {math.exp(loss):.1f}, loss {loss:.3f}, "
          f"share of tokens {other[often] / other.total():.4f}")  # fmt: skip


if __name__ == "__main__":
    frequencies(*sys.argv[1:])
