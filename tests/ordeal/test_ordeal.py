"""The short form of each campaign, as `make ordeal ARGS=--short` runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ordeal.common import CAMPAIGNS, Trial

from ordeal import licences

ROOT = Path(__file__).resolve().parents[2]
LONG = ("disk", "kill", "drain", "soak", "load")
"""Half a minute and more, even in short."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ordeal", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=450)


@pytest.mark.heavy
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(campaign, marks=[pytest.mark.long] * (campaign in LONG))
        for campaign in CAMPAIGNS
    ],
)
def test_what_is_promised_holds(name: str, tmp_path: Path) -> None:
    done = run("--only", name, "--short", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def test_a_broken_promise_and_an_untried_one_are_told(tmp_path: Path) -> None:
    trial = Trial.begin("x", ["kept", "broken", "untried"], tmp_path / "x", 1, True)
    trial.check("kept", True)
    trial.check("broken", False, "because")
    assert not trial.held
    lines = trial.table().splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["held", "BROKEN", "UNTRIED"]
    trial.promises.pop("broken")
    assert not trial.held
    trial.check("untried", True)
    assert trial.held


def test_an_unknown_campaign_is_named() -> None:
    done = run("--only", "kil")
    assert done.returncode == 1
    assert "no campaign kil" in done.stderr


def test_the_licences_page_names_what_the_locks_name() -> None:
    page = (ROOT / "docs" / "LICENSES.md").read_text()
    named = set(re.split(r"[,:\s]+", page))
    missing = [name for name in licences.locked() if name not in named]
    assert missing == [], "run `make licences`"
