"""Jobs of all tasks, in forks of one process that has imported the libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.support.preloading import preloading


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The variables of jobs that cost no imports."""
    with preloading(tmp_path_factory.mktemp("preloading")) as variables:
        yield variables
