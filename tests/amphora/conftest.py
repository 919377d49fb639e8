"""A job's tree in a temporary folder, and real `amphora train` processes on it."""

import os
import shutil
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.support import http_server
from tests.support.job_tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "ml")


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
