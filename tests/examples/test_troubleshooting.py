"""Each failure and each code that docs/TROUBLESHOOTING.md quotes is one of the code's.

tests/amphora and tests/recipe provoke the failures.
"""

import ast
import re
from pathlib import Path


def test_what_the_page_quotes_is_what_the_code_writes() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "TROUBLESHOOTING.md").read_text()
    texts = []
    for path in [*(root / "container").rglob("*.py"), *(root / "code").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                texts += map(str, parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    quoted = re.findall(r"^- `([^`]+)`", page, re.MULTILINE)
    assert len(quoted) >= 25
    absent = [
        (part, quote)
        for quote in quoted
        for part in map(str.strip, quote.split("..."))
        if not any(part in text for text in texts)
    ]
    assert absent == []
    codes = re.findall(r"^\| \d+ `(\w+)` \|", page, re.MULTILINE)
    assert len(codes) >= 8
    assert set(codes) <= set(texts)
