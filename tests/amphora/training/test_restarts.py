"""AMPHORA_MAX_RESTARTS: faults are answered by a restart, a script's own exceptions are not."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from amphora.common.errors import ConfigError
from amphora.training import failure
from amphora.training.failure import Ended, Raised, Record
from amphora.training.limits import Limits
from amphora.training.verdict import CAUSE_SECONDS, Report, judge
from tests.support.job_tree import Tree, wait_for

# Counts its starts in a file, and says which it is.
COUNTING = (
    "import os, pathlib, signal, sys\n"
    "count = pathlib.Path(os.environ['SM_MODEL_DIR'], 'starts-' + os.environ.get('RANK', '0'))\n"
    "count.write_text(count.read_text() + 'x' if count.exists() else 'x')\n"
    "start = len(count.read_text())\n"
    "print('start', start, 'after', os.environ.get('AMPHORA_RESTART_COUNT', '0'))\n"
)
KILLED = "os.kill(os.getpid(), signal.SIGKILL)\n"


def starts(tree: Tree, rank: int = 0) -> int:
    return len((tree.base / "model" / f"starts-{rank}").read_text())


def test_a_killed_script_goes_on(scripted: Tree) -> None:
    scripted.script(COUNTING + "if start < 3: " + KILLED)
    result = scripted.train(AMPHORA_MAX_RESTARTS="2")
    assert result.returncode == 0, result.stderr
    assert scripted.failure is None
    assert "start 3 after 2" in result.stdout
    assert (
        "restart 2 of 2, from the last checkpoint: on algo-1: The script was killed by SIGKILL"
        in (result.stderr)
    )
    assert "restarts used: 2 of 2" in result.stderr


def test_restarts_come_to_an_end(scripted: Tree) -> None:
    scripted.script(COUNTING + KILLED)
    result = scripted.train(AMPHORA_MAX_RESTARTS="1")
    assert (result.returncode, starts(scripted)) == (137, 2)
    shown = (scripted.failure or "")[:1024]
    assert shown.startswith("The script was killed by SIGKILL")
    assert "restarts used: 1 of 1 (AMPHORA_MAX_RESTARTS)" in shown


@pytest.mark.parametrize(
    "ends", ["raise ValueError('mine')", "sys.exit(3)", "os._exit(137)", "raise KeyboardInterrupt"]
)
def test_what_the_script_does_itself_is_final(scripted: Tree, ends: str) -> None:
    scripted.script(COUNTING + ends)
    result = scripted.train(AMPHORA_MAX_RESTARTS="3")
    assert result.returncode != 0 and starts(scripted) == 1, result.stderr
    assert "restarts used: 0 of 3" in (scripted.failure or "")


def test_without_the_variable_nothing_starts_again(scripted: Tree) -> None:
    scripted.script(COUNTING + KILLED)
    assert scripted.train().returncode == 137
    assert starts(scripted) == 1 and "restart" not in (scripted.failure or "")


def test_a_stop_is_no_fault(scripted: Tree) -> None:
    scripted.script(COUNTING + "import time\npathlib.Path('ready').touch()\ntime.sleep(60)")
    process = scripted.start(AMPHORA_MAX_RESTARTS="3")
    wait_for(scripted.base / "code" / "ready")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert starts(scripted) == 1


def test_torchruns_ranks_start_again_together(scripted: Tree) -> None:
    scripted.script(
        COUNTING
        + "if os.environ['RANK'] == '1' and start == 1: "
        + KILLED
        + "if start == 1:\n    import time; time.sleep(60)\n"
    )
    result = scripted.train(AMPHORA_NPROC_PER_NODE="2", AMPHORA_MAX_RESTARTS="1")
    assert result.returncode == 0, result.stderr
    assert (starts(scripted, 0), starts(scripted, 1)) == (2, 2)


class TestLimits:
    @pytest.mark.parametrize("value", ["-1", "1.5", "many", "1001"])
    def test_a_bad_number_of_restarts(self, value: str) -> None:
        with pytest.raises(ConfigError, match=f"AMPHORA_MAX_RESTARTS is '{value}'"):
            Limits.of({"AMPHORA_MAX_RESTARTS": value})

    @pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e999"])
    def test_a_time_that_is_not_above_zero_is_refused(self, value: str) -> None:
        assert Limits.of({"AMPHORA_STOP_SECONDS": " 2.5 "}).stop_seconds == 2.5
        with pytest.raises(ConfigError, match=rf"STOP_SECONDS is '{value}'. Give a number of sec"):
            Limits.of({"AMPHORA_STOP_SECONDS": value})


def record(kind: str, message: str, **fields: Any) -> Record:
    values = {"time": 0.0, "pid": 1, "rank": "0", "host": None, "traceback": "", **fields}
    parent = values.pop("parent", 0)
    return Record(
        errors=[Raised(kind, message)], parents=[(values["pid"], []), (parent, [])], **values
    )


@pytest.mark.parametrize(
    ("kind", "message", "is_fault"),
    [
        ("RuntimeError", "[...gloo/transport/tcp/pair.cc:553] Connection closed by peer", True),
        ("torch.distributed.DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp", True),
        ("torch.AcceleratorError", "CUDA error: unspecified launch failure", True),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", True),
        ("RuntimeError", "nrt_execute: status NRT_EXEC_HW_ERR_NC", True),
        ("torch.AcceleratorError", "CUDA error: device-side assert triggered", False),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", False),
        ("RuntimeError", "CUDA error: out of memory", False),
        ("RuntimeError", "CUDA error: no kernel image is available for execution", False),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", False),
        ("ValueError", "labels do not fit", False),
    ],
)
def test_which_exceptions_are_faults(kind: str, message: str, is_fault: bool) -> None:
    ended = Ended(pid=1, is_script=True, exit_code=1)
    assert failure.describe(ended, [record(kind, message)]).is_fault is is_fault


def test_the_scripts_own_exception_counts_beside_those_that_lost_it() -> None:
    """torchrun's ranks: one raised, the others only lost it, and one was killed meanwhile."""
    records = [
        record("RuntimeError", "gloo: Connection closed by peer", pid=11, parent=10, time=1.0),
        record("ValueError", "mine", pid=12, parent=10, rank="1", time=2.0),
        record(
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError", "", pid=10,
            workers=[{"rank": 2, "pid": 13, "exit_code": -signal.SIGABRT, "time": 1}], time=3.0,
        ),
    ]  # fmt: skip
    ended = Ended(pid=10, is_script=False, exit_code=1)
    assert not failure.describe(ended, records).is_fault
    assert failure.describe(ended, [records[0], records[2]]).is_fault


def test_the_head_never_passes_what_is_shown() -> None:
    head = "\n".join(["ValueError: " + "w" * 900, "  at script.py:1 " + "s" * 280, "(exit code 1)"])
    shown = failure.within_shown(head)
    assert len(shown) <= 1024 and shown.endswith("(exit code 1)")
    assert "at script.py:1 " + "s" * 280 in shown
    assert failure.within_shown("short") == "short"
    assert len(failure.within_shown("\n" * 5000)) <= 1024


HOSTS = ("algo-1", "algo-2")
FAULT = Report(host="algo-2", state="failed", reason="killed", is_fault=True)
LOST = Report(host="algo-1", state="failed", reason="gloo", is_fault=True, is_consequence=True)
RAISED = Report(host="algo-2", state="failed", reason="ValueError: mine")


STOPPED = Report(host="algo-1", state="stopped")
DONE = [Report(host=host, state="done") for host in HOSTS]
AGAIN = Report(**{**vars(FAULT), "attempt": 2})


@pytest.mark.parametrize(
    ("reports", "attempt", "lost_for", "decision"),
    [
        pytest.param([FAULT], 0, 0.0, ("restart", 1, "algo-2"), id="a fault restarts all hosts"),
        pytest.param([AGAIN], 2, 0.0, ("abort", 2, "algo-2"), id="no restart is left"),
        pytest.param([FAULT], 1, 0.0, None, id="a report of an earlier attempt"),
        pytest.param([FAULT, STOPPED], 0, 0.0, ("abort", 0, "algo-2"), id="a job that is stopped"),
        pytest.param(
            [RAISED, LOST], 0, 0.0, ("abort", 0, "algo-2"), id="an exception and its loss"
        ),
        pytest.param([LOST], 0, 0.0, None, id="a lost host waits for the cause"),
        pytest.param([LOST], 0, CAUSE_SECONDS + 1, ("restart", 1, "algo-1"), id="and not for ever"),
        pytest.param(DONE[:1], 0, 0.0, None, id="one host is done"),
        pytest.param(DONE, 0, 0.0, ("all done", 0, "algo-1"), id="all hosts are done"),
    ],
)
def test_the_decision_for_all_hosts(
    reports: list[Report], attempt: int, lost_for: float, decision: tuple[str, int, str] | None
) -> None:
    running = {host: Report(host=host, state="running", attempt=attempt) for host in HOSTS}
    current = running | {report.host: report for report in reports}
    made = judge(current, HOSTS, attempt, 2, lost_for)
    assert (made and (made.state, made.attempt, made.host)) == decision
