"""Questions about articles of Wikipedia: `dev-v1.1.json` as SQuAD's format has it, here the part
of it in github.com/SaiPriya-R/SQuAD-explorer (dataset: 810 questions about one article); the
reference is run_qa.py's windows and Trainer.

The reference pads each batch to its longest window, as a user does who knows that setting;
run_qa.py itself pads all windows to one length. Questions to judge by are of other paragraphs.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from samples import drawn

LENGTH, STRIDE = 128, 32
ARGUMENTS = [
    *("--task", "question-answering", "--max_length", str(LENGTH)),
    *("--doc_stride", str(STRIDE)),
]


def data(rows: int, seed: int, source: Path) -> list[dict[str, Any]]:
    """Read flat rows, as the `datasets` library has SQuAD's."""
    paragraphs = [
        paragraph
        for article in json.loads(source.read_text(encoding="utf-8"))["data"]
        for paragraph in article["paragraphs"]
    ]
    results = []
    for paragraph in drawn(paragraphs, len(paragraphs), seed):
        for question in paragraph["qas"]:
            first = question["answers"][0]
            answers = {"text": [first["text"]], "answer_start": [first["answer_start"]]}
            results.append({"id": question["id"], "question": question["question"],
                          "context": paragraph["context"], "answers": answers})  # fmt: skip
    return results[:rows]


def features(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As run_qa.py prepares them for training, not yet padded."""
    encoded = tokenizer(
        [row["question"] for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=LENGTH,
        stride=STRIDE,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    windows = []
    for window, sample in enumerate(encoded["overflow_to_sample_mapping"]):
        ids, offsets = encoded["input_ids"][window], encoded["offset_mapping"][window]
        context_tokens = [n for n, owner in enumerate(encoded.sequence_ids(window)) if owner == 1]
        start = rows[sample]["answers"]["answer_start"][0]
        stop = start + len(rows[sample]["answers"]["text"][0])
        first = last = ids.index(tokenizer.cls_token_id)
        if offsets[context_tokens[0]][0] <= start and offsets[context_tokens[-1]][1] >= stop:
            first = max(n for n in context_tokens if offsets[n][0] <= start)
            last = min(n for n in context_tokens if offsets[n][1] >= stop)
        inputs = {name: encoded[name][window] for name in tokenizer.model_input_names
                  if name in encoded}  # fmt: skip
        windows.append({**inputs, "start_positions": first, "end_positions": last})
    return windows


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The Trainer."""
    from transformers import (
        AutoModelForQuestionAnswering,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return Trainer(
        model=AutoModelForQuestionAnswering.from_pretrained(model),
        args=TrainingArguments(**settings),
        processing_class=tokenizer,
        train_dataset=features(tokenizer, rows),  # type: ignore[arg-type]
        data_collator=DataCollatorWithPadding(tokenizer),
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Score the best span over all windows of a question, by the saved model, and its loss."""
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForQuestionAnswering.from_pretrained(str(folder)).eval()
    exact, overlap, losses = 0, 0.0, []
    for row in rows:
        encoded = tokenizer(
            row["question"], row["context"], truncation="only_second", max_length=LENGTH,
            stride=STRIDE, return_overflowing_tokens=True, return_offsets_mapping=True,
            padding=True, return_tensors="pt",
        )  # fmt: skip
        offsets, _ = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
        windows = features(tokenizer, [row])
        with torch.no_grad():
            output = model(
                **encoded,
                start_positions=torch.tensor([window["start_positions"] for window in windows]),
                end_positions=torch.tensor([window["end_positions"] for window in windows]),
            )
        losses.append(float(output.loss))
        best: tuple[float, str] = (float("-inf"), "")
        for window in range(len(offsets)):
            context_tokens = [
                n for n, owner in enumerate(encoded.sequence_ids(window)) if owner == 1
            ]
            starts, ends = output.start_logits[window].tolist(), output.end_logits[window].tolist()
            for first in context_tokens:
                for last in [n for n in context_tokens if first <= n < first + 30]:
                    score = starts[first] + ends[last]
                    if score > best[0]:
                        start, stop = int(offsets[window, first, 0]), int(offsets[window, last, 1])
                        best = score, row["context"][start:stop]
        (answer,) = row["answers"]["text"]
        exact += best[1] == answer
        overlap += _f1(best[1].split(), answer.split())
    return {
        "F1": overlap / len(rows), "exact match": exact / len(rows),
        "loss": sum(losses) / len(losses),
    }  # fmt: skip


def _f1(predicted: list[str], right: list[str]) -> float:
    """Of their words, as SQuAD's script counts it."""
    common = sum((Counter(predicted) & Counter(right)).values())
    return 2 * common / (len(predicted) + len(right))
