"""A run of tests fails for a test that fails twice, and for tests that are all skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.reruns import ALONE, MOST_RERUNS

# The second meets what the first has left in their process; the third's fixture fails in company.
COMPANY = (
    "import os, pytest\n"
    "def test_leaves(): os.environ['LEFT'] = 'here'\n"
    "def test_meets_it(): assert 'LEFT' not in os.environ\n"
    "@pytest.fixture\ndef company():\n    yield\n    assert 'RERUN_LOG' not in os.environ\n"
    "def test_after(company): pass\n"
)
FAILS = "def test_fails(): assert 1 == 2\n"
SKIPS = "import pytest\ndef test_skips(): pytest.skip('no engine here')\n"
MANY = (
    f"import os, pytest\n@pytest.mark.parametrize('number', range({MOST_RERUNS + 1}))\n"
    "def test_it(number): assert 'RERUN_LOG' not in os.environ\n"
)


@pytest.mark.parametrize(
    ("tests", "workers", "code", "end", "alone"),
    [
        pytest.param(COMPANY + SKIPS, 2, 0, "2 passed, 1 skipped, 2 passed only when alone in", 2, id="company"),
        pytest.param(COMPANY + FAILS, 0, 1, "1 failed, 2 passed, 2 passed only when alone in", 2, id="a fault too"),
        pytest.param(MANY, 0, 1, f"{MOST_RERUNS + 1} failed in", 0, id="many failures"),
        pytest.param("import nowhere\n", 2, 1, "1 error in", 0, id="not imported"),
        pytest.param(SKIPS, 2, 1, "Every test was skipped", 0, id="all skipped"),
    ],
)  # fmt: skip
def test_the_end_of_a_run(
    tmp_path: Path, tests: str, workers: int, code: int, end: str, alone: int
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "conftest.py").write_text("from tests.support.reruns import *\n")
    (tmp_path / "test_it.py").write_text(tests)
    log = tmp_path / "log"
    environ = {
        "RERUN_LOG": str(log),
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    options = [
        "--durations=5",
        *(["-p", "xdist", "-n", str(workers), "--dist", "loadfile"] if workers else []),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=os.environ | environ,
        text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert (done.returncode, end in done.stdout) == (code, True), done.stdout
    names = [f"test_it.py::test_{name}" for name in ("meets_it", "after")[:alone]]
    assert (log.read_text().split() if log.exists() else []) == names
    assert [f"{ALONE}: {name}" in done.stdout for name in names] == [True] * alone
    assert " s test_it.py\n" in done.stdout or "1 error" in end
