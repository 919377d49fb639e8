"""docs/TROUBLESHOOTING.md quotes what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
QUOTED = re.findall(r"^- `([^`]+)`", PAGE, re.MULTILINE)
CODES = re.findall(r"^\| \d+ `(\w+)` \|", PAGE, re.MULTILINE)


def texts() -> str:
    """Every string of the code, with what it inserts left out."""
    found = []
    for path in [*(ROOT / "code").rglob("*.py"), *(ROOT / "container" / "amphora").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


TEXTS = texts()


@pytest.mark.parametrize("text", QUOTED)
def test_a_quoted_text_is_one_of_the_code(text: str) -> None:
    for part in text.split("..."):
        assert part.strip() in TEXTS, part


def test_there_are_enough_and_every_code_exists() -> None:
    assert len(QUOTED) >= 25
    assert len(CODES) >= 8
    assert all(code in TEXTS for code in CODES)
