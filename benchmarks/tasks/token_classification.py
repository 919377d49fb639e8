"""Entities in generated sentences; the reference is run_ner.py's tokenise-and-align and Trainer.

Names are invented; which kind a name is, the word before it tells (`in` a place, `Mr` a person,
`at` a firm), and one in five has a second word that goes on it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

ARGUMENTS = ["--task", "token-classification", "--max_length", "128"]
SCORE = "F1 of entities"
NAMES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]
CUES = {"PER": ["mr", "by", "with"], "LOC": ["in", "near", "from"], "ORG": ["at", "for", "joined"]}
FILLERS = ["the", "film", "was", "good", "and", "people", "saw", "it", "again", "when", "nobody"]


def data(rows: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of 4 to 60 words with their tags."""
    drawn = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    found = []
    for _ in range(rows):
        words: list[str] = []
        tags: list[str] = []
        length = drawn.choice([4, 8, 12, 16, 24, 60])
        while len(words) < length:
            if drawn.random() < 0.75:
                words.append(drawn.choice(FILLERS))
                tags.append("O")
                continue
            kind = drawn.choice(list(CUES))
            # Some cues have nothing behind them that is a name.
            words.append(drawn.choice(CUES[kind]))
            tags.append("O")
            if drawn.random() < 0.8:
                count = 1 + (drawn.random() < 0.2)
                words += ["".join(drawn.choices(syllables, k=3)) for _ in range(count)]
                tags += [f"B-{kind}", f"I-{kind}"][:count]
        found.append({"tokens": words, "ner_tags": tags})
    return found


def aligned(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """As run_ner.py does it: the tag on the first piece of a word, -100 elsewhere."""
    encoded = tokenizer(row["tokens"], truncation=True, max_length=128, is_split_into_words=True)
    before, labels = None, []
    for word in encoded.word_ids():
        is_new = word is not None and word != before
        labels.append(NAMES.index(row["ner_tags"][word]) if is_new else -100)
        before = word
    return {**encoded, "labels": labels}


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The Trainer."""
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    names = dict(enumerate(NAMES))
    tagger = AutoModelForTokenClassification.from_pretrained(
        model, num_labels=len(NAMES), id2label=names, label2id={v: k for k, v in names.items()}
    )
    return Trainer(
        model=tagger,
        args=TrainingArguments(**settings),
        processing_class=tokenizer,
        train_dataset=[aligned(tokenizer, row) for row in rows],  # type: ignore[arg-type]
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )


def judge(folder: Path, rows: list[dict[str, Any]]) -> float:
    """F1 of entities by seqeval, of the saved model, sentence by sentence."""
    import torch
    from seqeval.metrics import f1_score  # type: ignore[import-untyped]
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForTokenClassification.from_pretrained(str(folder)).eval()
    true, said = [], []
    for row in rows:
        encoded = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            ids = model(**encoded).logits[0].argmax(-1).tolist()
        owners = encoded.word_ids(0)
        firsts = [owners.index(word) for word in range(len(row["tokens"]))]
        said.append([model.config.id2label[ids[at]] for at in firsts])
        true.append(row["ner_tags"])
    return float(f1_score(true, said))
