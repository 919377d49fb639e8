"""A job of the recipe, below a folder: run in this process, or by code/train.py in processes.

With the variables of `tests.support.preloading` its processes are forks that cost no imports. Without
them they begin as an image begins them, for what is read at an import (HF_ENDPOINT, TORCH_LOGS).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.job_tree import clean_environ
from tests.support.paths import CODE
from tests.support.ports import free_port
from tests.support.preloading import PRELOADED, STOP_AT_LINE, STOP_BY, WITHOUT_REPORT

RATE = 1e-2
BY_GRADIENT = ("--optim", "sgd", "--lr_scheduler_type", "constant", "--warmup_ratio", "0",
               "--lr", str(RATE), "--max_grad_norm", "1e9")  # fmt: skip
"""A weight is moved by its gradients alone. Adam would make a step of a rounding error where a
gradient is 0 (the biases of keys)."""
SHARDED = ("--fsdp", "True")
QUICK = WITHOUT_REPORT


def write(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "train") -> Path:
    """Write a channel with one file of JSON Lines; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def folders_of(base: Path, channels: Mapping[str, Path]) -> Any:
    """Return the folders of a job below `base` with these channels."""
    from recipe.paths import Folders

    return Folders(
        channels=channels, model_dir=base / "model", output_data_dir=base / "output" / "data",
        checkpoints=base / "checkpoints", tensorboard=base / "output" / "tensorboard",
    )  # fmt: skip


def run(
    base: Path, model: Path, channels: Mapping[str, Path], *argv: str, has_report: bool = False
) -> dict[str, float]:
    """Train in this process below `base`, in float32 on the CPU; return the metrics."""
    usual = ("--model_name_or_path", str(model), "--use_cpu", "True", "--bf16", "False")
    return Job(base, channels, (*usual, *argv)).run_here(has_report=has_report)


def _words(*given: str) -> list[str]:
    """Return arguments of which a later value replaces an earlier one, which the recipe refuses."""
    values: dict[str, list[str]] = {}
    for word in given:
        if word.startswith("--"):
            values.pop(word, None)
            name = word
            values[name] = []
        else:
            values[name].append(word)
    return [word for name, value in values.items() for word in (name, *value)]


@dataclass
class Job:
    """A training and what its last run has left."""

    base: Path
    channels: Mapping[str, Path]
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    """What was printed, of rank 0 first."""
    errors: str = ""
    codes: set[int] = field(default_factory=set)

    def run(
        self,
        *argv: str,
        processes: int = 1,
        ranks: Sequence[Mapping[str, str]] = (),
        **environ: str,
    ) -> Job:
        """Run it to its end.

        Args:
            ranks: Variables of each process, in place of `processes`.
        """
        ranks = ranks or [{}] * processes
        world = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks)),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
        code = PRELOADED if "PRELOADING_SOCKET" in self.environ else CODE
        channels = {f"SM_CHANNEL_{name.upper()}": str(path) for name, path in self.channels.items()}
        usual = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SAGEMAKER_BASE_DIR": str(self.base),
        }
        running = []
        for rank, variables in enumerate(ranks):
            local = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world} if len(ranks) > 1 else {}
            out, err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
            process = subprocess.Popen(
                [sys.executable, str(code / "train.py"), *_words(*self.argv, *argv)], stdout=out, stderr=err,
                env=clean_environ(**{**usual, **channels, **self.environ, **local, **environ, **variables}),
            )  # fmt: skip
            running.append((process, out, err))
        try:
            self.codes = {process.wait(timeout=540) for process, _, _ in running}
        finally:
            for process, _, _ in running:
                process.kill()
        self.log, self.errors = "", ""
        for _, out, err in running:
            with out, err:
                for stream in (out, err):
                    stream.seek(0)
                self.log, self.errors = self.log + out.read(), self.errors + err.read()
        return self

    def finish(self, *argv: str, **options: Any) -> Job:
        """Run it to its end, which is a success."""
        self.run(*argv, **options)
        assert self.codes == {0}, self.log + self.errors
        return self

    def interrupt(
        self, line: str, *argv: str, by: signal.Signals = signal.SIGTERM, **options: Any
    ) -> Job:
        """Run it until it prints a line that begins so, when rank 0 gets a signal."""
        return self.run(*argv, **{STOP_AT_LINE: line, STOP_BY: str(int(by))}, **options)

    def run_here(self, *argv: str, has_report: bool = False) -> dict[str, float]:
        """Train in this process; return the metrics.

        Args:
            has_report: Whether the report is written, which takes most of the time of a tiny training.
        """
        from recipe import arguments
        from recipe.training import run as training
        from recipe.training.results import JobResults

        folders = folders_of(self.base, self.channels)
        self.base.mkdir(parents=True, exist_ok=True)
        given = arguments.parse(_words(*self.argv, *argv), folders)
        # What a training sets for itself (where trackers keep their files) ends with it.
        mock_or_real = JobResults.write_report if has_report else lambda *_: None
        with (
            mock.patch.dict(os.environ, self.environ),
            mock.patch.object(JobResults, "write_report", mock_or_real),
        ):
            return training.run(given, folders, dict(os.environ))

    @property
    def model(self) -> Path:
        return self.base / "model"

    @property
    def output(self) -> Path:
        return self.base / "output" / "data"

    @property
    def checkpoints(self) -> Path:
        return self.base / "checkpoints"

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "metrics.json").read_text()))

    @property
    def files(self) -> dict[str, bytes]:
        """The bytes of the weights."""
        return {file.name: file.read_bytes() for file in self.model.glob("*.safetensors")}

    @property
    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        (file,) = self.model.glob("*.safetensors")
        return load_file(file)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step."""
        matches = re.findall(r"^metric step=(\d+) \{'loss': ([^,}]+)", self.log, re.MULTILINE)
        return {int(step): float(loss) for step, loss in matches}

    @property
    def norms(self) -> list[float]:
        """The norm of each step's gradient."""
        matches = re.findall(
            r"^metric step=\d+ \{'loss'.*'grad_norm': ([^,}]+)", self.log, re.MULTILINE
        )
        return [float(value) for value in matches]


def assert_same(actual: Job, expected: Job, tolerance: float) -> None:
    """Check losses and, by how far they move the weights (`BY_GRADIENT`), gradients."""
    import pytest

    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    assert actual.norms == pytest.approx(expected.norms, rel=tolerance)
    weights, wanted = actual.weights, expected.weights
    assert weights.keys() == wanted.keys()
    apart = sum(float((weights[name] - wanted[name]).square().sum()) for name in wanted) ** 0.5
    assert apart < tolerance * RATE * sum(expected.norms)
