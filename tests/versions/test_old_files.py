"""Files for transformers 4 are served by the image with it; by the one with 5 as well, or they are
refused with what to write instead (`make test-versions`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.versions import old_files

HERE = Path(__file__).parent
PYTHON_4 = HERE.parents[1] / "build" / "versions" / "4.57" / "bin" / "python"


def outcomes(python: Path | str, folder: Path) -> tuple[str, list[str]]:
    done = subprocess.run(
        [python, HERE / "old_files.py", folder], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    return actual["transformers"], actual["outcomes"]


@pytest.mark.versions
def test_version_4_serves_each_file(tmp_path: Path) -> None:
    version, actual = outcomes(PYTHON_4, tmp_path)
    assert version.startswith("4.") and len(actual) == len(old_files.FILES) >= 30
    assert [line for line in actual if not line.startswith("answer: ")] == []


@pytest.mark.versions
def test_version_5_serves_each_file_or_names_the_line_and_both_remedies(tmp_path: Path) -> None:
    version, actual = outcomes(sys.executable, tmp_path)
    assert version.startswith("5.")
    for (_, code, words), outcome in zip(old_files.FILES, actual, strict=True):
        if words:
            assert words in outcome and "--transformers 4" in outcome, code
            assert "inference.py, line " in outcome, code
        else:
            assert outcome.startswith("answer: "), code
