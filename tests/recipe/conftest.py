"""A tiny real model and small labelled data, made here: no test needs a network."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts import Mount, mounting
from tests.support.paths import CODE

sys.path.insert(0, str(CODE))


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave a test nothing of what workers and trainings before it in this process have set: pauses,
    dropout (`cpu_kernels.lighten`), and what signals do."""
    if (turns := sys.modules.get("recipe.backend.turns")) is not None:
        monkeypatch.setattr(turns, "_pause", None)
    if (functional := sys.modules.get("torch.nn.functional")) is not None:
        monkeypatch.setattr(functional, "dropout", functional.dropout)
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def tokens_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the cache of tokens in a folder of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        if (datasets := sys.modules.get("datasets")) is not None:
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system of so many kilobytes below `tmp_path`."""
    with mounting(tmp_path) as mount:
        yield mount
