"""Trainings on torch-xla's CPU device. `make test-xla` runs them, with PJRT_DEVICE=CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import CODE
from tests.support.words import reviews

sys.path.insert(0, str(CODE))


@pytest.fixture(scope="session")
def write_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function of a number of rows, and how long they are, to a channel's folder."""

    def write(count: int, times: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("data")
        rows = [
            {"text": " ".join([text] * times), "label": label} for text, label in reviews(count)
        ]
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return folder

    return write
