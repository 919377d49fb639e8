"""Tables of public data sets, by the names of their columns: read rightly by each kind of base model,
or refused with the settings that decide; never read as something else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from recipe import task_table
from recipe.arguments import parse
from recipe.errors import RecipeError
from recipe.tasks import detection

MODELS = {"mini": "BertModel", "masked": "BertForMaskedLM", "decoder": "LlamaForCausalLM"}
ROWS = 60
Row = Callable[[int], Mapping[str, Any]]
_drawn = random.Random(0)


def said(words: int = 12) -> str:
    return " ".join(
        _drawn.choices(
            ["the", "film", "was", "late", "and", "staff", "did", "not", "help", "me", "at", "all"],
            k=words,
        )
    )


def one(*names: str) -> str:
    return _drawn.choice(names)


def annotated(number: int) -> Mapping[str, Any]:
    """A row of Prodigy's ner.manual; each seventh was ignored."""
    if number % 7 == 3:
        return {"text": "no idea", "_input_hash": number, "answer": "ignore"}
    span = {"start": 0, "end": 3, "label": "PERSON"}
    return {"text": f"Ada {said()}", "_input_hash": number, "spans": [span], "answer": "accept"}


def stem(**more: Any) -> Row:
    choices = [{"text": one("sun", "air"), "label": letter} for letter in "ABCD"]
    return lambda n: {"id": str(n), "question": {"stem": said(), "choices": choices, **more},
                      "answerKey": "ABCD"[n % 4]}  # fmt: skip


ASKS = "the data does not say which it is for"
TASKS: dict[str, tuple[Row, str, str]] = {
    # name: rows, task, words of what is read
    "imdb": (lambda n: {"review": said(), "sentiment": one("pos", "neg")},
             "text-classification", "'review', label column 'sentiment'"),
    "sms spam": (lambda n: {"v1": one("ham", "spam"), "v2": said()},
                 "text-classification", "'v2', label column 'v1'"),
    "reddit stress": (lambda n: {"subreddit": one("ptsd", "anxiety"), "text": said(), "label": n % 2,
                                 "confidence": 0.8},
                      "text-classification", "'text', label column 'label'"),
    "Label Studio": (lambda n: {"annotation_id": n, "annotator": 1, "choice": one("Yes", "No"),
                                "id": n, "lead_time": n / 7, "text": said()},
                     "text-classification", "'text', label column 'choice'"),
    "jigsaw": (lambda n: {"id": str(n), "comment_text": said(), "toxic": n % 2, "threat": 0,
                          "insult": n % 3 // 2},
               "text-classification", "'toxic,threat,insult'; not read: id"),
    "mrpc": (lambda n: {"sentence1": said(), "sentence2": said(), "label": n % 2, "idx": n},
             "text-classification", "'sentence1' and 'sentence2', in this order, label column 'label'"),
    "boolq": (lambda n: {"question": said(), "answer": n % 2 == 0, "passage": said()},
              "text-classification", "'question' and 'passage', in this order, label column 'answer'"),
    "squad": (lambda n: {"id": str(n), "context": f"Ada {said()}", "question": said(),
                         "answers": {"text": ["Ada"], "answer_start": [0]}},
              "question-answering", "60 questions"),
    "triplets": (lambda n: {"query": said(), "positive": said(), "negative": said()},
                 "sentence-embedding", "queries 'query', texts 'positive', negatives negative"),
    "Prodigy's spans": (annotated, "token-classification", "PERSON (51 B, 0 I)"),
    "Prodigy's spans without hashes": (
        lambda n: {**annotated(n), "_input_hash": None}, "token-classification", "were not accepted"),
    "Prodigy's classes": (lambda n: {"text": said(), "label": one("A", "B"), "_input_hash": n,
                                     "answer": ["accept", "reject", "ignore"][n % 3]},
                          "text-classification", "40 rows of FILE were not accepted"),
    "Prodigy's one class": (lambda n: {"text": said(), "label": "SPORT", "_input_hash": n,
                                       "answer": ["accept", "reject", "ignore"][n % 3]},
                            "text-classification", "labels: 2: accept (20 rows), reject (20 rows)"),
}  # fmt: skip
REFUSED: dict[str, tuple[Row, list[str]]] = {
    # name: rows, words of the refusal
    "disaster tweets": (
        lambda n: {"id": n, "keyword": one("fire", "flood"), "location": one("US", ""),
                   "text": said(), "target": n % 2},
        ["label_column=target or label_column=keyword"]),
    "yelp": (lambda n: {"review_id": f"r{n}", "stars": 1 + n % 5, "useful": n % 6, "funny": n % 3,
                        "text": said(), "date": "2018-07-07"},
             ["label_column=stars or label_column=useful"]),
    "airline tweets": (
        lambda n: {"tweet_id": n, "airline_sentiment": one("neutral", "positive"), "name": f"u{n}",
                   "airline": one("United", "Delta"), "retweet_count": n % 2, "text": said()},
        ["label_column=airline_sentiment or label_column=airline "]),
    "fake news": (lambda n: {"title": said(5), "text": said(), "subject": one("politics", "world"),
                             "date": f"December {1 + n % 30}, 2017"}, ["text_column=text,title"]),
    "support tweets": (lambda n: {"tweet_id": n, "author_id": f"a{n % 9}", "inbound": n % 2 == 0,
                                  "created_at": f"Tue Oct 31 22:{n:02d}:47", "text": said()},
                       ["label_column=inbound"]),
    "tickets": (lambda n: {"text": said(), "queue": one("IT", "Sales"), "priority": one("low", "high")},
                ["label_column=queue or label_column=priority"]),
    "reviews": (lambda n: {"title": said(4), "review": said(), "rating": 1 + n % 5,
                           "recommended": n % 2}, ["label_column=rating or label_column=recommended"]),
    "questions of programmers": (lambda n: {"Title": said(6), "Body": said(),
                                            "Tags": one("<python>", "<java>")}, ["Title", "Body"]),
    "ag_news": (lambda n: {"Class Index": 1 + n % 4, "Title": said(6), "Description": said()},
                ["text_column=Description,Title"]),
    "stances": (lambda n: {"text": said(), "target": one("Atheism", "Climate"),
                           "stance": one("FAVOR", "AGAINST")},
                ["label_column=target or label_column=stance"]),
    "MELD": (lambda n: {"Utterance": said(), "Emotion": one("joy", "anger"),
                        "Sentiment": one("positive", "negative"), "Season": n % 9},
             ["label_column=Sentiment or label_column=Emotion"]),
    "entities' sentiments": (lambda n: {"tweet_id": n, "entity": one("Nvidia", "Sony"),
                                        "sentiment": one("Positive", "Negative"), "tweet": said()},
                             ["label_column=sentiment or label_column=entity"]),
    "forum posts": (lambda n: {"body": said(), "subreddit": one("news", "funny"), "gilded": n % 2,
                               "score": n - 9}, ["label_column=subreddit or label_column=gilded"]),
    "stsb, scored": (lambda n: {"sentence1": said(), "sentence2": said(), "score": n / 59},
                     ["Give task=text-classification", "Give task=sentence-embedding"]),
    "openbookqa": (stem(), ["answers to choose from in 'question.choices'", "(task=reranking)"]),
    "commonsense_qa": (stem(question_concept="sun"), ["'question.choices'"]),
    "choices of one letter": (lambda n: {"question": said(), **dict.fromkeys("ABCD", said(2)),
                                         "answer": "ABCD"[n % 4]}, ["from in 'A', 'B', 'C', 'D'"]),
    "choices by number": (lambda n: {"question": said(), "option_1": said(2), "option_2": said(2),
                                     "answer": n % 2}, ["'option_1', 'option_2'"]),
    "mmlu": (lambda n: {"question": said(), "choices": [said(2)] * 4, "answer": n % 4}, ["'choices'"]),
    "sciq": (lambda n: {"question": said(), "distractor1": said(1), "distractor2": said(1),
                        "correct_answer": said(1), "support": said()}, ["'distractor1'"]),
}  # fmt: skip
CORPORA: dict[str, Row] = {
    "wikipedia": lambda n: {
        "id": str(n),
        "url": f"https://a/{n}",
        "title": said(2),
        "text": said(40),
    },
    "languages": lambda n: {"text": said(), "lang": one("en", "de")},
    "authors": lambda n: {"id": f"id{n}", "text": said(), "author": one("EAP", "HPL")},
    "web pages": lambda n: {
        "text": said(40),
        "timestamp": "2019-04-25T12:57:54Z",
        "url": f"http://a/{n}",
    },
}


def read(folder: Path, row: Row, model: str, *argv: str) -> tuple[str | None, str]:
    """The task that is found, and what it reads."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"architectures": [MODELS[model]]}))
    file = folder / "data" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join(json.dumps(row(n)) for n in range(ROWS)))
    channels = {"train": file.parent}
    given = parse(["--model_id", str(folder / "model"), "--eval_strategy", "no", *argv])
    found, _ = detection.find(given, channels)
    lines = task_table.load(found.task)(channels, found).found
    return found.task, "\n".join(lines).replace(str(file), "FILE")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TASKS)
def test_what_is_certain_is_read_whatever_the_model_is(
    name: str, model: str, tmp_path: Path
) -> None:
    row, task, words = TASKS[name]
    found, lines = read(tmp_path, row, model)
    assert found == task
    assert words in lines
    for line in lines.splitlines():
        used, _, unread = line.partition("; not read: ")
        assert not [name for name in unread.split(", ") if name and repr(name) in used]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_several_is_refused_with_what_decides(
    name: str, model: str, tmp_path: Path
) -> None:
    row, words = REFUSED[name]
    with pytest.raises(RecipeError) as refusal:
        read(tmp_path, row, model)
    for word in words:
        assert word in f"{refusal.value} ".replace(". ", " ")


@pytest.mark.parametrize("name", CORPORA)
def test_a_table_of_more_columns_is_no_corpus_by_itself(name: str, tmp_path: Path) -> None:
    for model, task in (("masked", "masked-lm"), ("decoder", "causal-lm")):
        (tmp_path / model).mkdir()
        with pytest.raises(RecipeError, match=rf"(?s){ASKS}.*Give task={task}"):
            read(tmp_path / model, CORPORA[name], model)
    (tmp_path / "named").mkdir()
    found, _ = read(tmp_path / "named", CORPORA[name], "masked", "--task", "masked-lm")
    assert found == "masked-lm"


def test_the_refusal_of_a_table_lists_what_selects_each_task(tmp_path: Path) -> None:
    row, _ = REFUSED["tickets"]
    with pytest.raises(RecipeError) as refusal:
        read(tmp_path, row, "masked")
    *_, classes, texts = str(refusal.value).splitlines()
    assert classes.startswith("- text-classification: ")
    assert classes.endswith(" Give label_column=queue or label_column=priority.")
    assert texts == (
        "- masked-lm: column text holds texts, for an encoder with a masked head. Give task=masked-lm."
    )
    (tmp_path / "again").mkdir()
    found, lines = read(tmp_path / "again", row, "masked", "--label_column", "queue")
    assert found == "text-classification"
    assert "label column 'queue'; not read: priority" in lines


def test_label_smoothing_chooses_no_task(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"text-classification\. Give label_smoothing_factor"):
        read(tmp_path, TASKS["imdb"][0], "masked", "--label_smoothing", "0.1")


def test_answers_that_are_named_as_labels_leave_out_what_was_ignored(tmp_path: Path) -> None:
    row, _, words = TASKS["Prodigy's one class"]
    _, lines = read(tmp_path, row, "mini", "--label_column", "answer")
    assert words in lines
    assert "20 rows of FILE were ignored" in lines


def test_entities_are_counted_as_they_are_learned(tmp_path: Path) -> None:
    """In IOB1 an entity begins with B only where another one of its kind ends."""
    sentence = {"tokens": ["Ada", "saw", "Rome"], "ner_tags": ["I-PER", "O", "I-LOC"]}
    _, lines = read(tmp_path, lambda n: sentence, "mini")
    assert "LOC (60 B, 0 I), PER (60 B, 0 I)" in lines
