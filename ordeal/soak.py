"""A server that runs long, and many short trainings in sequence: nothing may grow."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ordeal.common import Trial, failure, start
from ordeal.serving import Server
from tests.support.job_tree import Tree
from tests.support.until import wait_until

SERVING = "a server's memory (after 1/4 of the time) and descriptors do not grow"
ZOMBIES = "no process is left behind, alive or a zombie"
FILES = "no temporary file is left behind"
TRAINED = "every training ends well"
PROMISES = (SERVING, ZOMBIES, FILES, TRAINED)

SCRIPT = """
import os, pathlib, subprocess, sys, tempfile
subprocess.run([sys.executable, "-c", "pass"])
subprocess.Popen(["sleep", "300"])
pathlib.Path(os.environ["SM_MODEL_DIR"], "weights").write_bytes(bytes(1000))
"""


def run(trial: Trial) -> None:
    """Serve first, then train by scripts that leave a process behind."""
    _serve(trial, 10 if trial.short else 1800)
    _train(trial, 3 if trial.short else 200)


def _serve(trial: Trial, seconds: float) -> None:
    environ = {"TMPDIR": str(_tmp(trial, "serving"))}
    with Server(trial, **environ) as server:
        began = time.monotonic()
        settled: tuple[float, int] | None = None
        texts = ["good", "the film was bad " * 9, "truly " * 40, "number 1 , 2 , 3 great"]
        while (passed := time.monotonic() - began) < seconds and trial.has_time():
            for number in range(50):
                some = texts[: 1 + number % 4]
                status, _ = server.post({"inputs": some * (1 + number % 5)})
                trial.count("requests")
                if status != 200:
                    trial.check(SERVING, False, f"answer {status}")
            if settled is None and passed > seconds / 4:
                settled = server.weight
        after = server.weight
        assert settled is not None
        trial.figure("MB, descriptors settled", f"{settled[0]:.0f}, {settled[1]}")
        trial.figure("MB, descriptors at the end", f"{after[0]:.0f}, {after[1]}")
        # Seconds after its start a server still makes the kernels of its shapes.
        most = 40 if trial.short else 15
        fine = after[0] - settled[0] < most and after[1] <= settled[1] + 2
        trial.check(SERVING, fine, (settled, after))
        pids = server.pids()
        trial.check(ZOMBIES, not _zombies(pids), _zombies(pids))
        server.stop()
        wait_until(lambda: not any(map(_status, pids)), 5)
        left = [pid for pid in pids if _status(pid)]
        trial.check(ZOMBIES, not left, left)
    # torch keeps one cache for each user there.
    files = [p for p in _tmp(trial, "serving").iterdir() if not p.name.startswith("torchinductor")]
    trial.check(FILES, not files, files[:5])


def _train(trial: Trial, count: int) -> None:
    base, tmp = trial.folder / "job", _tmp(trial, "training")
    Tree(base).configure({"sagemaker_program": "script.py"})
    (base / "code").mkdir()
    (base / "code" / "script.py").write_text(SCRIPT)
    before = _processes()
    for _ in range(count):
        if not trial.has_time():
            break
        code = start(base, "train", trial.folder / "train.log", TMPDIR=str(tmp)).wait(60)
        trial.check(TRAINED, code == 0, (code, failure(base)))
    left = _processes() - before
    trial.check(ZOMBIES, not left, left)
    trial.check(FILES, not list(tmp.iterdir()), list(tmp.iterdir())[:5])


def _tmp(trial: Trial, name: str) -> Path:
    folder = trial.folder / f"tmp-{name}"
    folder.mkdir(exist_ok=True)
    return folder


def _zombies(pids: list[int]) -> list[int]:
    return [pid for pid in pids if "State:\tZ" in _status(pid)]


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def _processes() -> set[str]:
    """Return the `sleep 300` that scripts leave behind, and the children of this process."""
    results = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            is_child = f"PPid:\t{os.getpid()}\n" in _status(int(entry.name))
            if command == b"sleep\0300\0" or is_child:
                results.add(entry.name)
    return results
