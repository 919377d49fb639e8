"""A job's tree in a temporary folder, and real `amphora train` processes on it."""

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.job_tree import Tree
from tests.support.ports import free_port
from tests.support.until import until


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


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Puts a file into the bucket `code`; returns the server's address."""
    program = Path(sys.executable).with_name("moto_server")
    port = free_port()
    server = subprocess.Popen(
        [str(program), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def put(path: str, data: bytes = b"") -> None:
        request = urllib.request.Request(
            f"{url}/{path}", data=data, headers={"Content-Type": "application/gzip"}, method="PUT"
        )
        urllib.request.urlopen(request, timeout=240).close()

    def has_started() -> bool:
        with contextlib.suppress(OSError):
            put("code")
            return True
        return False

    until(has_started)

    def upload(path: Path) -> str:
        put(f"code/job/{path.name}", path.read_bytes())
        return url

    yield upload
    server.terminate()
    server.wait(240)
