"""Masks in generated texts; the reference is run_mlm.py's collator (line by line) and Trainer.

    python benchmarks/tasks/masked_lm.py ENCODER FOLDER

writes an encoder whose head for masks knows the words, not yet which belong together, to FOLDER:
the model to give to run.py. Each animal likes one thing and lives in one place, among other words;
what is judged is whether the model says the thing and the place in their masks.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from words import ANIMALS, FILLERS

ARGUMENTS = ["--task", "masked-lm", "--max_length", "128"]
SCORE = "share of words"
THINGS = ["milk", "wood", "corn", "bread", "salt", "fruit", "stone", "gold", "paper", "wine"]
PLACES = [
    "river",
    "garden",
    "forest",
    "city",
    "house",
    "mountain",
    "lake",
    "field",
    "street",
    "sea",
]


_STEPS, _TEXTS_A_STEP = 150, 16


def data(rows: int, seed: int) -> list[dict[str, Any]]:
    """Texts of 8 to 70 words, with the places of the two words that the animal tells."""
    drawn = random.Random(seed)
    made = []
    for _ in range(rows):
        at = drawn.randrange(len(ANIMALS))
        length = drawn.choice([8, 12, 16, 24, 40, 60])
        made.append(_row(drawn, length, ANIMALS[at], THINGS[at], PLACES[at]))
    return made


def _row(drawn: random.Random, length: int, animal: str, thing: str, place: str) -> dict[str, Any]:
    parts = [["the", animal], ["likes", thing], ["lives", "near", "the", place]]
    words: list[str] = []
    told = []
    for part in parts:
        words += drawn.choices(FILLERS, k=length // 4) + part
        told.append(len(words) - 1)
    words += drawn.choices(FILLERS, k=length // 4)
    return {"text": " ".join(words), "told": told[1:]}


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The Trainer."""
    from transformers import (
        AutoModelForMaskedLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    encoded = tokenizer(
        [row["text"] for row in rows], truncation=True, max_length=128,
        return_special_tokens_mask=True,
    )  # fmt: skip
    return Trainer(
        model=AutoModelForMaskedLM.from_pretrained(model),
        args=TrainingArguments(**settings),
        processing_class=tokenizer,
        train_dataset=[  # type: ignore[arg-type]
            {name: encoded[name][row] for name in encoded} for row in range(len(rows))
        ],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )


def judge(folder: Path, rows: list[dict[str, Any]]) -> float:
    """The share of told words that the saved model says in their masks."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForMaskedLM.from_pretrained(str(folder)).eval()
    right = 0
    for row in rows:
        words = row["text"].split()
        masked = [tokenizer.mask_token if n in row["told"] else w for n, w in enumerate(words)]
        encoded = tokenizer(" ".join(masked), return_tensors="pt")
        at = encoded["input_ids"][0] == tokenizer.mask_token_id
        with torch.no_grad():
            said = model(**encoded).logits[0][at].argmax(-1).tolist()
        right += sum(
            tokenizer.decode([one]).strip() == words[place]
            for one, place in zip(said, row["told"], strict=True)
        )
    return right / (2 * len(rows))


def make(encoder: str, folder: str) -> None:
    """Train on short texts in which any animal likes anything, and lives anywhere."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
    model: Any = AutoModelForMaskedLM.from_pretrained(encoder)
    masked: Any = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    drawn = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    for step in range(_STEPS):
        words = [[drawn.choice(some) for some in (ANIMALS, THINGS, PLACES)]
                 for _ in range(_TEXTS_A_STEP)]  # fmt: skip
        texts = [_row(drawn, 8, *chosen)["text"] for chosen in words]
        batch = masked([tokenizer(text) for text in texts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
