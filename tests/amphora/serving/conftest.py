"""Real servers: `python -m amphora serve` on a free port, over a model that a test writes."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.servers import ECHO, SERVE, Running, Start, write_code


@pytest.fixture(autouse=True)
def forget_handlers() -> Iterator[None]:
    """A test that loads handlers here leaves the names of their modules to whoever comes next."""
    folders = list(sys.path)
    yield
    sys.path[:] = folders
    for name in ("inference", "handler", "helper"):
        sys.modules.pop(name, None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(code, files={...}, command=(...), **environ): a server over that code."""
    with contextlib.ExitStack() as servers:

        def _start(
            code: str = ECHO,
            files: dict[str, str] | None = None,
            command: Sequence[str] = SERVE,
            **environ: str,
        ) -> Running:
            named = {"inference.py": code, **(files or {})}
            write_code(tmp_path / "model" / "code", named)
            return servers.enter_context(Running(tmp_path, environ, command))

        yield _start


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """As `start`, but for tests that leave a server as it was: all of a process share one."""
    running: dict[object, Running] = {}
    with contextlib.ExitStack() as servers:

        def _shared(code: str = ECHO, **environ: str) -> Running:
            key = (code, *sorted(environ.items()))
            if key not in running:
                base = tmp_path_factory.mktemp("shared")
                write_code(base / "model", {"code/inference.py": code})
                running[key] = servers.enter_context(Running(base, environ))
            return running[key]

        yield _shared
