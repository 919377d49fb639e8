"""A job's tree in a temporary folder, and real `amphora train` processes on it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.support import http_server
from tests.support.job_tree import Tree
from tests.support.preloading import preloading, run_script


@pytest.fixture(scope="session")
def amphora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A process that has imported what a job does, which takes half of a short one's time."""
    imports = ["amphora.cli", "amphora.training.job_runner"]
    with preloading(tmp_path_factory.mktemp("amphora"), imports=imports) as variables:
        yield variables


@dataclass
class ForkedTree(Tree):
    """A tree whose jobs are forks of the process `amphora`, but for those of another command."""

    amphora: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, command: Sequence[str], environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        if [*command[:3]] != [sys.executable, "-m", "amphora"]:
            return super().run(command, environ, timeout)
        return run_script(self.amphora, command[2:], environ, Path.cwd(), "amphora")


@pytest.fixture
def tree(tmp_path: Path, amphora: Mapping[str, str]) -> Tree:
    return ForkedTree(tmp_path / "ml", amphora=amphora)


@pytest.fixture
def scripted(tree: Tree) -> Tree:
    """A tree whose job runs script.py."""
    return tree.configure({"sagemaker_program": "script.py"})


@pytest.fixture
def target(tmp_path: Path) -> dict[str, str]:
    """Variables with which pip installs into a folder of the test, which Python looks into.

    Without what takes pip seconds: comparing all that is installed, and compiling.
    """
    folder = tmp_path / "installed"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    quick = {"PIP_NO_DEPS": "1", "PIP_NO_COMPILE": "1"}
    return {"PIP_TARGET": str(folder), "PYTHONPATH": path, **quick}


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Puts a file into the folder `job` of the bucket `code`; returns the address of a stand-in of S3."""
    folder = tmp_path / "s3" / "code" / "job"
    folder.mkdir(parents=True)

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "s3"))

        def end_headers(self) -> None:
            self.send_header("ETag", '"1"')
            super().end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http_server.running(Handler) as port:

        def upload(path: Path) -> str:
            shutil.copy(path, folder)
            return f"http://127.0.0.1:{port}"

        yield upload
