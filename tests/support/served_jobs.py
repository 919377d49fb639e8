"""`amphora train` from hyperparameters, and `amphora serve` on what a training left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from tests.support.job_tree import Tree
from tests.support.paths import CODE
from tests.support.ports import free_port


def trained(base: Path, hyperparameters: Mapping[str, str]) -> str:
    """What `amphora train` prints, of a job below `base` with its channels there."""
    tree = Tree(base, {"AMPHORA_CODE_DIR": str(CODE), "HF_HUB_OFFLINE": "1"})
    done = tree.configure(hyperparameters).train(timeout=280, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def served(base: Path) -> Iterator[httpx.Client]:
    """A client of `amphora serve` on the model below `base`, once it answers."""
    port = free_port()
    settings = {
        "SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MODEL_SERVER_WORKERS": "1", "AMPHORA_CODE_DIR": str(CODE),
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    log = base / "server.log"
    with log.open("wb") as stream:
        server = subprocess.Popen([sys.executable, "-m", "amphora", "serve"],
                                  env=os.environ | settings, stdout=stream, stderr=stream)  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            end = time.monotonic() + 150
            while time.monotonic() < end and server.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/ping").status_code == 200:
                        break
                time.sleep(0.3)
            else:
                raise AssertionError(log.read_text())
            yield http
    finally:
        server.terminate()
        server.wait(60)
