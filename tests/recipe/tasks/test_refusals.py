"""Data and hyperparameters that a task cannot learn from: each is refused, and what to do is named."""

from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from recipe import task_table
from recipe.arguments import parse
from recipe.errors import RecipeError
from recipe.models.sources.origin import Origin
from recipe.runtime import memory
from recipe.task_table import TASKS
from recipe.training import preflight
from tests.support import tasks
from tests.support.jobs import folders_of, write
from tests.support.refusals import refused
from tests.support.tasks import JOBS
from tests.support.words import triplets

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so."},
]
PAIR = ["sat", "ran"]
TRANSLATED = {"translation": {"en": "yes", "de": "ja"}}
CLASSED = [{"text": f"a film of {n}", "label": ["good", "bad", "so"][n % 3]} for n in range(12)]
NUMBERED = [{"text": f"a film of {n}", "label": [0.5, 1.25, 2.5][n % 3]} for n in range(12)]
SEVERAL = [{"text": f"a film of {n}", "label": ["a", "b"][: 1 + n % 2]} for n in range(20)]


@pytest.mark.parametrize(
    ("task", "rows", "given", "words"),
    [
        *(("causal-lm", *case) for case in [
            ({"messages": "hello"}, {}, ["line 1", "no conversation", "'messages'", '"role"']),
            ({"messages": "[" * 100_000}, {}, ["line 1", "no conversation", "'messages'"]),
            ({"messages": [{"role": "user"}]}, {}, ["line 1", "message 0 (user", "no content (null)"]),
            ({"messages": TALK, "tools": "[" * 100_000}, {}, ["line 1", "tools"]),
            ({"messages": [*TALK, {"role": "assistant", "content": None}]}, {}, ["message 4 (assis"]),
            ({"messages": [{"role": "judge", "content": "x"}]}, {}, ["the role 'judge'", "known are"]),
            ({"conversations": [{"from": "function_call", "value": "x"}]}, {}, ["(function_call", "a name and arguments"]),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
                {},
                ["message 0 (user", "image_url", "TRL"],
            ),
            ({"messages": TALK, "images": ["a.png"]}, {}, ["'images'", "TRL"]),
            ({"instruction": "a", "input": ["b"], "output": "c"}, {}, ["'input'", "prompt_column"]),
            ([{"a": "x", "b": b} for b in "yz"], {"prompt_column": "a"}, ["completion", "completion_column=b"]),
            ({"text": "x"}, {"messages_column": "texts"}, ["messages_column", "'texts'", "text"]),
            (
                ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": {"b": "c"}}),
                {},
                ["line 2", "a list or a record in column 'completion'"],
            ),
            ({"n": 1}, {}, ["known by name as the text"]),
        ]),
        *(("multiple-choice", [{"question": "who", **row} for row in rows], {}, words) for rows, words in [
            ([{"choices": ["a b", "c d", "e f"], "answer": 1}] * 4, ["numbers from 0 or numbers from 1"]),
            ([{"choices": ["B", "A"], "answer": "A"}] * 4, ["letters or texts of the choices"]),
            ([{"choices": PAIR, "answer": "A"}, {"choices": PAIR, "answer": "C"}], ["'C'", "line 2"]),
            ([{"choices": PAIR, "answer": 0}, {"choices": PAIR, "answer": 2}], ["'2'", "line 2"]),
            ([{"choices": PAIR, "answer": ""}], ["no answer", "line 1"]),
            ([{"choices": ["a"], "answer": "A"}], ["two choices", "line 1"]),
            ([{"choices": ["a", ""], "answer": "A"}], ["empty"]),
            ([{"choices": PAIR, "mark": "A"}], ["known by name as the answer", "label_column=mark"]),
            ([{"choices": PAIR, "label": n % 2, "answer": "AABB"[n]} for n in range(4)],
             ["label_column=label", "label_column=answer"]),
            ([{"choices": PAIR, "answer": "A", "passage": "It", "article": "He"}], ["'passage'"]),
            ([{"choices": PAIR, "answer": "A", "query": "It"}], ["text_column=question"]),
            ([{"choices": "sat or ran", "answer": "A"}], ["lists of texts"]),
            ([{"ending0": "sat", "ending2": "ran", "label": 0}], ["without a gap"]),
        ]),
        *(("reranking", rows, {}, words) for rows, words in [
            ([{"query": f"q{n}", "positive": f"p{n}"} for n in range(9)], ["no irrelevant ones", "label"]),
            ([{"query": f"q{n}", "passage": "p", "label": n % 2 - 1} for n in range(9)], ["-1", "0"]),
            ([{"query": f"q{n}", "documents": ["p", "r"], "labels": [1, 1]} for n in range(9)],
             ["Every label is 1"]),
            ([{"query": f"q{n}", "documents": ["p", "r"]} for n in range(9)],
             ["known by name as the score"]),
        ]),
        ("reranking", [{"query": f"q{n}", "passage": "p", "label": n % 2} for n in range(9)],
         {"listwise": "True"}, ["one text", "nothing would be learned", "Leave listwise out"]),
        *(("sentence-embedding", *case) for case in [
            ([{"id": 1, "url": "x"}] * 9, {}, ["no column that is known"]),
            ([{"query": "a", "passage": f"b {n}", "label": 1} for n in range(9)], {}, ["Every row", "has 1 in column 'label'", "Leave the column out"]),
            ([{"premise": f"a {n}", "hypothesis": "b c", "label": "neutral"} for n in range(9)], {}, ["line 1", '"neutral"', "label_column"]),
            ([{"premise": f"a {n}", "hypothesis": "b c", "label": n % 3} for n in range(9)], {}, ["numbers 0, 1, 2, which may be classes of entailment", "Give triplets"]),
            ([{"query": "a", "documents": ["b", "c"], "labels": [1]}] * 9, {}, ["known by name as the text", "'documents'"]),
            ([{"query": {"a": 1}, "positive": {"b": 2}}] * 9, {}, ["no column that is known", "'query.a'"]),
            (triplets(9), {"negative_columns": "negativ"}, ["negativ", "Did you mean negative?"]),
        ]),
        *(("text-classification", *case) for case in [
            (CLASSED, {"metric_for_best_model": "f1"}, ["'f1'", "f1_macro", "f1_weighted", "accuracy"]),
            (CLASSED, {"metric_for_best_model": "eval_pearson"}, ["'eval_pearson'", "accuracy"]),
            (NUMBERED, {"metric_for_best_model": "accuracy"}, ["'accuracy'", "mse", "pearson"]),
            *(
                (rows, {name: value}, [f"{name} has value {value}, but {why}"])
                for rows, why in ((SEVERAL, "rows have several labels"), (NUMBERED, "labels are numbers"))
                for name, value in (("class_weight", "balanced"), ("label_smoothing_factor", "0.1"))
            ),
            (CLASSED, {"tune_thresholds": "True"}, ["rows have only one label"]),
            (SEVERAL, {"tune_thresholds": "True", "do_eval": "False"}, ["nothing is evaluated"]),
            (SEVERAL, {"tune_thresholds": "True", "do_train": "False", "do_eval": "True"}, ["writes no model"]),
            (CLASSED, {"num_labels": "2"}, ["num_labels has value 2", "3 label", "bad, good, so"]),
        ]),
        *(("translation", *case) for case in [
            (TRANSLATED, {}, ["Give source_lang=en target_lang=de"]),
            (TRANSLATED, {"source_lang": "de", "target_lang": "de"}, ["known by name as the source"]),
            ({"a": "yes", "b": "ja"}, {}, ["known by name as the source and the target"]),
            ([{"text": "a", "summary": "b"}, {"text": "a", "summary": ["x"]}], {},
             ["a list or a record in column 'summary'"]),
            ([{"prompt": "a", "completion": "b", "label": bool(n % 2)} for n in range(8)], {},
             ["ignore_columns=label"]),
        ]),
    ],
)  # fmt: skip
def test_what_a_task_cannot_learn_from_is_refused(
    task: str, rows: Any, given: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    rows = [rows, rows] if isinstance(rows, dict) else rows
    argv = [
        word for name, value in {"task": task, **given}.items() for word in (f"--{name}", value)
    ]
    with refused(RecipeError, *words):
        task_table.load(task)({"train": write(tmp_path, rows)}, parse(argv))


LABELLED = (
    "text-classification", "token-classification", "question-answering", "multiple-choice",
    "reranking", "image-classification",
)  # fmt: skip
ABSENT = object()
UNLABELLED = pytest.mark.parametrize(("name", "none"), [
    *((name, none) for name in LABELLED for none in (ABSENT, -1)),
    # -1 may be a text.
    *((name, none) for name in ("summarization", "causal-lm") for none in (ABSENT, None)),
])  # fmt: skip


def unlabelled(name: str, none: Any, split: str, tmp_path: Path) -> dict[str, Path]:
    """Return channels of a task, one without what is learned: its columns hold `none`, or are not
    there."""
    columns = [column for form in TASKS[name].forms for column in form.columns if column.is_target]
    names = {known.partition(".")[0] for column in columns for known in column.names}
    if any(form.columns[1].is_target for form in TASKS[name].forms if form.pairs):
        names |= {target for form in TASKS[name].forms for _, target in form.pairs}
    channels = {}
    for channel in ("train", split):
        folder, rows = tmp_path / channel, JOBS[name].rows(24)
        if name == "image-classification":
            tasks.write(folder, rows)
            files = sorted(folder.rglob("*.png"))
            rows = [
                {"file_name": str(f.relative_to(folder)), "label": f.parent.name} for f in files
            ]
        if channel == split:
            empty = {} if none is ABSENT else dict.fromkeys(rows[0].keys() & names, none)
            rows = [{k: v for k, v in row.items() if k not in names} | empty for row in rows]
        stem = "metadata" if name == "image-classification" else channel
        channels[channel] = write(folder, rows, stem)
    return channels


@UNLABELLED
def test_test_data_without_what_is_learned_is_left_out(
    name: str, none: Any, tmp_path: Path
) -> None:
    channels = unlabelled(name, none, "test", tmp_path)
    task = task_table.load(name)(channels, parse(["--task", name]))
    assert any("is not used" in note and "has no value" in note for note in task.data.notes), (
        task.data.notes
    )
    assert task.data.test is None and 0 < len(task.data.evaluation) < 24
    if "do_predict" in TASKS[name].takes:
        with refused(RecipeError, "/test/", "has no value", "leave the file out"):
            argv = ["--task", name, "--do_predict", "True"]
            if "do_generate" in TASKS[name].takes:
                argv += ["--do_generate", "True"]
            task_table.load(name)(channels, parse(argv))


@UNLABELLED
def test_validation_data_without_what_is_learned_is_refused(
    name: str, none: Any, tmp_path: Path
) -> None:
    channels = unlabelled(name, none, "validation", tmp_path)
    with refused(RecipeError, "/validation/", "has no value", "leave the file out"):
        task_table.load(name)(channels, parse(["--task", name]))
    if none == -1 and "missing_labels" in TASKS[name].takes:
        task = task_table.load(name)(channels, parse(["--task", name, "--missing_labels", "-1"]))
        assert 0 < len(task.data.evaluation) < 24


@pytest.mark.parametrize(
    ("rows", "hidden", "argv"),
    [
        (NUMBERED, {"label": -1.0}, ("text-classification", "--problem_type", "regression")),
        (CLASSED, {"label": "-1"}, ("text-classification", "--problem_type", "single_label_classification")),
        ([{"text": "Ada ran", "entities": [{"start": 0, "end": 3, "label": "PER"}]}] * 12,
         {"entities": []}, ("token-classification",)),
    ],
)  # fmt: skip
def test_labels_that_only_look_like_none_are_evaluated_on(
    rows: list[dict[str, Any]], hidden: dict[str, Any], argv: tuple[str, ...], tmp_path: Path
) -> None:
    rows = [*rows, *({**rows[0], "label": "-1"} for _ in range("single_label" in argv[-1]))]
    channels = {
        "train": write(tmp_path / "train", rows),
        "validation": write(tmp_path / "validation", [{**row, **hidden} for row in rows[:5]]),
    }
    task = task_table.load(argv[0])(channels, parse(["--task", *argv]))
    assert len(task.data.evaluation) == 5


def test_a_column_without_a_name_is_read_as_one_without_a_role(tmp_path: Path) -> None:
    rows = [{**row, "": ["a"], "12": "b"} for row in CLASSED]
    assert load(tmp_path, rows).request_columns() == {"text": "text"}


def test_labels_that_are_none_by_name_cannot_be_predicted_for(tmp_path: Path) -> None:
    hidden = [{**row, "label": "NA"} for row in CLASSED]
    channels = {
        "train": write(tmp_path / "train", CLASSED),
        "test": write(tmp_path / "test", hidden, "test"),
    }
    given = ["--task", "text-classification", "--missing_labels", "NA"]
    assert task_table.load("text-classification")(channels, parse(given)).data.test is None
    with refused(RecipeError, "/test/", "has no value", "leave the file out"):
        task_table.load("text-classification")(channels, parse([*given, "--do_predict", "True"]))


@pytest.mark.parametrize("task", ["reranking", "sentence-embedding"])
def test_test_data_of_another_form_is_evaluated_on(task: str, tmp_path: Path) -> None:
    lists = [{"query": f"q {n}", "pos": ["good"], "neg": ["bad"]} for n in range(12)]
    channels = {
        "train": write(tmp_path / "train", triplets(12)),
        "test": write(tmp_path / "test", lists, "test"),
    }
    data = task_table.load(task)(channels, parse(["--task", task])).data
    assert (len(data.train), len(data.evaluation)) == (12, 12)
    pairs = [{"query": f"q {n}", "passage": "good", "label": n % 2} for n in range(12)]
    channels["train"] = write(tmp_path / "pairs", pairs)
    channels["test"] = write(
        tmp_path / "unlabelled", [{**row, "label": None} for row in pairs], "test"
    )
    assert len(task_table.load(task)(channels, parse(["--task", task])).data.evaluation) < 12


def load(folder: Path, rows: Any, *argv: str) -> Any:
    given = parse(["--task", "text-classification", *argv])
    return task_table.load("text-classification")({"train": write(folder, rows)}, given)


@pytest.mark.parametrize(
    ("argv", "evaluates"),
    [
        ([], True),
        (["--eval_strategy", "no"], False),
        (["--eval_strategy", "no", "--do_eval"], True),
        (["--do_eval", "False"], False),
        (["--do_eval", "False", "--eval_strategy", "epoch"], True),
        (["--eval_strategy", "steps"], True),
    ],
)
def test_an_evaluation_is_made_unless_it_is_declined(argv: list[str], evaluates: bool) -> None:
    assert parse(argv).evaluates is evaluates


def test_without_an_evaluation_all_rows_train(tmp_path: Path) -> None:
    task = load(tmp_path, CLASSED, "--eval_strategy", "no")
    assert task.train.num_rows == 12
    assert "evaluation: none (eval_strategy=no); all rows train" in task.data.notes
    assert load(tmp_path, CLASSED).train.num_rows < 12


def test_doctor_sees_values_that_the_trainer_refuses_together(tmp_path: Path) -> None:
    folders = folders_of(tmp_path, {"train": write(tmp_path, CLASSED)})
    argv = ["--eval_strategy", "no", "--early_stopping_patience", "2"]
    (only,) = preflight.inspect(argv, folders, 2)
    assert (only.level, only.what) == ("error", "hyperparameter")
    assert "early_stopping_patience needs evaluations during training" in only.detail


def test_doctor_says_what_to_give_if_the_weights_do_not_fit(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = folders_of(tmp_path, {"train": write(tmp_path, CLASSED)})
    monkeypatch.setattr(memory, "available", lambda: 10_000)
    given = ["--model_name_or_path", str(tiny_model)]
    findings = {one.what: one for one in preflight.inspect(given, folders, 2)}
    assert findings["memory"].level == "warning"
    assert "or lora_r=16 or fsdp=full_shard or an instance with more memory" in str(
        findings["memory"]
    )
    given += ["--lora_r", "2", "--fsdp", "full_shard"]
    findings = {one.what: one for one in preflight.inspect(given, folders, 2)}
    assert str(findings["memory"]).endswith(" or an instance with more memory")


@pytest.mark.parametrize(
    ("names", "is_several", "expected"),
    [
        (["so", "bad", "good"], False, ["so", "bad", "good"]),
        (["so", "bad", "good"], True, ["so", "bad", "good"]),
        (["so", "bad", "fair"], False, ["bad", "good", "so"]),
        (["so", "bad", "good", "fair"], False, ["bad", "good", "so"]),
    ],
)
def test_a_model_that_knows_the_labels_keeps_their_order(
    tmp_path: Path, names: list[str], is_several: bool, expected: list[str]
) -> None:
    """Its head would begin with the labels interchanged."""
    model = tmp_path / "model"
    BertConfig(
        id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)}
    ).save_pretrained(model)
    several = (["good"], [], ["bad", "so"])
    rows = [{**row, "label": several[n % 3]} for n, row in enumerate(CLASSED)]
    task = load(tmp_path / "data", rows if is_several else CLASSED)
    before = task.train.features["label"]
    shown = [task.data.labels.show(label) for label in task.train["label"]]
    task.match_labels(Origin(str(model)))
    assert list(task.data.labels.names) == expected
    after = [sorted(task.data.labels.show(label).split(", ")) for label in task.data.train["label"]]
    assert after == [sorted(label.split(", ")) for label in shown]
    assert task.train.features["label"] == before
