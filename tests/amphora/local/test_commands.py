"""Commands for a laptop: a job of files and hyperparameters, and answers to the rows of a file."""

import ast
import base64
import csv
import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from amphora.cli import main
from amphora.common.errors import ConfigError
from amphora.local import file_answers, local_job
from tests.support.job_tree import clean_environ

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

    assert 'data_source="s3://BUCKET/tickets/train/"' in snippet
    job = local_job.read_words([str(data / "tickets.csv"), "--out", 'a "b" ü'], {})
    ast.parse(local_job.sdk_snippet(job))

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


def test_all_that_is_wrong_with_a_command_line_is_said_at_once(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("ticket.csv", "--test", "none", "--hf_token", "hf_secret", "--lr", "1", "--lr", "2")
    done = amphora("train", *words, cwd=data)
    assert done.returncode == 2 and not (data / "runs").exists()
    for part in ("ticket.csv does not exist: it was given as train data. Did you mean tickets.csv?",
                 "none does not exist", "--lr is given twice", "HF_TOKEN"):  # fmt: skip
        assert part in done.stderr, done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    for words, message in (
        (["tickets.csv", "--test", "a.csv", "b.csv"], "'b.csv' follows the path of --test"),
        (["tickets.csv", "--model", "./none"], "not a folder"),
        (["tickets.csv", "--model", str(data / "bert" / "config.json")], "not a folder"),
        ([str(data / "code"), "--out", str(data / "code" / "run")], "is inside the data"),
    ):
        with pytest.raises(ConfigError, match=message):
            local_job.read_words(words, {})
    kept = data / "mine" / "input" / "data" / "train"
    kept.mkdir(parents=True)
    (kept / "rows.csv").write_text("text,label\n")
    job = local_job.read_words([str(data / "tickets.csv"), "--out", str(data / "mine")], {})
    with pytest.raises(ConfigError, match="holds data that"):
        local_job.write_tree(job)
    assert (kept / "rows.csv").exists()
    monkeypatch.chdir(data)
    for words in (("serve", "code"), ("predict", "code", "no.csv", "--out", "a.csv"),
                  ("predict", "code", "tickets.csv", "--out", "a.xlsx"),
                  ("predict", "code", "tickets.csv", "--out", "./tickets.csv"),
                  ("serve", "code/none"), ("quantize", "bert"),
                  ("quantize", "--max_flips", "0.1", "bert")):  # fmt: skip
        assert main(words) == 2
    for names, message in (
        (("bart", "tickets.csv"), r"bart does not exist\. Did you mean bert\?"),
        (("bert", "ticket.csv"), r"ticket.csv is not a file\. Did you mean tickets.csv\?"),
    ):
        with pytest.raises(ConfigError, match=message):
            file_answers.predict(*map(Path, names), Path("a.csv"), None)
    with pytest.raises(SystemExit, match="2"):
        main(("serve", "bert", "more", "words"))


def test_a_name_on_the_hub_is_served_and_a_misspelled_path_is_not(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from amphora.serving.http import server

    served: list[str] = []
    monkeypatch.setattr(server, "serve", lambda base, env: served.append(env["HF_MODEL_ID"]) or 0)
    monkeypatch.chdir(data)
    assert main(["serve", "BAAI/bge-small-en-v1.5"]) == 0
    assert main(["serve", "code/bge"]) == main(["serve", "./a/b/c"]) == main(["serve", "a"]) == 2
    assert served == ["BAAI/bge-small-en-v1.5"]


def test_doctor_checks_a_command_line_and_leaves_nothing(data: Path) -> None:
    header = "import sys, json\nprint('loading the model: 10 s so far')\nprint('other')\n"
    line = '{"level": "ok", "what": "seen", "detail": \' \'.join(sys.argv[3:])}'
    (data / "code" / "check.py").write_text(f"{header}print('amphora-check', json.dumps({line}))\n")
    words = ("doctor", "tickets.csv", "--model", "a/name", "--json", "--epochs", "2")
    done = amphora(*words, cwd=data, AMPHORA_CODE_DIR=str(data / "code"))
    seen = {finding["what"]: finding["detail"] for finding in json.loads(done.stdout)["findings"]}
    assert "loading the model: 10 s so far\n" in done.stderr and "other" not in done.stderr
    assert seen["seen"] == "--epochs 2 --model_name_or_path a/name", done.stderr
    assert seen["channel train"].endswith("(train)")
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
            expected = str({"text": row["subject"], "text_pair": row["body"]})
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


@pytest.mark.parametrize(
    ("name", "content", "columns", "expected"),
    [
        ("a.csv", "id;body\n1;a, b\n", ["body"], ["a, b"]),
        ("a.csv", '\ufeffbody|id\n"a\nb"|1\n\n c|2\n', ["body"], ["a\nb", " c"]),
        ("a.tsv", "x\tbody\n1\ta;b\n", ["body"], ["a;b"]),
        ("a.CSV", "body,head\n1,2\n", ["head", "body"], [{"text": "2", "text_pair": "1"}]),
        ("a.jsonl", '{"inputs": "a"}\n"b"\n', ["body"], "without 'inputs'"),
        ("a.jsonl", '"a"\n\n"b"\n', ["body"], ["a", "b"]),
        ("a.txt", "a\n\nb", ["body"], ["a", "", "b"]),
        ("a.txt", "a\n", ["head", "body"], "not head, body"),
        # No column other than those of the training, and no first text as a header.
        ("a.csv", "id,text\n1,a\n", ["body"], "--text_column text"),
        ("a.csv", "id,titre,avis\n1,Bon,Je le recommande\n", ["body"], "--text_column avis"),
        ("a.csv", "the first text\nthe second\n", ["body"], "not body"),
        ("a.csv", "the first text\nthe second\n", [], "not text"),
        ("a.csv", "body,body\n1,2\n", ["body"], "two columns have one name"),
        ("a.csv", "body,id\n1,2\n3\n", ["body"], "line 3"),
        ("a.csv", "body,predicted_label\n1,2\n", ["body"], "'predicted_label'"),
        ("a.jsonl", '{"body": "a"}\n{"id": 1}\n', ["body"], "without 'body'"),
        ("a.jsonl", '{"body": "\\ud800"}\n', ["body"], "line 1"),
        ("a.csv", b"body,id\nK\xf6ln,1\n", ["body"], "UTF-8"),
        ("a.csv.gz", b"\x1f\x8b\x08\x00", ["body"], "whole file"),
        ("a.xlsx", "body\n", ["body"], "'.xlsx'"),
    ],
)
def test_only_the_columns_of_the_training_are_answered(
    tmp_path: Path, name: str, content: str | bytes, columns: list[str],
    expected: list[object] | str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from amphora.local import file_answers

    sent: list[object] = []
    monkeypatch.setattr(
        file_answers, "_answer", lambda _, rows, record, *args: sent.extend(map(record, rows))
    )
    monkeypatch.setattr(file_answers, "_read_answers", lambda part, mark: [])
    monkeypatch.setattr(
        file_answers, "_write", lambda out, *args: (tmp_path / "o.csv.part").touch()
    )
    (tmp_path / "config.json").write_text(json.dumps({"text_columns": columns}))
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            file_answers.predict(tmp_path, file, tmp_path / "o.csv", None)
    else:
        assert file_answers.predict(tmp_path, file, tmp_path / "o.csv", None) == 0
        assert sent == [{"inputs": value} for value in expected]


@pytest.mark.parametrize(
    ("trained", "row", "expected"),
    [
        ({"question": "q", "context": "c"}, {"c": "1", "q": "2"}, {"question": "2", "context": "1"}),
        ({"question": "q", "choices": ["e0", "e1"]}, {"q": "a", "e1": "c", "e0": "b"},
         {"question": "a", "choices": ["b", "c"]}),
        ({"source": "translation.en"}, {"translation": {"en": "a", "de": "b"}}, "a"),
        ({"messages": "q"}, {"q": "a"}, [{"role": "user", "content": "a"}]),
        ({"messages": "q", "system": "s"}, {"q": [{"role": "user", "content": "a"}], "s": "b"},
         [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]),
        ({"messages": "q", "system": "s"}, {"q": "a", "s": None}, [{"role": "user", "content": "a"}]),
        ({"image": "photo"}, {"photo": "a.png"}, base64.b64encode(b"pixels").decode()),
        # A prompt by a template is none of the columns.
        ({"prompt": "instruction", "input": "input"}, {"instruction": "a", "input": "b"}, None),
        ({}, {"text": "a"}, "a"),
    ],
)  # fmt: skip
def test_a_request_has_the_columns_of_its_task(
    tmp_path: Path, trained: dict[str, object], row: dict[str, object], expected: object
) -> None:
    from amphora.local import file_answers

    (tmp_path / "a.png").write_bytes(b"pixels")
    (tmp_path / "config.json").write_text(json.dumps({"trained_task": {"columns": trained}}))
    rows = [{"id": "1", **row}]
    if expected is None:
        with pytest.raises(ConfigError, match="made of several columns"):
            file_answers._record_of(rows, tmp_path, None, tmp_path / "rows.jsonl")
        return
    record = file_answers._record_of(rows, tmp_path, None, tmp_path / "rows.jsonl")
    assert record(rows[0]) == {"inputs": expected}


def test_answers_of_a_task_have_the_same_columns_in_each_row(tmp_path: Path) -> None:
    from amphora.local.file_answers import _write

    entity = {"entity": "PER", "score": 0.5}
    answers = ([entity], [], {"choice": "ä", "scores": [1, 2]}, [{"generated_text": "b"}])
    _write(tmp_path / "o.csv", [{"text": "a"}] * 4, answers)
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    assert [json.loads(row["prediction"]) for row in rows[:2]] == [[entity], []]
    assert (rows[2]["predicted_choice"], rows[2]["predicted_scores"]) == ("ä", "[1, 2]")
    assert rows[3]["predicted_generated_text"] == "b"


def test_a_stopped_predict_stops_its_server_and_continues(data: Path) -> None:
    (data / "bert" / "code").mkdir()
    slow = "def predict_fn(data, model):\n    import time; time.sleep(0.2)\n    return"
    code = HANDLERS.replace("def predict_fn(data, model):\n    return", slow)
    (data / "bert" / "code" / "inference.py").write_text(code)
    (data / "rows.txt").write_text("".join(f"{number}\n" for number in range(2_000)))
    command = [sys.executable, "-m", "amphora", "predict", "bert", "rows.txt", "--out", "o.csv"]
    part = data / "o.csv.part"
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)):
        with subprocess.Popen(
            command, cwd=data, env=clean_environ(), start_new_session=True, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            before = part.stat().st_size if part.exists() else 0
            while not part.exists() or part.stat().st_size < before + 100:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            # Its end closes stderr, which the server and its workers share.
            _, log = process.communicate(timeout=60)
            assert process.returncode == code, log
    assert "the same command continues" in log and "continuing" in log
    assert 64 < len(part.read_bytes().splitlines()) < 2_000


def test_hyperparameters_are_shown_by_group(preloaded: Mapping[str, str]) -> None:
    shown = amphora("train", "--help", cwd=Path(__file__).parent, **preloaded).stdout
    positions = [
        shown.index(part) for part in ("usage:", "Model, such as", "--lora_r", "Columns, such as")
    ]
    assert positions == sorted(positions)


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
    command = f"{sys.executable} -m amphora report a b | head -0"
    piped = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True,
                           check=False, env=clean_environ())  # fmt: skip
    assert "Traceback" not in piped.stderr
    (tmp_path / "b" / "output" / "data" / "metrics.json").unlink()
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "b has no output/data/metrics.json" in capfd.readouterr().err
