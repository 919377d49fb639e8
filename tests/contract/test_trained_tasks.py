"""What holds for every task, of one small training each: `tests.support.tasks` has the jobs.

The tests speak as users do: by hyperparameters, files, exit codes and HTTP.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from amphora.local import file_answers
from tests.support import plain_answers, tasks
from tests.support.job_tree import Tree
from tests.support.jobs import Job, folders_of
from tests.support.plain_scores import Judged
from tests.support.servers import served
from tests.support.serving_kit import Handlers, assert_close
from tests.support.tasks import JOBS, SmallJob

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]
SETTINGS = {
    "batch_size": str(tasks.BATCH), "epochs": "2", "lr": "3e-3", "logging_steps": "1",
    "bf16": "False",
}  # fmt: skip


@dataclass(kw_only=True)
class Trained(Job):
    """A finished training; its arguments are the hyperparameters without the task."""

    job: SmallJob
    tree: Tree


@pytest.fixture(scope="module", params=JOBS)
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded: Mapping[str, str],
) -> Trained:
    """Train by `amphora train` on hyperparameters and channels alone."""
    job, base = JOBS[request.param], tmp_path_factory.mktemp("job")
    start = job.model(base / "start", 0.1)
    for name, count, seed in (("train", tasks.TRAIN_ROWS, 0), ("test", tasks.TEST_ROWS, 1)):
        tasks.write(base / "input" / "data" / name, job.rows(count, seed))
    given = {"model_name_or_path": str(start), **SETTINGS, **job.hyperparameters}
    tree = Tree(base, dict(preloaded)).configure(given)
    ended = tree.train(timeout=1000)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    argv = [word for name, value in given.items() for word in (f"--{name}", value)]
    return Trained(base=base, channels={}, argv=argv, job=job, tree=tree, log=ended.stdout)


def test_each_task_of_the_registry_has_a_job() -> None:
    from recipe.task_table import TASKS

    # TRL's trainers have their own tests: tests/recipe/tasks/test_post_training.py.
    by_engine = {name for name, spec in TASKS.items() if spec.folder != "post_training"}
    assert {job.task for job in JOBS.values()} == by_engine


def test_a_task_is_found_by_its_data_and_learns(trained: Trained) -> None:
    assert f"\ntask            {trained.job.task} (" in trained.log
    assert "(as given)" not in re.findall(r"\ntask .*", trained.log)[0]
    matches = re.findall(r"^metric step=\d+ \{'loss': ([^,]+),", trained.log, re.MULTILINE)
    losses = [float(loss) for loss in matches]
    assert len(losses) >= 12
    assert sum(losses[-4:]) < sum(losses[:4])
    assert trained.metrics["eval_loss"] > 0
    assert all(math.isfinite(value) for value in trained.metrics.values())
    assert "pipeline_tag: " in (trained.model / "README.md").read_text()
    assert "  proof.json\n" in (trained.model / "SHA256SUMS").read_text()
    assert re.search(
        r"^proof +(\d+) probes, differences allowed: float32 .*; equal to the trained model$",
        trained.log,
        re.MULTILINE,
    ), re.findall(r"^proof.*", trained.log, re.MULTILINE)
    assert "<html" in (trained.output / "report.html").read_text()
    assert trained.tree.failure is None
    is_adapter = trained.job.hyperparameters.get("lora_save") == "adapter"
    assert (trained.model / "adapter_config.json").exists() == is_adapter


def test_the_served_answer_is_that_of_the_plain_library(
    trained: Trained, preloaded: Mapping[str, str]
) -> None:
    """By a server for a body of each kind, and by the handlers that it calls."""
    ANSWERED = 5
    SERVED = ("text-classification", "causal-lm", "image-classification")
    # Of scores by float32, between batches of other shapes.
    TOLERANCE = 1e-4
    rows = trained.job.rows(ANSWERED, seed=2)
    body, expected = trained.job.answer(trained.model, rows)
    request = (body, "image/png") if isinstance(body, bytes) else body
    assert_close(Handlers(trained.model).ask(request), expected, TOLERANCE)
    if trained.job not in [JOBS[name] for name in SERVED]:
        return
    with served(trained.base, preloaded, AMPHORA_DTYPE="float32") as server:
        if isinstance(body, bytes):
            reply = server.http.post(
                "/invocations", content=body, headers={"content-type": "image/png"}
            )
        else:
            reply = server.invoke(body)
        assert_close(reply.raise_for_status().json(), expected, TOLERANCE)


def test_predict_asks_for_the_columns_of_the_training(trained: Trained) -> None:
    def pair(row: plain_answers.Row, *names: str) -> dict[str, object]:
        return {name: row[name] for name in names}

    INPUTS: Mapping[str, Callable[[plain_answers.Row], object]] = {
        "question-answering": lambda row: pair(row, "question", "context"),
        "multiple-choice": lambda row: pair(row, "question", "choices"),
        "sentence-embedding": lambda row: row["anchor"],
        "reranking": lambda row: {"text": row["query"], "text_pair": row["documents"]},
        "summarization": lambda row: row["document"],
        "translation": lambda row: row["translation"]["en"],
        "text2text-generation": lambda row: row["prompt"],
        "causal-lm": lambda row: row["prompt"],
    }
    rows, task = trained.job.rows(3, seed=2), trained.job.task
    if task == "image-classification":
        rows = [{"file_name": "train/left.png"}]
        (trained.model / "train").mkdir(exist_ok=True)
        (trained.model / "train" / "left.png").write_bytes(b"pixels")
        INPUTS = {task: lambda row: base64.b64encode(b"pixels").decode()}
    if task == "token-classification":  # of lists of words, and requests have texts
        rows = [{"text": " ".join(row["tokens"])} for row in rows]
    record = file_answers._record_of(rows, trained.model, None, trained.model / "rows.jsonl")
    make_input = INPUTS.get(task, lambda row: row["text"])
    assert [record(row)["inputs"] for row in rows] == [make_input(row) for row in rows]


def test_the_scores_are_those_of_the_plain_libraries(trained: Trained) -> None:
    if trained.job.scores is None:
        return
    file = trained.output / "predictions.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert bool(lines) == ("do_predict" in trained.job.hyperparameters)
    rows = trained.job.rows(tasks.TEST_ROWS, seed=1)
    start = trained.base / "start"
    expected = trained.job.scores(Judged(trained.model, start, rows, lines))
    assert max(expected.values()) > 0
    results = {name: trained.metrics[f"eval_{name}"] for name in expected}
    assert results == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_card_report_and_log_have_the_numbers_of_metrics_json(trained: Trained) -> None:
    card = (trained.model / "README.md").read_text()
    report = (trained.output / "report.html").read_text()
    for name, value in trained.metrics.items():
        assert f"| {name} | {value:.6g} |" in card
        if not name.endswith("_per_second"):
            assert f'<td>{name}</td><td class="number">{value:.6g}</td>' in report
        (logged,) = re.findall(rf"^  {name} = (\S+)$", trained.log, re.MULTILINE)
        assert float(logged) == pytest.approx(value, rel=1e-5)


def test_doctor_prints_the_plan_that_is_executed(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`amphora doctor` itself is in tests/amphora/training/test_doctor.py."""

    def plain(detail: str, reason: str = "") -> str:
        """Return a row of a plan without the share of padding, which doctor finds in some of the rows."""
        row = f"{detail} ({reason})" if reason else detail
        return re.sub(r"[\d.]+% padding", "padding", row)

    from recipe.training import preflight

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = trained.base / "input" / "data"
    folders = folders_of(trained.base, {name: data / name for name in ("test", "train")})
    findings = [*preflight.inspect(trained.argv, folders, 1)]
    assert not [item for item in findings if item.level == "error"]
    reported = {(item.what, plain(item.detail, item.reason)) for item in findings}
    card = (trained.model / "README.md").read_text()
    plan = card.partition("## Plan")[2].partition("## Metrics")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", plan, re.MULTILINE)[1:]
    assert {"device", "precision", "task", "data", "batch", "steps"} <= dict(rows).keys()
    assert "memory" in dict(reported)
    # The layout of an evaluation depends on its rows, of which doctor reads the first.
    planned = {(what, plain(row.removeprefix("WARNING: "))) for what, row in rows}
    assert {row for row in planned if row[0] != "evaluation"} - reported == set()


def test_a_wrong_row_is_refused_with_its_file_and_line(trained: Trained, tmp_path: Path) -> None:
    """That an error ends a job with code 1 and a failure is in tests/amphora/training."""
    from recipe.errors import DataError

    folder = tasks.write(tmp_path / "in", trained.job.rows(tasks.TRAIN_ROWS))
    location = tasks.spoil(trained.job, folder, number=6)
    argv = ("--task", trained.job.task, *trained.argv)
    with pytest.raises(DataError, match=re.escape(location)):
        Job(tmp_path, {"train": folder}, argv).run_here()
    assert not list((tmp_path / "model").rglob("*.safetensors"))
