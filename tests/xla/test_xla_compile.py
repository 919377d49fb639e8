"""`amphora compile`, and an endpoint in another process that finds each program."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.servers import Running
from tests.support.serving_kit import TEXTS, assert_close, save

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_programs_of_an_archive_are_found_by_an_endpoint(tmp_path: Path) -> None:
    from transformers import pipeline

    folder = save("BertForSequenceClassification", tmp_path / "saved")
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, ".")
    done = subprocess.run(
        [sys.executable, "-m", "amphora", "compile", str(archive)],
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path), "AMPHORA_BUCKETS": "1x16,4x48"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "0 loaded from torch-xla's cache, 0 found there" in done.stdout
    assert [path.name for path in tmp_path.glob(".amphora-compile-*")] == []
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "model", filter="data")
    server = Running(tmp_path, {"TMPDIR": str(tmp_path)})
    try:
        server.ready(180)
        assert "programs: 2 for xla, AMPHORA_BUCKETS=1x16,4x48" in server.log
        # The CPU device cannot load what it has kept: torch-xla counts that it was found.
        found = "programs: 0 loaded from torch-xla's cache, 2 found there that this device"
        assert f"{found} cannot load, 0 not there" in server.log
        plain = pipeline("text-classification", model=str(folder), device="cpu")
        expected = {text: plain(text)[0] for text in TEXTS}
        with ThreadPoolExecutor(8) as threads:
            asked = TEXTS * 5
            answers = list(threads.map(lambda text: server.invoke({"inputs": text}), asked))
        for text, answer in zip(asked, answers, strict=True):
            assert_close(answer.json(), [expected[text]])
        assert server.stop() == 0
    finally:
        server.close()
