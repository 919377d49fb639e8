"""The structure that docs/ARCHITECTURE.md draws, held by the imports themselves."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.support.preloading import LOADED_TO_SERVE

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "container" / "amphora", ROOT / "code" / "recipe")


def test_the_contracts_of_pyproject_hold() -> None:
    path = os.pathsep.join(str(package.parent) for package in PACKAGES)
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(
        [*command, "--no-cache"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 6 kept, 0 broken." in done.stdout


def test_the_drawing_names_every_package() -> None:
    drawing = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    for package in PACKAGES:
        for init in package.rglob("__init__.py"):
            name = str(init.parent.relative_to(package.parent)).replace(os.sep, ".")
            if name.startswith("recipe.tasks."):
                continue  # One for each task, with the modules that the drawing lists.
            assert re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", drawing), name


def test_no_folder_has_become_a_heap() -> None:
    modules = [path for package in PACKAGES for path in package.rglob("*.py")]
    counts = Counter(path.parent for path in modules if path.name != "__init__.py")
    assert max(counts.values()) <= 14, counts.most_common(3)


def test_no_two_public_modules_have_one_name() -> None:
    """Task folders have the same modules; some names mean the same thing in both packages."""
    names = Counter(
        path.stem
        for package in PACKAGES
        for path in package.rglob("*.py")
        if not path.stem.startswith("_") and path.parents[1].name != "tasks"
    )
    shared = {name for name, count in names.items() if count > 1}
    assert shared <= {"errors", "routes", "secret_rules", "settings"}


def test_the_entry_scripts_know_no_container() -> None:
    for path in (ROOT / "code").glob("*.py"):
        assert not re.search(r"^\s*(from|import) amphora\b", path.read_text(), re.MULTILINE), path


def test_code_is_no_package() -> None:
    assert not (ROOT / "code" / "__init__.py").exists()


def test_serving_does_not_load_what_only_training_needs(preloaded: Mapping[str, str]) -> None:
    loaded = Path(preloaded["PRELOADING_SOCKET"]).with_name(LOADED_TO_SERVE).read_text().split()
    assert {"torch", "recipe.inference.registry"} <= set(loaded)
    assert not {"datasets", "evaluate", "pandas", "pyarrow"} & set(loaded)
