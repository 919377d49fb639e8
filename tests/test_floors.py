"""The structure that docs/ARCHITECTURE.md draws, held by the imports themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "container" / "amphora"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))


def floors() -> dict[str, int]:
    """Module to floor, from the table in docs/ARCHITECTURE.md: rows of `| 0 | `errors`, ... |`."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", text, re.MULTILINE)
    return {name: int(floor) for floor, names in rows for name in re.findall(r"`(\w+)`", names)}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_lower_floors(module: str) -> None:
    floor = floors()
    names = {name.split(".")[1] for name in imports(PACKAGE / f"{module}.py") if "amphora." in name}
    for name in names & set(MODULES):
        assert floor[name] < floor[module], f"{module} (floor {floor[module]}) imports {name}"


def test_the_drawing_names_every_module_once() -> None:
    assert sorted(floors()) == MODULES


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_the_package_knows_no_model_library(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & {"torch", "transformers", "datasets", "recipe", "train", "inference"}


@pytest.mark.parametrize("path", sorted((ROOT / "code").rglob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_knows_no_container(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] == "amphora"]


def test_code_is_no_package() -> None:
    assert not (ROOT / "code" / "__init__.py").exists()
