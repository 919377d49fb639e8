"""What tests of several folders share: a tiny real model, made here, since no test has a network."""

import contextlib
import gc
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.preloading import preloading_for_all
from tests.support.reruns import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401, hooks
from tests.support.tiny_models import review_tokenizer, save

# Until all is imported: collections take a tenth of the time that imports take.
gc.disable()
# Test processes share the cores: OpenMP's threads, which wait by spinning, take each other's time
# (half of it on two cores). Read when torch is loaded, here and in what tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# torch-xla's environment is without Hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same draws, any speed", derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    settings.load_profile("same draws, any speed")


def pytest_collection_finish() -> None:
    """Leave what has been imported out of collections: each training would collect a second long."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers, hidden size 32, with a WordPiece tokenizer, saved without a head."""
    folder = tmp_path_factory.mktemp("model") / "tiny-bert"
    return save("BertModel", folder, 0, review_tokenizer(), max_position_embeddings=64,
                initializer_range=0.02)  # fmt: skip


@pytest.fixture(scope="session")
def still_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model without dropout, whose draws differ between processes and devices."""
    folder = tmp_path_factory.mktemp("still") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The variables of jobs that cost no imports: forks of one process that has the libraries."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with preloading_for_all(folder / "preloading") as variables:
        yield variables
