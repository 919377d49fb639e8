"""AMPHORA_STALL_SECONDS: ranks that wait for each other end, and the text says for whom."""

from __future__ import annotations

import time

import pytest

from amphora.common.errors import ConfigError
from amphora.training.limits import STALL_SECONDS, Limits
from amphora.training.stalls import describe
from amphora.training.verdict import Place, Word, judge
from tests.support.job_tree import Tree

WAITS = Place(0, "algo-1", "all_reduce", "train at /opt/ml/code/train.py:7")
ABSENT = Place(1, "algo-2", "", "load at /opt/ml/code/train.py:3")


class TestDescribe:
    def test_who_is_waited_for_comes_first(self) -> None:
        assert describe([WAITS, ABSENT], 900).splitlines()[:2] == [
            "Stalled: rank 1 on algo-2 has not arrived: it is in load at /opt/ml/code/train.py:3.",
            "rank 0 on algo-1 waits in all_reduce, called from train at /opt/ml/code/train.py:7.",
        ]

    def test_ranks_in_different_calls(self) -> None:
        text = describe([WAITS, WAITS._replace(rank=1, call="barrier")], 900)
        assert "They wait for each other in different calls." in text

    def test_ranks_in_the_same_call(self) -> None:
        text = describe([WAITS, WAITS._replace(rank=1)], 900)
        assert text.startswith("Stalled: ranks 0, 1 on algo-1 wait in all_reduce")
        assert "a rank has ended, or a connection hangs" in text

    def test_many_ranks_take_one_line(self) -> None:
        places = [WAITS._replace(rank=rank, host=f"algo-{rank // 8}") for rank in range(512)]
        text = describe([*places, ABSENT._replace(rank=512)], 900)
        assert len(text) < 1024
        assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more on 64 hosts wait in all_reduce" in text


def running(host: str, *places: Place) -> Word:
    return Word(host=host, state="running", places=places)


class TestJudge:
    HOSTS = ("algo-1", "algo-2")

    def decide(self, *words: Word, restarts: int = 0) -> Word | None:
        said = {word.host: word for word in words}
        return judge(said, self.HOSTS, 0, restarts, lambda places: f"{len(places)} ranks")

    def test_all_hosts_must_have_stalled(self) -> None:
        assert self.decide(running("algo-1", WAITS), running("algo-2")) is None
        assert self.decide(running("algo-1", WAITS)) is None
        decision = self.decide(running("algo-1", WAITS), running("algo-2", ABSENT))
        assert decision is not None and (decision.state, decision.reason) == ("stall", "2 ranks")

    def test_a_host_that_is_done_is_not_waited_for(self) -> None:
        done = Word(host="algo-2", state="done")
        decision = self.decide(running("algo-1", WAITS), done)
        assert decision is not None and decision.state == "stall"

    def test_a_stop_goes_before(self) -> None:
        stopped = Word(host="algo-2", state="stopped")
        assert self.decide(running("algo-1", WAITS), stopped) is None

    def test_a_stall_is_a_fault(self) -> None:
        words = (running("algo-1", WAITS), running("algo-2", ABSENT))
        decision = self.decide(*words, restarts=1)
        assert decision is not None and (decision.state, decision.attempt) == ("restart", 1)


def test_the_bound() -> None:
    assert Limits.of({}, is_recipe=True).stall_seconds == STALL_SECONDS
    assert Limits.of({}).stall_seconds == 0
    assert Limits.of({"AMPHORA_STALL_SECONDS": "0"}, is_recipe=True).stall_seconds == 0
    with pytest.raises(ConfigError, match="AMPHORA_STALL_SECONDS is '-1'"):
        Limits.of({"AMPHORA_STALL_SECONDS": "-1"})


def test_a_script_that_sleeps_for_ever(scripted: Tree) -> None:
    scripted.script("import time\ndef step():\n    time.sleep(80)\nprint('in', flush=True)\nstep()")
    started = time.monotonic()
    result = scripted.train(AMPHORA_STALL_SECONDS="1")
    assert result.returncode == 1 and time.monotonic() - started < 60
    shown = (scripted.failure or "")[:1024]
    script = scripted.base / "code" / "script.py"
    assert shown.startswith(f"Stalled: rank 0 on algo-1 is in step at {script}:3.\n"), shown
    assert f'File "{script}", line 3 in step' in result.stderr  # The stack.


@pytest.mark.parametrize(
    "moves",
    {
        "computes": "while time.monotonic() < end: pass",
        "has a child compute": (
            "child = subprocess.Popen([sys.executable, '-S', '-c', 'while True: pass'])\n"
            "time.sleep(5)\nchild.kill()"
        ),
        "touches its file": (
            "while time.monotonic() < end: time.sleep(0.2); os.utime(os.environ['AMPHORA_PROGRESS_FILE'])"
        ),
        "goes from line to line": "\n".join(["time.sleep(0.3)"] * 17),
    }.items(),
    ids=lambda case: case[0],
)
def test_a_long_phase_that_moves_is_no_stall(scripted: Tree, moves: tuple[str, str]) -> None:
    scripted.script(
        f"import os, subprocess, sys, time\nend = time.monotonic() + 5\n{moves[1]}\nprint('whole')"
    )
    result = scripted.train(AMPHORA_STALL_SECONDS="2")
    assert result.returncode == 0 and "whole" in result.stdout, result.stderr


def test_a_script_that_has_become_another_program_gets_no_signal(scripted: Tree) -> None:
    scripted.script("import os\nos.execvp('sleep', ['sleep', '3'])")
    assert scripted.train(AMPHORA_STALL_SECONDS="5").returncode == 0


def test_one_rank_is_waited_for(scripted: Tree) -> None:
    """Two processes, of which one sleeps in a step for ever."""
    scripted.script(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "def step():\n"
        "    if dist.get_rank() == 1: time.sleep(300)\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "step()\n"
    )
    result = scripted.train(AMPHORA_NPROC_PER_NODE="2", AMPHORA_STALL_SECONDS="3")
    assert result.returncode == 1, result.stderr
    shown = (scripted.failure or "")[:1024]
    script = scripted.base / "code" / "script.py"
    assert f"Stalled: rank 1 on algo-1 has not arrived: it is in step at {script}:4." in shown
    assert f"rank 0 on algo-1 waits in all_reduce, called from step at {script}:5." in shown
    assert "rank 0 on algo-1 (process" in result.stderr and "in all_reduce" in result.stderr
