from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import recipe

FOLDER = Path(recipe.__file__).parent


def floors() -> dict[str, int]:
    """Module to floor, as the package's docstring tells it."""
    entries = re.split(r"\n- (\d) ", recipe.__doc__ or "")[1:]
    pairs = zip(entries[::2], entries[1::2], strict=True)
    return {name: int(floor) for floor, text in pairs for name in re.findall(r"`(\w+)`", text)}


def imported(path: Path) -> set[str]:
    """Modules of the package that `path` imports, and the name of every other package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("recipe.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "recipe":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").removeprefix("recipe."))
    return names


def test_every_module_has_a_floor_and_imports_lower_ones_only() -> None:
    known = floors()
    modules = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert set(modules) == set(known)
    for name, path in modules.items():
        for other in imported(path) & set(known):
            assert known[other] < known[name], f"{name} imports {other}"


def test_the_recipe_knows_nothing_of_the_container() -> None:
    for path in FOLDER.parent.rglob("*.py"):
        assert not any(name.split(".")[0] == "amphora" for name in imported(path)), path


def test_serving_does_not_load_what_only_training_needs() -> None:
    heavy = "datasets evaluate pandas pyarrow"
    check = f"import sys, inference; print(set('{heavy}'.split()) & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", check],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"
