"""The plan of a job: its task, how it is trained, what its rows are; the same for doctor."""

import copy
import json
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig

from recipe import task_table
from recipe.arguments import parse
from recipe.batching import batches, packing
from recipe.batching.batches import World
from recipe.data import values as cells
from recipe.errors import CheckpointError, DataError, HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.plan import batch_layout, data_report, detection, resolution, trainer_arguments
from recipe.plan.batch_layout import Cut, TrainableModel
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.storage import checkpoints
from recipe.tasks.base import WARNING, Finding
from recipe.tasks.text_classification.task import CLASSES
from tests.support.causal_kit import make_tokenizer
from tests.support.jobs import QUICK, SHARDED, Job, folders_of, write
from tests.support.packed_batches import samples_of
from tests.support.refusals import refused
from tests.support.words import WORDS, reviews


def plan_of(
    tmp_path: Path, model: Path, processes: int | None, *argv: str
) -> tuple[Plan, list[str]]:
    data = write(tmp_path / "data", REVIEWS)
    folders = folders_of(tmp_path, {"train": data, "model": model})
    table = Table()
    given = parse(["--use_cpu", "True", *argv], folders)
    plan = resolution.resolve(given, folders, {}, table, processes)
    resolution.load(plan, table)
    return plan, [f"{decision.what:15} {decision}" for decision in table.rows]


def test_doctor_plans_for_more_processes_than_its_own(tmp_path: Path, tiny_model: Path) -> None:
    arguments = ["--fsdp", "True"]
    alone, _ = plan_of(tmp_path, tiny_model, 1, *arguments)
    plan, rows = plan_of(tmp_path, tiny_model, 2, *arguments)
    assert not alone.is_sharded and plan.is_sharded
    assert any(row.startswith("device          cpu, 2 processes") for row in rows)
    assert plan.device.threads is None, "how many share this host's cores is not known"


@pytest.mark.parametrize(
    ("argv", "decided"),
    [
        (["--warmup_steps", "0.1"], "adamw_torch_fused, linear, warm-up for 10% of all steps"),
        (["--warmup_steps", "7"], "adamw_torch_fused, linear, warm-up for 7 steps"),
        (["--warmup_steps", "0"], "adamw_torch_fused, linear, no warm-up"),
        (["--lr_scheduler_type", "constant"], "adamw_torch_fused, constant, no warm-up"),
        (["--save_steps", "0.2"], "every 20% of all steps, and"),
    ],
)
def test_schedule_and_checkpoints_are_described_as_they_happen(
    tmp_path: Path, tiny_model: Path, argv: list[str], decided: str
) -> None:
    _, rows = plan_of(tmp_path, tiny_model, 1, *argv)
    assert any(decided in row for row in rows), rows


@pytest.mark.parametrize(
    ("argv", "evaluations", "saves"),
    [
        ([], ("epoch", None), ("epoch", 500)),
        (["--eval_steps", "3"], ("steps", 3), ("epoch", 500)),
        (["--eval_steps", "3", "--early_stopping_patience", "2"], ("steps", 3), ("steps", 3)),
        (["--eval_steps", "3", "--eval_strategy", "epoch"], ("epoch", 3), ("epoch", 500)),
        (
            ["--eval_strategy", "steps", "--load_best_model_at_end", "True"],
            ("steps", 0.05),
            ("steps", 0.05),
        ),
        (
            ["--eval_steps", "2", "--save_steps", "4", "--load_best_model_at_end", "True"],
            ("steps", 2),
            ("steps", 4),
        ),
    ],
)
def test_evaluations_follow_the_steps_that_are_given_and_checkpoints_the_best_of_them(
    tmp_path: Path,
    tiny_model: Path,
    argv: list[str],
    evaluations: tuple[str, float | None],
    saves: tuple[str, float],
) -> None:
    plan, _ = plan_of(tmp_path, tiny_model, 1, *argv)
    given = plan.arguments
    assert (given.eval_strategy, given.eval_steps) == evaluations
    assert (given.save_strategy, given.save_steps) == saves


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--early_stopping_patience 1 --eval_strategy no", ["early_stopping_patience", "=epoch"]),
        ("--load_best_model_at_end True --do_eval False", ["load_best_model_at_end", "=epoch"]),
        ("--early_stopping_patience 1 --save_strategy no", ["eval_strategy is epoch", "is no"]),
        (
            "--lr_scheduler_type warmup_stable_decay",
            ["lr_scheduler_kwargs", "warmup_stable_decay", "num_decay_steps"],
        ),
        ("--lr_scheduler_kwargs num_cycles=3", ["lr_scheduler_kwargs", "linear", "num_cycles"]),
    ],
)
def test_what_does_not_fit_together_is_refused_before_the_data_is_read(
    tmp_path: Path, tiny_model: Path, argv: str, words: list[str]
) -> None:
    with refused(HyperparameterError, *words):
        plan_of(tmp_path, tiny_model, 1, *argv.split())


def test_what_a_hyperparameter_decides_of_others(tmp_path: Path, tiny_model: Path) -> None:
    argv = ["--early_stopping_patience", "1", "--load_best_model_at_end", "False"]
    plan, _ = plan_of(tmp_path, tiny_model, 1, *argv)
    assert plan.arguments.metric_for_best_model == "loss"
    assert plan.arguments.greater_is_better is False
    _, rows = plan_of(tmp_path, tiny_model, 1, "--neftune_noise_alpha", "5")
    assert any(row.startswith("packing         off") for row in rows)


@pytest.mark.parametrize(
    ("argv", "steps", "warmup", "words"),
    [
        (["--epochs", "1"], 1, 0, "no warm-up: the learning rate of the only step would be 0"),
        (["--epochs", "1"], 9, 1, ""),
        (["--max_steps", "6", "--warmup_steps", "50"], 9, 50, "reaches 0.1 of its peak"),
        (["--epochs", "1", "--lr_scheduler_type", "constant"], 1, 1, ""),
    ],
)
def test_a_warm_up_leaves_a_step_to_learn(
    tmp_path: Path, tiny_model: Path, argv: list[str], steps: int, warmup: int, words: str
) -> None:
    """Its first step has a learning rate of 0."""
    arguments, table = plan_of(tmp_path, tiny_model, 1, *argv)[0].arguments, Table()
    values = trainer_arguments.fitted_warmup(arguments, steps, table)
    fitted = trainer_arguments.changed(arguments, **values)
    assert fitted.get_warmup_steps(6 if "--max_steps" in argv else steps) == warmup
    assert words in "".join(row.detail for row in table.rows)
    assert bool(words) == bool(table.rows)


REVIEWS = [{"text": f"a film of {n}", "label": "ab"[n % 2]} for n in range(20)]
TEXTS = [{"text": f"a film of {n}"} for n in range(20)]


def detect(
    tmp_path: Path, rows: Sequence[Any], architecture: str = "BertForMaskedLM", *argv: str
) -> tuple[str, str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    given = parse(["--model_id", str(model), *argv])
    return detection.find(given, {"train": write(tmp_path / "data", rows)})


@pytest.mark.parametrize(
    ("rows", "architecture", "argv", "task", "why"),
    [
        (REVIEWS, "GPT2LMHeadModel", ["--task", "causal-lm"], "causal-lm", "as given"),
        (
            [{"prompt": f"a film of {n}", "completion": f"number {n}"} for n in range(20)],
            "BertModel",
            ["--completion_column", "completion"],
            "causal-lm",
            "only this task takes completion_column",
        ),
        (REVIEWS, "BertModel", ["--num_labels", "2"], "text-classification", "takes num_labels"),
        (REVIEWS, "BertModel", [], "text-classification", "by its columns: text 'text', label"),
        (TEXTS, "BertForMaskedLM", [], "masked-lm", "with a masked-LM head, else causal-lm could"),
    ],
)
def test_the_task_is_found_by_hyperparameters_columns_and_model(
    tmp_path: Path, rows: Any, architecture: str, argv: list[str], task: str, why: str
) -> None:
    named, reason = detect(tmp_path, rows, architecture, *argv)
    assert named == task
    assert why in reason


def test_hyperparameters_of_different_tasks_are_refused() -> None:
    with pytest.raises(HyperparameterError, match=r"No task takes.*prompt_column .task=causal-lm"):
        parse(["--prompt_column", "a", "--num_labels", "2"])


def test_the_first_rows_of_large_files_are_enough(tmp_path: Path) -> None:
    """And the last one of them may be cut in two."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    turns = [{"messages": talk, "n": "x" * 3_000}] * 500
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.Table.from_pylist(turns), tmp_path / "parquet" / "train.parquet")
    for data in (write(tmp_path / "jsonl", turns), tmp_path / "parquet"):
        assert detection.find(parse([]), {"train": data})[0] == "causal-lm"


def test_a_refusal_lists_the_tasks_that_may_be_meant_each_with_its_lines(tmp_path: Path) -> None:
    rows = [{"text": f"a film of {n}", "kind": "ab"[n % 2]} for n in range(20)]
    with pytest.raises(HyperparameterError) as refusal:
        detect(tmp_path, rows)
    why, classes, *others = str(refusal.value).splitlines()
    assert "The columns are 'text' ('a film of 0'), 'kind' ('a')." in why
    assert classes == "- task=text-classification label_column=kind (text 'text', label 'kind')"
    assert len(others) < 3


@pytest.mark.parametrize(
    ("argv", "rate"),
    [
        ([], 5e-5),
        (["--lora_r", "4"], 2e-4),
        (["--task", "causal-lm"], 2e-5),
        (["--task", "reranking", "--lora_r", "4"], 1e-4),
        (["--task", "reranking", "--lr", "5e-5"], 5e-5),
    ],
)
def test_a_learning_rate_that_is_not_given_is_the_tasks(argv: list[str], rate: float) -> None:
    given = parse(argv)
    task = given.task or "text-classification"
    decided, why = resolution.learning_rate(given, task)
    assert decided == rate
    assert (f"the default of {task}" in why) == ("--lr" not in argv)
    assert ("with LoRA" in why) == ("--lora_r" in argv)


@pytest.mark.parametrize(
    ("task", "row", "named"),
    [
        ("token-classification", {"tokens": ["a"], "tags": ["O"]}, ("text_column", "label_column")),
        (
            "sentence-embedding",
            {"anchor": "a", "positive": "b", "negative": "c"},
            ("label_column", "negative_columns"),
        ),
    ],
)
def test_all_columns_that_are_not_there_are_told_at_once(
    task: str, row: dict[str, Any], named: Sequence[str], tmp_path: Path
) -> None:
    channels = {"train": write(tmp_path, [row] * 9)}
    argv = [word for name in named for word in (f"--{name}", f"no_{name}")]
    given = parse(["--model_id", "a/b", "--task", task, *argv])
    with pytest.raises(DataError) as refusal:
        task_table.load(task)(channels, given)
    for name in named:
        assert f"{name} has value 'no_{name}'" in str(refusal.value)


@pytest.mark.parametrize(
    ("rows", "argv", "words"),
    [
        (REVIEWS, "--text_column texd,b --label_column labell",
         ["text_column has value 'texd'", "text_column has value 'b'", "label_column has value 'labell'",
          "Did you mean text? Did you mean label?"]),
        # Columns of numbers or nothing are not proposed as texts.
        ([{"a": str(n % 2), "b": f"a film of {n}", "c": ""} for n in range(20)], "",
         ["- task=text-classification text_column=b label_column=a (text 'b', label 'a'; not read: c)"]),
        ([{name: f"{name} film of {n}" for name in "qrstu"} for n in range(20)], "",
         ["- task=sentence-embedding text_column=q,r ("]),
        (TEXTS, "--columns verse:text", ["No task has data with all", "columns=verse:text"]),
    ],
)  # fmt: skip
def test_a_refusal_says_which_columns_to_give(
    rows: list[Any], argv: str, words: list[str], tmp_path: Path
) -> None:
    with refused((DataError, HyperparameterError), *words):
        detect(tmp_path, rows, "BertForMaskedLM", *argv.split())


def test_wikitext_s_files_are_plain_texts(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_text(" = Rome = \n \n A city , of old .\n" * 9)
    given = parse(["--model_id", "a/b", "--task", "causal-lm"])
    assert len(task_table.load("causal-lm")({"train": tmp_path}, given).train) == 16


Rows = list[dict[str, Any]]
CLEAN: Rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(40)]
TEST: Rows = [{"text": f"other {n}", "label": "ab"[n % 2]} for n in range(6)]
TAGGED: Rows = [{"tokens": ["w", str(n)], "ner_tags": ["O", "B-LOC"]} for n in range(12)]
OTHERS: Rows = [{"tokens": ["x", str(n)], "ner_tags": ["O", "B-LOC"]} for n in range(12)]
REQUESTS: Rows = [{"prompt": "Translate.", "completion": f"text {n}"} for n in range(12)]
SPOKEN: Rows = [{"prompt": "Translate.", "completion": f"more {n}"} for n in range(12)]

ANSWER: dict[str, Any] = {"answers": {"text": ["was"], "answer_start": [4]}}
QUESTIONS: Rows = [{"question": f"Who was {n}", "context": "Ada was here.",
                "answers": {"text": ["Ada"], "answer_start": [0]}} for n in range(12)]  # fmt: skip
CHOSEN: Rows = [
    {"question": f"Who {n}", "choices": ["dogs", "cats"], "answer": "dogs"} for n in range(12)
]
SCORED: Rows = [
    {"sentence1": f"a {n}", "sentence2": f"b {n}", "score": 0.5 + n / 50} for n in range(12)
]
PAIRED: Rows = [{"source": f"the text {n}", "target": f"text {n}"} for n in range(12)]


def findings(task: str, folder: Path, train: Rows, test: Rows) -> dict[str, Finding]:
    channels = {"train": write(folder / "train", train), "test": write(folder / "test", test)}
    made = task_table.load(task)(channels, Hyperparameters(task=task))
    return {finding.what: finding for finding in data_report.row_findings(made)}


@pytest.mark.parametrize(("task", "train", "test", "expected"), [
    pytest.param("text-classification", CLEAN, TEST, {}, id="clean"),
    pytest.param("text-classification", CLEAN, [*TEST, CLEAN[3], CLEAN[4]],
        {"leak": "2 of 8 evaluation rows are in the training data.*test/train.jsonl line 7: 'text 3'"}, id="leak"),
    pytest.param("text-classification", CLEAN, [*TEST, {"text": "text 3", "label": "a"}],
        {"leak": "1 of 7 evaluation rows"}, id="leak with another label"),
    pytest.param("text-classification", [*CLEAN, {"text": "text 7", "label": "a"}], TEST,
        {"contradiction": "2 of 41 training rows.*line 8 and .* line 41: 'text 7'"}, id="contradiction"),
    pytest.param("text-classification", [*CLEAN, *({"text": f"{text} {n}", "label": "a"} for n, text in enumerate(
            ["caf\u00e9 in S\u00c3O", "caf\u00c3\u00a9", "it\u00e2\u20ac\u2122s", "caf\ufffd"]))], TEST,
        {"encoding": "3 of 44 training rows .* line 42: 'caf"}, id="encoding"),
    pytest.param("text-classification", [*CLEAN, {"text": " ", "label": "a"}], [*TEST, {"text": "", "label": "b"}],
        {"empty rows": "2 rows have no text.*/train/train.jsonl line 41"}, id="empty"),
    pytest.param("token-classification", [*TAGGED, {"tokens": ["w", "3"], "ner_tags": ["O", "O"]}],
        [*OTHERS, TAGGED[1]],
        {"contradiction": "2 of 13 .* line 4 and .* line 13", "leak": "1 of 13 evaluation rows"}, id="tags"),
    pytest.param("question-answering", QUESTIONS, [{**QUESTIONS[4], "question": "When?"}, QUESTIONS[7] | ANSWER],
        {"leak": "1 of 2 evaluation rows.* line 2: 'Who was 7'"}, id="questions"),
    pytest.param("multiple-choice", [*CHOSEN, {**CHOSEN[5], "answer": "cats"}], [CHOSEN[3] | {"answer": "cats"}],
        {"contradiction": "2 of 13 .* line 6 and .* line 13", "leak": "1 of 1 evaluation rows"}, id="choices"),
    pytest.param("sentence-embedding", [*SCORED, SCORED[2] | {"score": 0.1}], [SCORED[3] | {"score": 0.1}],
        {"contradiction": "2 of 13 .* line 3 and .* line 13", "leak": "1 of 1 evaluation rows"}, id="scored pairs"),
    pytest.param("text2text-generation", PAIRED, [PAIRED[6] | {"target": "another"}],
        {"leak": "1 of 1 evaluation rows.* line 1: 'the text 6'"}, id="generated texts"),
    pytest.param("causal-lm", REQUESTS, SPOKEN, {}, id="prompts may be equal"),
    pytest.param("causal-lm", REQUESTS, [*SPOKEN, REQUESTS[5]], {"leak": "1 of 13 "}, id="prompts with completions"),
])  # fmt: skip
def test_warnings_name_the_rows(
    task: str, train: Rows, test: Rows, expected: dict[str, str], tmp_path: Path
) -> None:
    actual = findings(task, tmp_path, train, test)
    warnings = {what: row for what, row in actual.items() if row.level == WARNING}
    assert warnings.keys() == expected.keys()
    for what, pattern in expected.items():
        assert re.search(pattern, f"{warnings[what]} {warnings[what].example}")
        assert "such as" not in str(warnings[what]), "the model card shows no rows"
    assert actual.keys() - warnings.keys() <= {"repeated rows"}


@pytest.mark.parametrize("has_test", [True, False])
def test_data_that_is_not_evaluated_has_no_findings(has_test: bool, tmp_path: Path) -> None:
    channels = {"train": write(tmp_path / "train", CLEAN)}
    if has_test:
        channels["test"] = write(tmp_path / "test", CLEAN[:3])
    given = parse(["--task", "text-classification", "--eval_strategy", "no"])
    made = task_table.load("text-classification")(channels, given)
    results, (section,) = data_report.inspect(made, make_tokenizer(), [3, 4], 8)
    assert {finding.what for finding in results} == {"lengths", "truncation"}
    assert section.columns == ("class", "train") and section.rows == [["a", 20], ["b", 20]]


def test_the_doctor_s_sample_has_a_batch_of_evaluation_rows(tmp_path: Path) -> None:
    """Of 8 rows, it called an evaluation of thousands too small for a score."""
    channels = {"train": write(tmp_path / "train", CLEAN), "test": write(tmp_path / "test", CLEAN)}
    given = parse(["--task", "text-classification"])
    made = task_table.load("text-classification")(channels, given)
    counts = [
        len(made.some_samples(make_tokenizer(), 8, [0, 3], evaluated)["evaluation"])
        for evaluated in (1, 32, 64)
    ]
    assert counts == [10, 32, 40]


def test_repeated_rows_are_counted(tmp_path: Path) -> None:
    actual = findings("text-classification", tmp_path, [*CLEAN, *CLEAN[:10]], TEST)
    assert str(actual["repeated rows"]).startswith(
        "10 of 50 training rows repeat another one (20.0%)"
    )


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a"]),
        pa.array(["a", "b", "a"], pa.large_string()),
        pa.array([b"a", b"b", b"a"]),
        pa.array([1, 2, 1]),
        pa.array([True, False, True]),
        pa.array([None, "b", None]),
        pa.array([["a", "b"], ["a"], ["a", "b"]]),
        pa.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]], pa.large_list(pa.float64())),
        pa.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]], pa.list_(pa.float64(), 2)),
        pa.array([[["a"], ["b"]], [["b"], []], [["a"], ["b"]]]),
        pa.array([{"a": 1}, {"a": 2}, {"a": 1}]),
        pa.array([[{"a": 1}], [{"a": 2}], [{"a": 1}]]),
        pa.array([], pa.large_string()),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_of_every_type_are_compared(column: pa.Array) -> None:
    seeds = np.full(len(column), 7, np.uint64)
    hashes = cells.chain_hashes(column, seeds)
    assert not len(column) or (hashes[0] == hashes[2] != hashes[1])
    assert cells.chain_hashes(column[1:], seeds[1:]).tolist() == hashes[1:].tolist()


STEPS = ("--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3")
ARGUMENTS = (*STEPS, "--save_total_limit", "9", "--logging_steps", "1", "--lr", "5e-3", "--bf16",
             "False")  # fmt: skip


def cut(processes: int, size: int, accumulation: int = 1) -> Cut:
    samples = processes * size * accumulation
    given = (size, accumulation)
    return Cut(processes=processes, size=size, accumulation=accumulation, given=given,
               sharded=False, samples=samples)  # fmt: skip


@pytest.mark.parametrize(
    ("was", "now", "actual"),
    [
        (cut(2, 8), cut(1, 8), (8, 2, 16)),
        (cut(1, 8), cut(2, 8), (4, 1, 8)),
        (cut(1, 8), cut(3, 8), (3, 1, 8)),
        (cut(8, 4), cut(6, 4), (3, 2, 32)),
        (cut(2, 8, 3), cut(5, 8, 3), (5, 2, 48)),
        (cut(4, 2), cut(16, 2), (1, 1, 8)),
        (cut(2, 8), cut(1, 16), (16, 1, 16)),
        (cut(2, 8), cut(1, 4), (4, 1, 4)),
        (cut(1, 8), cut(1, 8), (8, 1, 8)),
    ],
    ids=str,
)
def test_the_samples_of_a_step_are_kept(was: Cut, now: Cut, actual: tuple[int, int, int]) -> None:
    """But where the batch itself was changed, which `checkpoints.check_same` refuses."""
    kept = batch_layout.kept(now, was.as_job())
    assert (kept.size, kept.accumulation, kept.samples) == actual
    assert kept.size <= now.size, "a device has room for what was asked for"
    assert kept.processes * kept.size * kept.accumulation >= kept.samples
    again = batch_layout.kept(was, kept.as_job())
    if actual[2] == was.samples and now.given == was.given:
        assert (again.size, again.samples) == (was.size, was.samples), "and back"


def test_another_batch_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    jobs = [
        {checkpoints.SAMPLES: training.samples, checkpoints.CUT: training.as_job()}
        for training in (cut(2, 8), cut(1, 4))
    ]
    with pytest.raises(CheckpointError) as caught:
        checkpoints.check_same(checkpoints.Checkpoint(tmp_path, jobs[0], False), jobs[1])
    assert (
        "samples in a step was 16 (processes 2 x batch size 8 x gradient_accumulation_steps 1) and "
        "is 4 (processes 1 x batch size 4 x gradient_accumulation_steps 1)"
    ) in str(caught.value)


def test_steps_are_cut_where_that_saves_more_padding_than_it_costs() -> None:
    def finer(
        lengths: list[int], now: Cut, *, couples: bool = False, **others: Any
    ) -> tuple[batches.Training, Cut]:
        """What `by_length` makes of steps of samples of these lengths."""
        training = batches.Training(
            samples=samples_of(lengths), size=now.size, accumulation=now.accumulation,
            step_samples=now.samples, world=World(processes=now.processes),
        )  # fmt: skip
        usual = {"torch_compile": False, "fsdp": "", "device": torch.device("cpu")}
        args: Any = SimpleNamespace(**{**usual, **others})
        model: Any = SimpleNamespace(config=BertConfig())
        tokenizer: Any = SimpleNamespace(pad_token_id=0)
        objective: Any = copy.copy(CLASSES)
        objective.couples_samples = couples
        return batch_layout.cut_by_length(
            TrainableModel(
                model=model, tokenizer=tokenizer, arguments=args, objective=objective, packing=False
            ),
            training,
            now,
        )

    spread = np.random.default_rng(0).lognormal(5, 0.6, 333).astype(int).clip(4).tolist()
    training, now = finer(spread, cut(1, 16, 2))
    assert (now.size, now.accumulation, now.samples, now.given) == (4, 8, 32, (16, 2))
    assert training.steps() == 11
    lengths, longest = training.samples.lengths, []
    for index in range(8):
        ((rows, weight),) = training.epoch(0, False)[index]
        assert (len(rows), weight) == (4, 32)
        longest.append(lengths[rows].max())
    assert longest == sorted(longest, reverse=True)
    assert longest[-1] < longest[0] / 3
    whole = packing.steps(lengths, 32, 0, 0, False)[0]
    parts = [training.epoch(0, False)[position][0][0] for position in range(8)]
    assert sorted(whole) == sorted(np.concatenate(parts))
    assert finer(spread, cut(2, 6))[1].size == 3, "of parts that all have as many"
    for unchanged in (
        finer(spread, cut(1, 3)),
        finer([50] * 333, cut(1, 16)),
        finer([3, 9] * 166, cut(1, 16)),
        finer(spread, cut(1, 16), couples=True),
        finer(spread, cut(1, 16), torch_compile=True),
        finer(spread, cut(1, 16), fsdp="full_shard"),
        finer(spread, cut(1, 16), device=torch.device("meta")),
    ):
        assert unchanged[1].accumulation == unchanged[0].accumulation == 1


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_cut_steps_learn_what_whole_ones_do(
    tmp_path: Path, still_model: Path, preloaded: Mapping[str, str]
) -> None:
    """In processes that share them, with sharded weights (accumulated, not cut), and resumed."""
    drawn = random.Random(0)
    rows = [
        {
            "text": " ".join(drawn.choices(WORDS, k=58 if index % 7 == 0 else 1 + index % 3)),
            "label": "ab"[index % 2],
        }
        for index in range(88)
    ]
    channels = {"train": write(tmp_path / "in", rows)}
    argv = ("--model_id", str(still_model), *ARGUMENTS, "--packing", "False", "--optim", "sgd")

    def training(name: str, processes: int, *more: str, checkpoint: Path | None = None) -> Job:
        parts = 2 if more == SHARDED else 1
        cut = (
            "--batch_size",
            str(48 // processes // parts),
            "--gradient_accumulation_steps",
            str(parts),
        )
        job = Job(tmp_path / name, channels, (*argv, *cut, *more), {**preloaded, **QUICK})
        if checkpoint:
            shutil.copytree(checkpoint, job.checkpoints / checkpoint.name)
        return job.finish(processes=processes)

    one, sharded, two = training("one", 1), training("sharded", 2, *SHARDED), training("two", 2)
    rest = training("rest", 1, checkpoint=one.checkpoints / "checkpoint-3")
    for item in (one, sharded, two, rest):
        expected = {step: sharded.losses[step] for step in item.losses}
        assert item.losses == pytest.approx(expected, abs=1e-5), item.base
        line = "48 samples a step (split by length into batches of "
        assert (line in item.log) == (item is not sharded), item.log
        for name, values in item.weights.items():
            torch.testing.assert_close(values, one.weights[name], rtol=0, atol=1e-5)
    assert rest.files == one.files


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_job_goes_on_in_another_world(
    tmp_path: Path, still_model: Path, preloaded: Mapping[str, str]
) -> None:
    """With the same samples in each step, and losses that are equal but for rounding."""
    rows = [{"text": text, "label": label} for text, label in reviews(72)]
    channels = {"train": write(tmp_path / "in", rows)}
    argv = ("--model_id", str(still_model), *ARGUMENTS)

    def training(name: str, size: int, *more: str) -> Job:
        cut = ("--batch_size", str(size), *more)
        return Job(tmp_path / name, channels, (*argv, *cut), {**preloaded, **QUICK})

    one = training("one", 8).finish()
    sharded = training("sharded", 4, *SHARDED).finish(processes=2)
    assert len({round(loss, 3) for loss in one.losses.values()}) > 3, "steps can be told apart"
    assert sharded.losses == pytest.approx(one.losses, rel=2e-4)
    for begun, name, processes, size, more, line in (
        (one, "1 to 2", 2, 8, (), "2 processes x 4 texts x 1 batch, before"),
        (one, "1 to 2 sharded", 2, 8, SHARDED, "before into"),
        (sharded, "sharded 2 to 3", 3, 4, SHARDED, "before into"),
        (sharded, "sharded 2 to 1", 1, 4, SHARDED, "before into"),
    ):
        job = training(name, size, *more)
        shutil.copytree(begun.checkpoints / "checkpoint-3", job.checkpoints / "checkpoint-3")
        job.finish(processes=processes)
        expected = {step: loss for step, loss in one.losses.items() if step > 3}
        assert job.losses == pytest.approx(expected, rel=2e-4), name
        assert re.search(r"a step's 8 texts are split into .*before into", job.log), name
        assert line in job.log
