"""Readers of bytes under coverage-guided fuzzing (atheris), in a process each, or in short in one.

`make ordeal` installs atheris into build/fuzz where it has wheels (Linux on x86-64). What it finds
first ends that reader's run, and is kept in the campaign's folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ordeal.common import ROOT, Trial
from tests.support.job_tree import clean_environ

READ = "bytes are read, or refused by the error that the reader documents"
BOUNDED = "no bytes (at most 64 KiB) take a reader longer than 10 s, or more than 2 GB"
PROMISES = (READ, BOUNDED)

PACKAGES = ROOT / "build" / "fuzz"
TYPES = ("application/json", "application/jsonlines", "text/csv", "text/plain", "application/x-npy")
SEEDS = {
    "request": (
        b'\x00{"inputs": "good", "parameters": {"top_k": 2}}', b'\x01"good"\n{"text": 1}\n',
        b'\x02text\n"a, b"\n', b"\x03good", b"\x00[[\"good\"], {\"text\": \"\\ud800\"}]",
        b"\x04\x93NUMPY\x01\x00v\x00{'descr': '<U4', 'fortran_order': False, 'shape': (1,), }",
    ),
    "table": (
        b"text,label\ngood,pos\n", b'{"text": "good", "label": 1}\n', b'[{"text": "good"}]',
        b"text\tlabel\n\"a\tb\"\tneg\n", b"\xff\xfet\x00e\x00x\x00t\x00\n\x00", b'{"text": ["a"]}',
        b"PAR1", b"\xff\xff\xff\xff\x10\x00\x00\x00",
    ),
    "configuration": (
        b'{"epochs": "3", "sagemaker_program": "\\"train.py\\"", "sagemaker_mpi_enabled": "true"}',
        b'{"a": "{\\"b\\": [1, 2.5, null]}", "sagemaker_region": "x", "hf_token": "\\"s\\""}',
    ),
    "checkpoint": (b'{"job": {}, "finished": false, "files": {"a": {"size": 0, "sha256": ""}}}',),
    "sums": (b"0" * 64 + b"  model.safetensors\n",),
}  # fmt: skip
ALL = "all"
"""One process for all readers, which the first byte chooses: it instruments imports for seconds."""


def run(trial: Trial) -> None:
    """Fuzz every reader for its share of the time."""
    if importlib.util.find_spec("atheris") is None and not (PACKAGES / "atheris").is_dir():
        return  # the promises stay untried, and the table says so
    for name in [ALL] if trial.short else SEEDS:
        if trial.has_time():
            _fuzz(trial, name, 5 if trial.short else 180)


def _fuzz(trial: Trial, name: str, seconds: int) -> None:
    folder = trial.folder / name
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    prefixed = [bytes([number]) + seed for number, kind in enumerate(SEEDS) for seed in SEEDS[kind]]
    for number, content in enumerate(SEEDS.get(name, prefixed)):
        (corpus / f"seed-{number}").write_bytes(content)
    command = [
        sys.executable, "-m", "ordeal.fuzz", name, str(corpus), f"-max_total_time={seconds}",
        f"-seed={trial.random.randrange(1, 2**31)}", "-timeout=10", "-rss_limit_mb=2048",
        "-max_len=65536", "-print_final_stats=1", f"-artifact_prefix={folder}/",
    ]  # fmt: skip
    paths = [ROOT, ROOT / "code", ROOT / "container", PACKAGES]
    environ = clean_environ(PYTHONPATH=os.pathsep.join(map(str, paths)))
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(command, env=environ, stdout=output, stderr=output, cwd=folder)
        output.seek(0)
        text = output.read().decode(errors="replace")
    (folder / "log.txt").write_text(text)
    slow = re.search(r"libFuzzer: (timeout|out-of-memory)", text)
    trial.check(BOUNDED, slow is None, f"{name}: {text[-2000:]}")
    trial.check(READ, done.returncode == 0 or slow is not None, f"{name}: {text[-3000:]}")
    runs = re.search(r"number_of_executed_units: (\d+)", text)
    trial.count(f"{name}: inputs", int(runs[1]) if runs else 0)


@contextlib.contextmanager
def _file(content: bytes, name: str) -> Iterator[Path]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        yield path


def _request(content: bytes) -> None:
    from amphora.serving.api import exchange
    from amphora.serving.api.canonical import ModelTraits
    from amphora.serving.protocol.media_types import Fault

    kind = TYPES[content[0] % len(TYPES)] if content else TYPES[0]
    with contextlib.suppress(Fault):
        exchange.read("/invocations", content[1:], kind, ModelTraits())


def _table(content: bytes) -> None:
    from recipe.data.files import formats
    from recipe.errors import DataError

    with _file(content, "train.csv") as path, contextlib.suppress(DataError):
        formats.read(path)


def _configuration(content: bytes) -> None:
    from amphora.common.errors import AmphoraError
    from ordeal.data import read_configuration

    name = "input/config/hyperparameters.json"
    with _file(content, name) as path, contextlib.suppress(AmphoraError):
        read_configuration(path.parents[2])


def _checkpoint(content: bytes) -> None:
    from recipe.errors import CheckpointError
    from recipe.storage import checkpoints

    with _file(content, checkpoints.MANIFEST) as path, contextlib.suppress(CheckpointError):
        checkpoints.read(path.parent)


def _sums(content: bytes) -> None:
    from recipe.errors import ModelError
    from recipe.storage import checksums

    with (
        _file(content, checksums.NAME) as path,
        contextlib.suppress(ModelError),
        checksums.verified(str(path.parent)),
    ):
        pass


def _any(content: bytes) -> None:
    names = list(SEEDS)
    READERS[names[content[0] % len(names)] if content else names[0]](content[1:])


READERS: dict[str, Callable[[bytes], None]] = {
    "request": _request, "table": _table, "configuration": _configuration,
    "checkpoint": _checkpoint, "sums": _sums, ALL: _any,
}  # fmt: skip


def _main(name: str, *options: str) -> None:
    import atheris

    with atheris.instrument_imports(include=["recipe", "amphora"]):
        from amphora.contract import job, sm_variables  # noqa: F401
        from amphora.training import launch  # noqa: F401
        from recipe.data.files import formats  # noqa: F401
        from recipe.storage import checkpoints, checksums  # noqa: F401
    atheris.Setup([sys.argv[0], *options], READERS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    _main(*sys.argv[1:])
