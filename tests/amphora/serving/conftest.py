"""Real servers: `python -m amphora serve` on a free port, over a model that a test writes."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import ECHO, SERVE, Running, Start, serve_with, write_code


@pytest.fixture(autouse=True)
def forget_handlers() -> Iterator[None]:
    """A test that loads handlers here leaves the name `inference` to whoever comes next."""
    folders = list(sys.path)
    yield
    sys.path[:] = folders
    sys.modules.pop("inference", None)


def _serve(base: Path, limits: dict[str, float] | None, environ: dict[str, str]) -> Running:
    return Running(base, environ, serve_with(limits) if limits else SERVE)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(code, program="inference.py", files={...}, **environ): a server over that code."""
    with contextlib.ExitStack() as servers:

        def _start(
            code: str = ECHO,
            program: str = "inference.py",
            files: dict[str, str] | None = None,
            limits: dict[str, float] | None = None,
            **environ: str,
        ) -> Running:
            write_code(tmp_path, code, program, files)
            return servers.enter_context(_serve(tmp_path, limits, environ))

        yield _start


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """As `start`, but for tests that leave a server as it was: all of a process share one."""
    running: dict[object, Running] = {}
    with contextlib.ExitStack() as servers:

        def _shared(
            code: str = ECHO, limits: dict[str, float] | None = None, **environ: str
        ) -> Running:
            key = (code, str(limits), *sorted(environ.items()))
            if key not in running:
                base = tmp_path_factory.mktemp("shared")
                write_code(base, code, "inference.py", None)
                running[key] = servers.enter_context(_serve(base, limits, environ))
            return running[key]

        yield _shared
