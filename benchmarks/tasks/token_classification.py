"""Entities of emerging kinds in tweets: WNUT 2017, `wnut17train.conll` of
github.com/leondz/emerging_entities_17; the reference is run_ner.py's tokenise-and-align and its
Trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samples import drawn

ARGUMENTS = ["--task", "token-classification", "--max_length", "128"]
KINDS = ["corporation", "creative-work", "group", "location", "person", "product"]
NAMES = ["O", *(f"{prefix}-{kind}" for kind in KINDS for prefix in "BI")]


def data(rows: int, seed: int, source: Path) -> list[dict[str, Any]]:
    """Read a line of a word and its tag for each word, and an empty one after each sentence."""
    sentences = []
    for block in source.read_text(encoding="utf-8").replace("\t\n", "\n").split("\n\n"):
        pairs = [line.split("\t") for line in block.splitlines() if line.strip()]
        if pairs:
            words, tags = zip(*pairs, strict=True)
            sentences.append({"tokens": list(words), "ner_tags": list(tags)})
    return drawn(sentences, rows, seed)


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


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Score the saved model, sentence by sentence: F1 of entities by seqeval."""
    import torch
    from seqeval.metrics import f1_score  # type: ignore[import-untyped]
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForTokenClassification.from_pretrained(str(folder)).eval()
    true, predicted, losses = [], [], []
    for row in rows:
        encoded = tokenizer(
            row["tokens"], is_split_into_words=True, return_tensors="pt", truncation=True,
            max_length=128,
        )  # fmt: skip
        with torch.no_grad():
            logits = model(**encoded).logits[0]
        owners = encoded.word_ids(0)
        words = sorted({owner for owner in owners if owner is not None})
        firsts = [owners.index(word) for word in words]
        tags = [row["ner_tags"][word] for word in words]
        labels = torch.tensor([model.config.label2id.get(tag, 0) for tag in tags])
        losses += torch.nn.functional.cross_entropy(
            logits[firsts], labels, reduction="none"
        ).tolist()
        predicted.append(
            [model.config.id2label[index] for index in logits[firsts].argmax(-1).tolist()]
        )
        true.append(tags)
    return {"F1 of entities": float(f1_score(true, predicted)), "loss": sum(losses) / len(losses)}
