"""Commands for a laptop: a job of files and hyperparameters, and answers to the rows of a file."""

import ast
import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amphora.cli import main
from amphora.common.errors import ConfigError
from amphora.local import local_job
from tests.support.job_tree import clean_environ
from tests.support.paths import CODE

SCRIPT = """
import json, os, sys
rows = open(os.environ["SM_CHANNEL_TRAIN"] + "/tickets.csv").read()
print("got", json.dumps([sys.argv[1:], rows, sorted(os.listdir(os.environ["SM_CHANNEL_MODEL"]))]))
"""
HANDLERS = """
def model_fn(model_dir):
    return open(model_dir + "/config.json").read()

def input_fn(body, content_type):
    assert content_type == "application/jsonlines"
    if b"fail" in body:
        raise ValueError("one of them fails")
    return [__import__("json").loads(line)["inputs"] for line in body.decode().splitlines()]

def predict_fn(data, model):
    return [{"label": str(item), "score": 0.5} for item in data]

def output_fn(prediction, accept):
    return "\\n".join(map(__import__("json").dumps, prediction)), accept
"""


def amphora(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amphora", *words], cwd=cwd, capture_output=True, text=True,
        timeout=240, check=False, env=clean_environ(**environ),
    )  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with data, a model and a recipe that prints what it receives."""
    (tmp_path / "tickets.csv").write_text("text,queue\na b,x\n")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    return tmp_path


def test_files_and_hyperparameters_become_the_job_that_sagemaker_would_run(data: Path) -> None:
    words = ("tickets.csv", "--model", "bert", "--label_column=queue", "--lr", "-1", "--fast")
    done = amphora("train", *words, cwd=data, AMPHORA_CODE_DIR=str(data / "code"))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("got ")]
    argv, rows, model = json.loads(line[4:])
    assert argv == ["--fast", "True", "--label_column", "queue", "--lr", "-1"]
    assert (rows, model) == ("text,queue\na b,x\n", ["config.json"])
    base = data / "runs" / "tickets"
    hyperparameters = {"label_column": "queue", "lr": "-1", "fast": "True"}
    written = base / "input" / "config" / "hyperparameters.json"
    assert json.loads(written.read_text()) == hyperparameters
    # What it prints for SageMaker is the same job.
    snippet = done.stdout[done.stdout.index("from sagemaker") : done.stdout.index("\nReport:")]
    given = {node.arg: node.value for node in ast.walk(ast.parse(snippet))
             if isinstance(node, ast.keyword)}  # fmt: skip
    assert ast.literal_eval(given["hyperparameters"]) == hyperparameters
    assert 'channel_name="train"' in snippet and 'channel_name="model"' in snippet

    # The same folder again: other data replace the links, and a folder is linked whole.
    (data / "more").mkdir()
    (data / "more" / "tickets.csv").write_text("text,queue\nc d,y\n")
    local_job.write_tree(local_job.read_words([str(data / "more"), "--out", str(base)], {}))
    assert (base / "input" / "data" / "train" / "tickets.csv").read_text() == "text,queue\nc d,y\n"
    assert not (base / "input" / "data" / "model").exists()
    # Without paths, its hyperparameters are changed and its data stay.
    local_job.write_tree(local_job.read_words(["--out", str(base), "--lr", "2"], {}))
    assert json.loads(written.read_text()) == {"lr": "2"}
    assert (base / "input" / "data" / "train").exists()


def test_all_that_is_wrong_with_a_command_line_is_said_at_once(data: Path) -> None:
    words = ("no.csv", "--test", "none", "--hf_token", "hf_secret", "--lr", "1", "--lr", "2")
    done = amphora("train", *words, cwd=data)
    assert done.returncode == 2 and not (data / "runs").exists()
    for part in ("no.csv does not exist", "none does not exist", "--lr is given twice", "HF_TOKEN"):
        assert part in done.stderr, done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    kept = data / "mine" / "input" / "data" / "train"
    kept.mkdir(parents=True)
    (kept / "rows.csv").write_text("text,label\n")
    job = local_job.read_words([str(data / "tickets.csv"), "--out", str(data / "mine")], {})
    with pytest.raises(ConfigError, match="holds data that"):
        local_job.write_tree(job)
    assert (kept / "rows.csv").exists()
    for words in (("serve", "code"), ("predict", "code", "no.csv", "--out", "a.csv"),
                  ("predict", "code", "tickets.csv", "--out", "a.xlsx"),
                  ("quantize", "bert"), ("serve", "bert", "more", "words")):  # fmt: skip
        assert amphora(*words, cwd=data).returncode == 2


def test_doctor_checks_a_command_line_and_leaves_nothing(data: Path) -> None:
    header = "import sys, json\n"
    line = '{"level": "ok", "what": "seen", "detail": \' \'.join(sys.argv[3:])}'
    (data / "code" / "check.py").write_text(f"{header}print('amphora-check', json.dumps({line}))\n")
    words = ("doctor", "tickets.csv", "--model", "a/name", "--json", "--epochs", "2")
    done = amphora(*words, cwd=data, AMPHORA_CODE_DIR=str(data / "code"))
    seen = {finding["what"]: finding["detail"] for finding in json.loads(done.stdout)["findings"]}
    assert seen["seen"] == "--epochs 2 --model_name_or_path a/name", done.stderr
    assert not (data / "runs").exists()


def test_each_row_of_a_file_is_answered_in_its_place(data: Path) -> None:
    (data / "bert" / "config.json").write_text('{"text_columns": ["subject", "body"]}')
    (data / "bert" / "code").mkdir()
    (data / "bert" / "code" / "inference.py").write_text(HANDLERS)
    rows = [{"label": str(n), "body": f"b\n{n}", "subject": "fail" if n == 70 else f"s,{n}"}
            for n in range(150)]  # fmt: skip
    with gzip.open(data / "rows.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    out = data / "answers.csv"

    def check() -> None:
        with out.open(newline="") as file:
            answered = list(csv.DictReader(file))
        assert len(answered) == 150 and not out.with_name("answers.csv.part").exists()
        for row, answer in zip(rows, answered, strict=True):
            assert row.items() <= answer.items()
            expected = str({"subject": row["subject"], "body": row["body"]})
            if row["subject"] == "fail":
                assert "one of them fails" in answer["predicted_error"]
            else:
                assert (answer["predicted_label"], answer["predicted_score"]) == (expected, "0.5")

    words = ("predict", "bert", "rows.csv.gz", "--out", "answers.csv")
    done = amphora(*words, cwd=data)
    assert done.returncode == 1, done.stderr  # one row has no answer
    check()

    # What a stopped run has left is not computed again; a line that was cut is.
    part = out.with_name("answers.csv.part")
    from amphora.local import file_answers

    mark = file_answers._fingerprint(data / "rows.csv.gz", data / "bert", None)
    kept = json.dumps({"label": "kept", "score": 1})
    part.write_text(f"{mark}\n{kept}\n{kept[:9]}")
    done = amphora(*words, cwd=data)
    assert "answers to 1 of 150 rows" in done.stderr
    first, second, *_ = csv.DictReader(out.read_text().splitlines(keepends=True))
    assert first["predicted_label"] == "kept" and "s,1" in second["predicted_label"]
    # Of another model they are not used.
    part.write_text(f"{mark[:-1]}\n{kept}\n")
    assert file_answers._read_answers(part, mark) == []


def test_hyperparameters_are_shown_by_group_and_one_of_them_whole() -> None:
    here = Path(__file__).parent
    shown = amphora("train", "--help", cwd=here, AMPHORA_CODE_DIR=str(CODE)).stdout
    positions = [shown.index(part) for part in ("usage:", "Model:", "--lora_r", "Data:")]
    assert positions == sorted(positions)
    one = amphora("train", "--help", "lr", cwd=here, AMPHORA_CODE_DIR=str(CODE)).stdout
    assert "Peak learning rate" in one and "--lora_r" not in one
    assert os.linesep in one


def test_two_runs_are_compared_by_scores_settings_and_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = {"a": [(3, "yes"), (8, "no")], "b": [(8, "no")]}
    for number, (name, rows) in enumerate(wrong.items()):
        output = tmp_path / name / "output" / "data"
        output.mkdir(parents=True)
        scores = {"eval_accuracy": 0.5 + number / 4, "eval_loss": 0.5 + number, "epoch": 1.0}
        (output / "metrics.json").write_text(json.dumps(scores))
        lines = [
            f"t.csv,{line},{true},{'a' * line},0.{line},the text {line}" for line, true in rows
        ]
        text = "\n".join(["file,line,true,predicted,confidence,text", *lines])
        (output / "mistakes.csv").write_text(text)
        given = tmp_path / name / "input" / "config" / "hyperparameters.json"
        given.parent.mkdir(parents=True)
        given.write_text(json.dumps({"epochs": "3", **({"lr": "1e-4"} if number else {})}))
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert lines[1:3] == ["eval_accuracy 0.5 0.75 +0.25 better", "eval_loss 0.5 1.5 +1 worse"]
    assert "lr - 1e-4" in lines and not any(line.startswith(("epoch", "epochs")) for line in lines)
    assert lines[lines.index("Wrong in the first run only: 1 rows") + 1] == (
        "t.csv line 3: 'the text 3' is yes, predicted aaa"
    )
    assert lines[-1] == "Wrong in the second run only: 0 rows"
    (tmp_path / "b" / "output" / "data" / "metrics.json").unlink()
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "b has no output/data/metrics.json" in capfd.readouterr().err
