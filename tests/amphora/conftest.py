"""A job's tree in a temporary folder, and real `amphora train` processes on it."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import http_server
from tests.support.job_tree import Tree
from tests.support.preloading import preloading


@pytest.fixture(scope="session")
def amphora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A process that has imported what a job does, which takes half of a short one's time."""
    imports = ["amphora.cli", "amphora.training.job_runner"]
    with preloading(tmp_path_factory.mktemp("amphora"), imports=imports) as variables:
        yield variables


@pytest.fixture
def tree(tmp_path: Path, amphora: Mapping[str, str]) -> Tree:
    return Tree(tmp_path / "ml", amphora=amphora)


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

    class Handler(http_server.Quiet):
        def do_GET(self) -> None:
            path = tmp_path / "s3" / self.path.partition("?")[0].strip("/")
            body = path.read_bytes() if path.is_file() else b""
            self.reply(200 if body else 404, body, {"ETag": '"1"'})

        do_HEAD = do_GET

    with http_server.running(Handler) as port:

        def upload(path: Path) -> str:
            shutil.copy(path, folder)
            return f"http://127.0.0.1:{port}"

        yield upload
