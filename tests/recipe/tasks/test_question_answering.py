"""Questions about contexts: SQuAD nested and flat, answers' starts, windows, and the scores."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from recipe.arguments import parse
from recipe.batching.window_batches import NOWHERE, Windows
from recipe.data.annotations import questions
from recipe.data.annotations.questions import Questions
from recipe.errors import DataError
from recipe.plan import detection
from recipe.tasks.evaluation import exact_match, word_f1
from recipe.tasks.question_answering import tokens as windows
from recipe.tasks.question_answering.report import SpanAnswer, find, scores
from tests.support.jobs import write
from tests.support.refusals import refused

CONTEXT = "Ada was here in 1843 , and Ada left ."
ROWS = [
    {"id": "1", "question": "Who left?", "text": ["Ada"], "start": [27]},
    {"id": "2", "question": "When?", "text": ["1843", "in 1843"], "start": [16, 13]},
    {"id": "3", "question": "Why?", "text": [], "start": []},
]


def flat(row: dict[str, Any]) -> dict[str, Any]:
    answers = {"text": row["text"], "answer_start": row["start"]}
    return {"id": row["id"], "question": row["question"], "context": CONTEXT, "answers": answers}


def qa(row: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(row["text"], row["start"], strict=True)
    answers = [{"text": text, "answer_start": start} for text, start in pairs]
    row_asked = {"id": row["id"], "question": row["question"], "answers": answers}
    if not answers:  # SQuAD 2.0 tells what might be taken for an answer
        row_asked |= {
            "is_impossible": True,
            "plausible_answers": [{"text": "1", "answer_start": 0}],
        }
    return row_asked


ARTICLE = {"title": "Ada", "paragraphs": [{"context": CONTEXT, "qas": [qa(row) for row in ROWS]}]}
EMPTY = {"title": "none", "paragraphs": []}
FILES = {
    "squad": ("train.json", json.dumps({"version": "v2.0", "data": [ARTICLE, EMPTY]}, indent=1)),
    "squad, one article": ("train.json", json.dumps({"version": "v2.0", "data": [ARTICLE]})),
    "flat": ("train.jsonl", "\n".join(json.dumps(flat(row)) for row in ROWS)),
    "lists of records": ("train.jsonl", "\n".join(
        json.dumps({**flat(row), "answers": qa(row)["answers"]}) for row in ROWS)),
    "csv": ("train.csv", "id,question,context,answers\n" + "\n".join(
        f'{row["id"]},{row["question"]},"{CONTEXT}","{flat(row)["answers"]}"' for row in ROWS)),
}  # fmt: skip


def load(folder: Path) -> Questions:
    return questions.load({"train": folder}, parse(["--eval_strategy", "no"]))


def written(folder: Path, name: str, text: str) -> Path:
    folder.mkdir()
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", FILES)
def test_every_spelling_is_found_and_read_as_the_same_questions(kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "data", *FILES[kind])
    loaded = load(folder)
    assert loaded.train["id"][:] == ["1", "2", "3"]
    assert loaded.train["answers"][:] == [row["text"] for row in ROWS]
    assert loaded.train["starts"][:] == [row["start"] for row in ROWS]
    assert set(loaded.train["context"][:]) == {CONTEXT}
    assert loaded.has_unanswerable
    assert detection.find(parse([]), {"train": folder})[0] == "question-answering"


def test_starts_that_are_off_are_corrected_if_the_answer_occurs_once(tmp_path: Path) -> None:
    texts = (("Rome", 3), ("Rome", -1), ("Ada", 0))
    rows = [{**flat(ROWS[0]), "context": "Ada saw Rome", "answers": {"text": [text],
             "answer_start": [start]}} for text, start in texts]  # fmt: skip
    loaded = load(write(tmp_path, rows))
    assert loaded.train["starts"][:] == [[8], [8], [0]]
    assert any(line.startswith("2 answers of") and "only place" in line for line in loaded.notes)


def test_flat_rows_have_starts_as_a_data_frame_writes_them(tmp_path: Path) -> None:
    header = "question,context,answer_text,answer_start,is_impossible"
    rows = [f"who,Rome saw Rome,Rome,9.0,{value}" for value in ("no", "yes", "", "True", "0.0")]
    folder = written(tmp_path / "d", "train.csv", "\n".join([header, *rows]))
    assert load(folder).train["starts"][:] == [[9], [], [9], [], [9]]
    (folder / "train.csv").write_text("\n".join([header, *rows, rows[0].replace("no", "maybe")]))
    with pytest.raises(DataError, match="line 7 has 'maybe' in column 'is_impossible'"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answers": {"text": ["Bob"], "answer_start": [0]}}, ["'Bob'", "occurs 0 times"]),
        # In bytes the first one begins next to the second.
        ({"context": "éééééé Rome , Rome", "answers": {"text": ["Rome"], "answer_start": [13]}},
         ["'Rome'", "does not begin at 13 and occurs 2 times", "characters from 0"]),
        ({"context": "anana", "answers": {"text": ["ana"], "answer_start": [1]}},
         ["'ana'", "does not begin at 1 and occurs 2 times"]),
        ({"answers": {"text": ["Ada"], "answer_start": []}}, ["1 answers and 0 starts"]),
        ({"answers": {"text": [None], "answer_start": [0]}}, ["has the answer null, which is not"]),
        ({"answers": {"text": [["a"]], "answer_start": [0]}}, ['has the answer ["a"], which']),
        ({"question": " "}, ["has no question"]),
        ({"context": ""}, ["has no context"]),
    ],
)  # fmt: skip
def test_illegal_rows_are_named(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    rows = [flat(ROWS[0]), {**flat(ROWS[0]), **change}]
    with refused(DataError, *words, "line 2"):
        load(write(tmp_path, rows))


def test_each_answer_is_learned_where_it_stands_whole(tiny_model: Path, tmp_path: Path) -> None:
    """Of the pieces between the ends that a window says, the words are those of the answer."""
    drawn, rows = random.Random(0), []
    for number in range(30):
        words = [drawn.choice(["the", "film", "was", "good"]) for _ in range(drawn.randint(1, 60))]
        words.insert(drawn.randrange(len(words)), f"number {drawn.randint(10, 9999)}")
        context = " ".join(words)
        start = context.index("number")
        end = context.find(" ", start + 7)
        answer = context[start : None if end < 0 else end]
        rows.append({"id": str(number), "question": "the number", "context": context,
                     "answers": {"text": [answer], "answer_start": [start]}})  # fmt: skip
    data = load(write(tmp_path, rows)).train
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    made = windows.tokenize_split("train", data, tokenizer, 32, 10)
    assert made.lengths.max() <= 32
    held = set()
    for window, (first, last, example, none_at) in enumerate(made.labels.tolist()):
        span = made.span(window)
        begins, ends = made.begins[span], made.ends[span]
        context, (answer,) = data[example]["context"], data[example]["answers"]
        inside = begins[begins != NOWHERE]
        (start,) = data[example]["starts"]
        whole = inside[0] <= start and ends.max() >= start + len(answer)
        assert whole == (first != none_at)
        if whole:
            held.add(example)
            assert context[begins[first] : ends[last]] == answer
    assert held == set(range(30))
    assert len(made) > 30


def test_the_scores_are_those_of_squads_scripts() -> None:
    """The definitions: case, articles, punctuation; the best of several; none against none."""
    assert exact_match("The  Cat, a dog!", "cat dog") == 1
    assert exact_match("cat", "cats") == 0
    assert word_f1("the black cat", "A cat") == pytest.approx(2 / 3)
    assert word_f1("", "cat") == 0
    assert word_f1("", "") == 1

    def answer_of(text: str, *true: str) -> SpanAnswer:
        return SpanAnswer(text=text, start=0, true=true)

    given = [
        answer_of("the cat", "dog", "Cat."),
        answer_of("black cat", "cat"),
        answer_of("", "x"),
        answer_of(""),
    ]
    actual = scores([*given, answer_of("x")], True)
    assert actual == pytest.approx({
        "exact_match": 40.0, "f1": (1 + 2 / 3 + 0 + 1 + 0) * 20,
        "answerable_exact_match": 100 / 3, "answerable_f1": 500 / 9, "no_answer": 50.0,
    })  # fmt: skip


def test_the_best_answer_over_windows_is_taken_and_none_where_that_is_likelier() -> None:
    context = "a bb ccc"
    begins, ends = [-1, 0, 2, -1, -1, 2, 5], [-1, 1, 4, -1, -1, 4, 8]
    labels = np.array([[1, 1, 0, 0], [1, 1, 0, 0]])
    made = Windows(np.zeros(7, dtype=np.int32), np.array([0, 4, 7]), labels,
                   np.array(begins), np.array(ends))  # fmt: skip
    rows = [{"question": "q", "context": context, "answers": ["ccc"]}]
    outputs = np.full((2, 9), -1e9, dtype=np.float32)
    outputs[0, 1:5], outputs[0, 5:9] = [1.0, 2.0, 1.0, 9.0], [1.0, 0.5, 3.0, 9.0]
    outputs[1, 1:4], outputs[1, 5:8] = [2.0, 0.0, 3.0], [2.0, 0.0, 2.5]
    (answer,) = find(outputs, made, rows, True)
    assert (answer.text, answer.start) == ("ccc", 5)  # 5.5, "a bb" has 5.0, none 2.0
    outputs[:, [1, 5]] = 4.0
    assert find(outputs, made, rows, True)[0].text == ""
    assert find(outputs, made, rows, False)[0].text == "ccc"
    # Of a context that comes first, without CLS, the first token stands for no answer, as in serving.
    outputs = np.array([[0, 9, 1, 2, 9, 1, 2]], dtype=np.float32)
    made = Windows(np.zeros(3, dtype=np.int32), np.array([0, 3]), labels[:1] * 0,
                   np.array([0, 2, 5]), np.array([1, 4, 8]))  # fmt: skip
    assert find(outputs, made, rows, False)[0].text == "ccc"
