"""What a run shows: a bar to a terminal, really one; lines to a log."""

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from recipe import console
from tests.support.words import write_reviews

CODE = Path(console.__file__).resolve().parents[1]


def output_of(command: list[str], environment: dict[str, str]) -> str:
    """What `command` writes to the terminal that it is started in."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))  # a bar in none has no room
    started = subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that nobody has the terminal open any more
            break
        written += block
    os.close(ours)
    assert started.wait(timeout=240) == 0, written.decode()
    return written.decode()


@pytest.mark.heavy
@pytest.mark.long
def test_a_terminal_has_a_bar_and_a_log_has_lines(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "train.csv"
    write_reviews(data, 80)
    command = [sys.executable, str(CODE / "train.py"), "--model_id", str(tiny_model)]
    command += ["--max_steps", "9", "--batch_size", "8", "--save_strategy", "no"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SM_CHANNEL_TRAIN": str(data),
    }
    shown = output_of(command, environment)
    assert re.search(r"100%\|.+\| 9/9 ", shown), shown
    assert re.search(r"metric step=9 \{'eval_loss': ", shown)
    assert "\rmetric" in shown or "\nmetric" in shown, "a metric line starts a line of its own"
    assert not re.search(r"(?<!metric step=\d )\{'(eval_)?loss'", shown)
    assert not re.search(r"step \d+ of 9", shown)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stdout
    assert "exit code" not in done.stderr
    command[-1] = "sometimes"
    mistaken = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert mistaken.returncode == 1 and mistaken.stderr.count("sometimes") == 1, mistaken.stderr
    assert "Traceback" not in mistaken.stderr
    assert re.search(r"metric step=9 \{'eval_loss': ", done.stdout)
