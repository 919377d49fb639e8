"""Generated files are what their programs make: docs/REFERENCE.md, tables, and the drawings."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "import json, runpy; print(json.dumps(runpy.run_path('docs/reference.py')['pages']()))"


def test_the_pages_are_what_the_code_says() -> None:
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for path, text in json.loads(made).items():
        assert (ROOT / path).read_text() == text, "run: .venv/bin/python docs/reference.py"
        assert "text-classification" in text


def test_the_drawings_are_what_the_program_draws() -> None:
    drawings = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["DRAWINGS"]
    assert len(drawings) >= 4
    for name, draw in drawings.items():
        committed = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
        assert committed == draw().text(), "run: .venv/bin/python docs/diagrams.py"
