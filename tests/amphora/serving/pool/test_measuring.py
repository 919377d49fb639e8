"""Workers and threads by measurement, of handlers of which it is known which layout is faster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from amphora.serving.pool.measuring import Layout, layouts
from amphora.serving.settings import Measure
from tests.support.servers import NAMED, Running, Start, write_model

# A call takes as long for 32 requests as for one. `LOCKED`: of all workers one predicts at a time, and
# one that has waited for another takes ten times as long, so that two of them answer so much less that
# no load of the machine makes up for it; else they answer as much, or more.
SLEEPING = """
    import fcntl, json, os, time

    def model_fn(model_dir):
        return model_dir

    def input_fn(body, content_type):
        text = json.loads(body)
        if text == "wrong":
            raise ValueError("no such text")
        return text

    def predict_batch_fn(texts, model):
        seconds = float(os.environ.get("CALL_SECONDS", "0.02"))
        with open(os.environ["LOCK"], "w") as lock:
            if os.environ.get("LOCKED"):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    seconds *= 10
            time.sleep(seconds)
        return [[text, os.getpid()] for text in texts]

    def predict_fn(text, model):
        return predict_batch_fn([text], model)[0]

    def describe_fn(model_dir, model):
        return {"examples": json.loads(os.environ.get("EXAMPLES", '["a", "b c"]'))}

    def output_fn(prediction, accept):
        return json.dumps(prediction)
"""
SAYS = "Workers x threads:"


@pytest.fixture
def measured(start: Start, tmp_path: Path) -> Start:
    """A server that measures, with a folder for temporary files of its own."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU can be shared in one way only")

    def _start(code: str = SLEEPING, **environ: str) -> Running:
        usual = {
            "AMPHORA_WORKERS": "measure",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "",
            "SAGEMAKER_TS_MAX_WORKERS": "2",
            "LOCK": str(tmp_path / "lock"),
            "TMPDIR": str(tmp_path),
            "OMP_NUM_THREADS": "",
        }
        return start(code, **{**usual, **environ})

    return _start


def outcome(server: Running) -> str:
    """What the log says of the layout."""
    (line,) = [line for line in server.ready().log.splitlines() if SAYS in line]
    return line.split(SAYS)[1].strip()


@pytest.mark.parametrize(
    ("usual", "least", "most", "cpus", "threads", "expected"),
    [
        ((1, 1), 1, 1, 1, None, ["1 x 1"]),
        ((2, 1), 1, 2, 2, None, ["2 x 1", "1 x 2"]),
        ((6, 1), 1, 6, 6, None, ["6 x 1", "3 x 2", "1 x 6"]),
        ((16, 1), 1, 16, 16, None, ["16 x 1", "8 x 2", "4 x 4", "2 x 8", "1 x 16"]),
        ((16, 1), 3, 16, 16, None, ["16 x 1", "8 x 2", "4 x 4"]),
        ((4, 4), 1, 4, 16, None, ["4 x 4", "2 x 8", "1 x 16"]),
        ((16, 4), 1, 16, 16, 4, ["16 x 4", "4 x 4", "2 x 4", "1 x 4"]),
        ((8, 1), 8, 8, 2, None, ["8 x 1"]),
    ],
)
def test_layouts_share_the_cpus_within_the_bounds(
    usual: tuple[int, int], least: int, most: int, cpus: int, threads: int | None,
    expected: list[str],
) -> None:  # fmt: skip
    measure = Measure(
        least=least, most=most, cpus=cpus, threads=threads, clients=32, requests=""
    )  # fmt: skip
    assert [str(each) for each in layouts(Layout(*usual), measure)] == expected


@pytest.mark.heavy
def test_the_faster_layout_is_taken_and_kept(measured: Start, tmp_path: Path) -> None:
    server = measured(LOCKED="1")
    assert outcome(server).startswith("1 x ")
    assert len({server.invoke(text).json()[1] for text in "abcdefgh"}) == 1
    (file,) = tmp_path.glob("amphora-*/workers-*.json")
    assert json.loads(file.read_text())["workers"] == 1
    # Those of the turns have ended: the process that loaded the model has one child.
    server.wait_for_workers(1)
    assert "killed" not in server.log and "Traceback" not in server.log
    server.stop()

    assert "as was measured before" in outcome(measured(LOCKED="1"))
    # Another file of the model: it may be another model.
    (tmp_path / "model" / "weights").write_text("new")
    assert "answers a second" in outcome(measured(LOCKED="1"))
    # What cannot be is not taken from the file.
    for kept in tmp_path.glob("amphora-*/workers-*.json"):
        kept.write_text(json.dumps({"workers": 77, "threads": 1}))
    assert "answers a second" in outcome(measured(LOCKED="1"))


@pytest.mark.heavy
def test_the_usual_layout_stays_where_no_other_is_faster(measured: Start) -> None:
    # A call of 8 of the 32 clients: two workers answer twice as much as one.
    server = measured(SAGEMAKER_TS_BATCH_SIZE="8")
    assert outcome(server).startswith("2 x ") and "answers a second" in outcome(server)
    server.wait_for_workers(2)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"EXAMPLES": "[]"}, "no request is known"),
        ({"EXAMPLES": '["a", "wrong"]'}, "is answered 400"),
        ({"SAGEMAKER_TS_MIN_WORKERS": "2"}, "no other way"),
        pytest.param(
            {"CALL_SECONDS": "30", "AMPHORA_MEASURE_CLIENTS": "1"},
            "a turn of 2 x ",
            marks=pytest.mark.heavy,
        ),
    ],
)
def test_what_cannot_be_measured_stays_as_it_is(
    measured: Start, environ: dict[str, str], reason: str
) -> None:
    server = measured(**environ)
    said = outcome(server)
    assert said.startswith("2 x ") and "not measured" in said and reason in said
    server.wait_for_workers(2)


def test_loaded_code_with_threads_is_not_measured(measured: Start) -> None:
    threads = """
    import threading, time
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    """
    server = measured(threads + SLEEPING)
    assert "load the model anew" in outcome(server)
    assert len({server.invoke(text).json()[1] for text in "abcdefgh"}) <= 2


def test_requests_of_a_file_are_used(measured: Start, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "requests.jsonl").write_text('"a"\n\n"b"\n')
    server = measured(EXAMPLES="[]", LOCKED="1", AMPHORA_MEASURE_REQUESTS="requests.jsonl")
    assert "measured with 32 requests" in outcome(server)


@pytest.mark.parametrize(
    ("environ", "lines", "reason"),
    [
        ({"AMPHORA_WORKERS": "3"}, '"a"', "AMPHORA_WORKERS is '3'"),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "2"}, '"a"', "Leave one of them out"),
        ({"AMPHORA_MEASURE_CLIENTS": "0"}, '"a"', "AMPHORA_MEASURE_CLIENTS is '0'"),
        ({"AMPHORA_MEASURE_REQUESTS": "absent"}, '"a"', "cannot be read"),
        ({"AMPHORA_MEASURE_REQUESTS": "requests"}, "\n", "is empty"),
        ({"AMPHORA_MEASURE_REQUESTS": "requests"}, '"a"\n"wrong"', "is answered 400"),
    ],
)
def test_what_cannot_be_meant_ends_the_server(
    measured: Start, tmp_path: Path, environ: dict[str, str], lines: str, reason: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "requests").write_text(lines)
    server = measured(**environ)
    assert server.process.wait(60) != 0
    assert reason in server.log


@pytest.mark.heavy
def test_each_of_several_models_is_measured(measured: Start, tmp_path: Path) -> None:
    server = measured(NAMED, SAGEMAKER_MULTI_MODEL="true", LOCKED="1").ready()
    code = "\n".join(line[4:] for line in SLEEPING.splitlines())
    for name in ("one", "two"):
        order = {"model_name": name, "url": write_model(tmp_path / name, code)}
        assert server.http.post("/models", json=order, timeout=120).status_code == 200
        assert server.http.post(f"/models/{name}/invoke", json="a").json()[0] == "a"
    said = [line for line in server.log.splitlines() if SAYS in line]
    assert len(said) == 2 and all(f"{SAYS} 1 x " in line for line in said)
    server.wait_for_workers(2)
