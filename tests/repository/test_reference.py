"""docs/REFERENCE.md is what docs/reference.py makes of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "import runpy; print(runpy.run_path('docs/reference.py')['page'](), end='')"


def test_the_page_is_what_the_code_says() -> None:
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    committed = (ROOT / "docs" / "REFERENCE.md").read_text()
    assert committed == made, "run: .venv/bin/python docs/reference.py"
