"""Questions about generated contexts; the reference is run_qa.py's windows and Trainer.

A context lists what people own; a question asks for what one of them owns. Contexts are of 10 to
90 words, so that some take two windows of 128 tokens; the reference pads to that, as run_qa.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

LENGTH, STRIDE = 128, 32
ARGUMENTS = [
    "--task",
    "question-answering",
    "--max_length",
    str(LENGTH),
    "--doc_stride",
    str(STRIDE),
]
SCORE = "exact match"
THINGS = ["car", "house", "dog", "boat", "piano", "garden", "horse", "bicycle", "camera", "clock"]
PEOPLE = [
    *("anna", "john", "mary", "peter", "paul", "susan", "james", "david", "linda", "robert"),
    *("karen", "mark", "laura", "steven", "helen", "george", "ruth", "frank", "alice", "henry"),
    *("jane", "thomas", "emma", "jack", "sarah", "daniel", "lucy", "simon", "clara", "martin"),
]
COLOURS = ["red", "blue", "green", "black", "white", "yellow", "old", "new", "small", "large"]


def data(rows: int, seed: int) -> list[dict[str, Any]]:
    """Flat rows as SQuAD's."""
    drawn = random.Random(seed)
    found = []
    for number in range(rows):
        people = {
            name: f"{drawn.choice(COLOURS)} {drawn.choice(THINGS)}"
            for name in drawn.sample(PEOPLE, drawn.choice([2, 3, 4, 6, 18]))
        }
        sentences = [f"{name} owns a {thing}." for name, thing in people.items()]
        context = " ".join(sentences)
        name = drawn.choice(list(people))
        start = context.index(f"{name} owns a ") + len(f"{name} owns a ")
        answers = {"text": [people[name]], "answer_start": [start]}
        found.append({"id": str(number), "question": f"What does {name} own?", "context": context,
                      "answers": answers})  # fmt: skip
    return found


def features(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As run_qa.py prepares them for training, padded to one length, which is its default."""
    encoded = tokenizer(
        [row["question"] for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=LENGTH,
        stride=STRIDE,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length",
    )
    found = []
    for window, at in enumerate(encoded["overflow_to_sample_mapping"]):
        ids, places = encoded["input_ids"][window], encoded["offset_mapping"][window]
        own = [n for n, each in enumerate(encoded.sequence_ids(window)) if each == 1]
        start = rows[at]["answers"]["answer_start"][0]
        stop = start + len(rows[at]["answers"]["text"][0])
        first = last = ids.index(tokenizer.cls_token_id)
        if places[own[0]][0] <= start and places[own[-1]][1] >= stop:
            first = max(n for n in own if places[n][0] <= start)
            last = min(n for n in own if places[n][1] >= stop)
        inputs = {name: encoded[name][window] for name in tokenizer.model_input_names
                  if name in encoded}  # fmt: skip
        found.append({**inputs, "start_positions": first, "end_positions": last})
    return found


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The Trainer."""
    from transformers import (
        AutoModelForQuestionAnswering,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return Trainer(
        model=AutoModelForQuestionAnswering.from_pretrained(model),
        args=TrainingArguments(**settings),
        processing_class=tokenizer,
        train_dataset=features(tokenizer, rows),  # type: ignore[arg-type]
        data_collator=default_data_collator,
    )


def judge(folder: Path, rows: list[dict[str, Any]]) -> float:
    """The share of questions whose best span over all windows is the answer, by the saved model."""
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForQuestionAnswering.from_pretrained(str(folder)).eval()
    right = 0
    for row in rows:
        encoded = tokenizer(
            row["question"], row["context"], truncation="only_second", max_length=LENGTH,
            stride=STRIDE, return_overflowing_tokens=True, return_offsets_mapping=True,
            padding=True, return_tensors="pt",
        )  # fmt: skip
        places, _ = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
        with torch.no_grad():
            output = model(**encoded)
        best: tuple[float, str] = (float("-inf"), "")
        for window in range(len(places)):
            own = [n for n, each in enumerate(encoded.sequence_ids(window)) if each == 1]
            for first in own:
                for last in [n for n in own if first <= n < first + 30]:
                    score = float(output.start_logits[window, first]
                                  + output.end_logits[window, last])  # fmt: skip
                    if score > best[0]:
                        start, stop = int(places[window, first, 0]), int(places[window, last, 1])
                        best = score, row["context"][start:stop]
        right += best[1] == row["answers"]["text"][0]
    return right / len(rows)
