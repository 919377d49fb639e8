"""The short form of each campaign, as `make ordeal ARGS=--short` runs it."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ordeal import licences
from ordeal.common import CAMPAIGNS, Trial

ROOT = Path(__file__).resolve().parents[2]
LONG = ("disk", "kill", "drain", "soak", "load", "models", "ranks")
"""Half a minute and more, even in short. A lost rank is also in tests/contract and test_hosts.py."""
QUICK = tuple(name for name in CAMPAIGNS if name not in LONG)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, str]]:
    """outcome(names): the results and the output of some campaigns, run once in one process."""

    @functools.cache
    def outcome(names: Sequence[str]) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("ordeal")
        command = [sys.executable, "-m", "ordeal", "--only", ",".join(names), "--short"]
        command += ["--out", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
        return folder, done.stdout[-6000:] + done.stderr[-3000:]

    return outcome


@pytest.mark.heavy
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("name", "others"),
    [
        *((name, QUICK) for name in QUICK),
        *(pytest.param(name, LONG, marks=pytest.mark.long) for name in LONG),
    ],
)
def test_what_is_promised_holds(
    name: str, others: Sequence[str], outcome: Callable[..., tuple[Path, str]]
) -> None:
    folder, output = outcome(others)
    assert (folder / f"{name}.json").exists(), output
    promises = json.loads((folder / f"{name}.json").read_text())["promises"]
    assert promises and all(times and not broken for times, broken in promises.values()), output


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


def test_the_licences_page_names_what_the_locks_name() -> None:
    page = (ROOT / "docs" / "LICENSES.md").read_text()
    named = set(re.split(r"[,:\s]+", page))
    missing = [name for name in licences.locked() if name not in named]
    assert missing == [], "run `make licences`"
