"""Log lines of phases that take long."""

import time

import pytest

from recipe import console
from recipe.console import Progress
from tests.support.until import until


def test_a_long_phase_says_how_far_it_is(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPHORA_TERMINAL", "1")
    shown = ""

    def is_logged(line: str) -> bool:
        nonlocal shown
        shown += capfd.readouterr().out
        return line in shown

    with Progress("tokenizing", 40) as progress:
        progress.done = 30
        until(lambda: is_logged("tokenizing: 30 of 40 rows (75 %)\n"), 60, shown)
    monkeypatch.setattr(console, "_LOG_SECONDS", 0.05)  # not of a bar, which has a total
    with Progress("loading"):
        until(lambda: is_logged("loading: "), 60, shown)
    monkeypatch.setattr(console, "_LOG_SECONDS", 0.5)
    with Progress("saving"):  # is silent while others speak
        for _ in range(100):
            console.say("another line")
            time.sleep(0.01)
    assert not is_logged("saving")
    monkeypatch.undo()
    # Other processes are silent; and without a terminal a short phase is.
    monkeypatch.setenv("RANK", "1")
    with Progress("evaluation", 40) as other:
        assert not other._thread.is_alive()
    monkeypatch.delenv("AMPHORA_TERMINAL", raising=False)
    monkeypatch.setenv("RANK", "0")
    with Progress("evaluation", 40) as quiet:
        quiet.done = 40
    assert not quiet._thread.is_alive() and "evaluation" not in shown + capfd.readouterr().out
