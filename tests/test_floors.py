"""The structure that docs/ARCHITECTURE.md draws, held by the imports themselves."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.preloading import LOADED_TO_SERVE
from tests.support.reruns import ALONE, MOST_RERUNS

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
    assert shared <= {"errors", "secret_rules", "settings"}


# Each task's folder has its hyperparameters, read as `spec.Options`.
SHARED_CLASSES = {"Options"}
# Public functions of one word that another module imports bare: `log`, `train`. A lower number may replace
# it, a higher one not: name the object, too (`read_column`), or import the module (`checksums.write`).
MOST_BARE_WORDS = 25


def test_a_name_says_what_it_is_without_its_module() -> None:
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for package in PACKAGES
        for path in package.rglob("*.py")
    }
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    definitions = [(name, node) for name, tree in trees.items() for node in tree.body]
    classes = Counter(node.name for _, node in definitions if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1} == SHARED_CLASSES
    words = {
        (name, node.name)
        for name, node in definitions
        if isinstance(node, ast.FunctionDef) and "_" not in node.name
    }
    imported = {
        (node.module, alias.name)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
    }
    bare = sorted(words & imported)
    assert len(bare) <= MOST_BARE_WORDS, bare


def test_nothing_below_code_imports_the_container() -> None:
    """import-linter reads recipe only: these are the entry scripts and folders of other names too."""
    for path in (ROOT / "code").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) amphora\b", path.read_text(), re.MULTILINE), path


def test_code_is_no_package() -> None:
    assert not (ROOT / "code" / "__init__.py").exists()


def test_serving_does_not_load_what_only_training_needs(preloaded: Mapping[str, str]) -> None:
    loaded = Path(preloaded["PRELOADING_SOCKET"]).with_name(LOADED_TO_SERVE).read_text().split()
    assert {"torch", "recipe.inference.registry"} <= set(loaded)
    assert not {"datasets", "evaluate", "pandas", "pyarrow"} & set(loaded)


# The second meets what the first has left in their process; the third's fixture fails in company.
COMPANY = (
    "import os, pytest\n"
    "def test_leaves(): os.environ['LEFT'] = 'here'\n"
    "def test_meets_it(): assert 'LEFT' not in os.environ\n"
    "@pytest.fixture\ndef company():\n    yield\n    assert 'RERUN_LOG' not in os.environ\n"
    "def test_after(company): pass\n"
)
SKIPS = "import pytest\ndef test_skips(): pytest.skip('no engine here')\n"


@pytest.mark.parametrize(
    ("tests", "workers", "code", "end", "alone"),
    [
        pytest.param(COMPANY + SKIPS, 2, 0, "2 passed, 1 skipped, 2 passed only when alone in", 2, id="company"),
        pytest.param(COMPANY + "def test_fails(): assert 1 == 2\n", 0, 1, "1 failed, 2 passed, 2 passed only when alone in", 2, id="a fault too"),
        pytest.param(f"import os, pytest\n@pytest.mark.parametrize('number', range({MOST_RERUNS + 1}))\n"
    "def test_it(number): assert 'RERUN_LOG' not in os.environ\n", 0, 1, f"{MOST_RERUNS + 1} failed in", 0, id="many failures"),
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
