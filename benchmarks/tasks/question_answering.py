"""Questions about generated contexts; the reference is run_qa.py's windows and Trainer.

A context tells several facts of one person, each of another kind (where she lives, what she drives
...), in any order, with other sentences between them; a question asks, in one of two wordings, for
one of them. So a model has to learn which words ask for what, which it does within a hundred steps;
a question that can only be told by a name that stands in it too is learned late and at once, by
chance within a short training. Contexts are of 10 to 120 words: some take two windows of 128
tokens. The reference pads each batch to its longest window, as a user does who knows that
setting; run_qa.py itself pads all to 128.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

LENGTH, STRIDE = 64, 16
ARGUMENTS = [
    "--task",
    "question-answering",
    "--max_length",
    str(LENGTH),
    "--doc_stride",
    str(STRIDE),
]
SCORE = "exact match"
PEOPLE = ["anna", "john", "mary", "peter", "paul", "susan", "james", "david", "linda", "robert"]
COLOURS = ["red", "blue", "green", "black", "white", "yellow", "new", "small", "large"]
FACTS: list[tuple[str, list[str], list[str]]] = [
    ("{} lives near {}", ["Where does {} live?", "What is the home of {}?"],
     ["paris", "london", "rome", "madrid", "berlin", "vienna", "oslo", "lisbon", "athens"]),
    ("{} drives a {}", ["What does {} drive?", "Which vehicle has {}?"],
     ["car", "truck", "van", "bus", "taxi", "tractor", "jeep", "motorcycle", "lorry"]),
    ("{} likes to eat {}", ["What does {} eat?", "Which food does {} like?"],
     ["bread", "cheese", "rice", "fish", "soup", "cake", "fruit", "meat", "corn"]),
    ("{} plays the {}", ["What does {} play?", "Which instrument does {} know?"],
     ["piano", "guitar", "violin", "flute", "drum", "trumpet", "organ", "cello", "harp"]),
    ("{} keeps a {}", ["What does {} keep?", "Which animal has {}?"],
     ["dog", "cat", "horse", "bird", "cow", "goat", "sheep", "rabbit", "duck"]),
    ("{} works as a {}", ["What is the job of {}?", "How does {} earn money?"],
     ["doctor", "teacher", "lawyer", "farmer", "baker", "nurse", "pilot", "judge", "painter"]),
    ("{} was born in {}", ["When was {} born?", "In which month is the birthday of {}?"],
     ["january", "march", "april", "june", "july", "august", "october", "november", "may"]),
    ("{} studied {}", ["What did {} study?", "Which subject does {} know?"],
     ["physics", "history", "law", "music", "biology", "art", "chemistry", "medicine", "latin"]),
]  # fmt: skip
_DESCRIBED = [1, 4]
"""The facts whose value has another word before it."""
OTHERS = [
    "The weather was fine on that day.", "Nobody had expected it.", "There was little to say.",
    "It was in the paper.", "They spoke about it for a long time and went home.",
]  # fmt: skip


def data(rows: int, seed: int) -> list[dict[str, Any]]:
    """Flat rows as SQuAD's."""
    drawn = random.Random(seed)
    made = []
    for number in range(rows):
        name = drawn.choice(PEOPLE)
        facts = drawn.sample(range(len(FACTS)), drawn.choice([2, 3, 4, 6]))
        asked = drawn.choice(facts)
        others = drawn.choices(OTHERS, k=len(facts) * drawn.choice([0, 0, 1]))
        context, start, answer = "", 0, ""
        for fact in drawn.sample([*facts, *range(-len(others), 0)], len(facts) + len(others)):
            if fact < 0:
                context += others[fact] + " "
                continue
            told, _, values = FACTS[fact]
            value = drawn.choice(values)
            if fact in _DESCRIBED:
                value = f"{drawn.choice(COLOURS)} {value}"
            sentence = told.format(name, value)
            if fact == asked:
                start, answer = len(context) + sentence.index(value), value
            context += sentence + ". "
        question = drawn.choice(FACTS[asked][1]).format(name)
        answers = {"text": [answer], "answer_start": [start]}
        made.append({"id": str(number), "question": question, "context": context.rstrip(),
                     "answers": answers})  # fmt: skip
    return made


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


def judge(folder: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """How well the best span over all windows of a question is the answer, by the saved model."""
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForQuestionAnswering.from_pretrained(str(folder)).eval()
    exact, overlap = 0, 0.0
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
        (answer,) = row["answers"]["text"]
        exact += best[1] == answer
        overlap += _f1(best[1].split(), answer.split())
    return {SCORE: exact / len(rows), "F1": overlap / len(rows)}


def _f1(said: list[str], right: list[str]) -> float:
    """Of their words, as SQuAD's script counts it."""
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right))
