"""The demo, and each command that it ends with."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.job_tree import clean_environ
from tests.support.ports import free_port
from tests.support.until import until

from .conftest import ROOT


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_it_says_to_do_next_works(tmp_path: Path) -> None:
    def run(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-euc", command],
            env=clean_environ(OMP_NUM_THREADS="1", **environ),
            capture_output=True,
            text=True,
            timeout=280,
        )

    demo = run(f"{sys.executable} {ROOT}/examples/demo.py --folder {tmp_path}/a\\ folder")
    assert demo.returncode == 0, demo.stderr
    commands = demo.stdout.split("demo: what to do next:\n")[1]
    report, serve, train = re.findall(r"^demo: .*:\n(.*)$", commands, re.MULTILINE)

    opened = run(report, BROWSER="echo %s")
    assert opened.returncode == 0 and opened.stdout.startswith("file://"), opened.stderr
    assert (tmp_path / "a folder" / "output" / "data" / "report.html").is_file()

    port = free_port()
    environ = clean_environ(SAGEMAKER_BIND_TO_PORT=str(port))
    server = subprocess.Popen(["sh", "-c", f"exec env {serve}"], env=environ)
    try:

        def page() -> str:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5):
                    address = f"http://127.0.0.1:{port}/"
                with urllib.request.urlopen(address, timeout=5) as answer:
                    shown: str = answer.read().decode()
                    return shown
            except OSError:
                return ""

        assert "<html" in until(page, 120)
    finally:
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(240) == 0

    trained = run(train)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "own" / "model" / "model.safetensors").is_file()
