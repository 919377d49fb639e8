"""Layouts of code folders: what runs, and as what, is what sagemaker-training makes of them."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job_tree import Tree

REPORT = """
import json, os, sys
import importlib.metadata as metadata
installed = sorted(d.name for d in metadata.distributions() if d.name.startswith("amphora-test"))
print("REPORT", json.dumps([__name__, __package__, sys.argv[1:], os.getcwd() == CODE, installed]))
""".replace("CODE", "os.environ['SM_MODULE_DIR']")
SHELL = 'echo "REPORT [\\"shell\\", $(printf "\\"%s\\"," "$@")\\"$(basename "$PWD")\\"]"\n'
SETUP = "from setuptools import setup\nsetup(name='amphora-test-{0}', version='1', {1})\n"
POETRY = (
    '[tool.poetry]\nname = "amphora-test-poetry"\nversion = "1"\ndescription = ""\nauthors = []\n'
    '[tool.poetry.dependencies]\npython = "^3.99"\ntorch = "1.0"\n'
    '[build-system]\nrequires = ["poetry-core"]\nbuild-backend = "poetry.core.masonry.api"\n'
)
PYPROJECT = (
    '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    '[project]\nname = "amphora-test-project"\nversion = "1"\n'
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("program", "files"),
    [
        pytest.param(*layout, id=name)
        for name, layout in {
            "nested script with a sibling": (
                "scripts/train.py",
                {"scripts/train.py": "import helper" + REPORT, "scripts/helper.py": ""},
            ),
            "setup.py": (
                "pkg.train",
                {
                    "setup.py": SETUP.format("pkg", "packages=['pkg']"),
                    "pkg/__init__.py": "",
                    "pkg/train.py": "from . import __name__ as name" + REPORT,
                },
            ),
            "setup.py beside a script": (
                "train.py",
                {"setup.py": SETUP.format("flat", "py_modules=['train']"), "train.py": REPORT},
            ),
            "poetry": ("train.py", {"pyproject.toml": POETRY, "train.py": REPORT}),
            "two top-level packages": (
                "one/train.py",
                {
                    "pyproject.toml": PYPROJECT,
                    "one/__init__.py": "",
                    "two/__init__.py": "",
                    "one/train.py": "import two" + REPORT,
                },
            ),
            "shell script": ("run.sh", {"run.sh": SHELL}),
            "requirements.txt": (
                "train.py",
                {
                    "requirements.txt": "./dependency\n",
                    "dependency/setup.py": SETUP.format("dependency", "py_modules=['dependency']"),
                    "dependency/dependency.py": "",
                    "train.py": "import dependency" + REPORT,
                },
            ),
            "requirements.txt in a sub-folder": (
                "src/train.py",
                {"src/requirements.txt": "no-such-thing==9\n", "src/train.py": REPORT},
            ),
        }.items()
    ],
)
def test_a_layout_is_run_as_the_toolkit_runs_it(
    program: str, files: dict[str, str], tmp_path: Path
) -> None:
    def ran(command: list[str], tree: Tree, packages: Path) -> tuple[bool, list[str], bool]:
        """Whether the job went well, what the script reported, and whether there is a success file."""
        environ = tree.environment(
            PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", PIP_NO_DEPS="1", PIP_TARGET=str(packages),
            SM_STUDIO_LOCAL_MODE="true", AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
            PYTHONPATH=str(packages),
        )  # fmt: skip
        result = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        reports = re.findall(r"^REPORT .*", result.stdout, re.MULTILINE)
        assert reports, result.stdout + result.stderr
        return result.returncode == 0, reports, (tree.base / "output" / "success").is_file()

    if importlib.util.find_spec("sagemaker_training") is None:
        pytest.skip("sagemaker-training is not installed here (it needs a C compiler)")
    toolkit = [sys.executable, "-c", "from sagemaker_training import trainer; trainer.train()"]
    outcomes = []
    for runner in ("toolkit", "ours"):
        tree = Tree(tmp_path / runner)
        for file, text in files.items():
            tree.script(text, file)
        tree.configure(
            {"sagemaker_program": program, "sagemaker_submit_directory": str(tree.base / "code"),
             "text": "a b", "n": "1"},
            resourceconfig={"current_host": "localhost", "hosts": ["localhost"]},
            inputdataconfig={},
        )  # fmt: skip
        (tree.base / "output").mkdir()
        command = toolkit if runner == "toolkit" else tree.command()
        outcomes.append(ran(command, tree, tmp_path / f"{runner}-packages"))
        shutil.rmtree(tree.base)
    theirs, ours = outcomes
    assert ours == theirs and ours[0]
