"""The folders of a job below a temporary folder, and `amphora train` processes on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.preloading import run_script
from tests.support.until import until

if TYPE_CHECKING:
    from typing_extensions import Self

# Variables of the test run that must not reach the jobs under test.
_PREFIXES = ("SM_", "SAGEMAKER_", "AMPHORA_", "OMP_NUM_", "PYTHONPATH", "TRAINING_JOB_NAME")


def clean_environ(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
    return inherited | extra


@dataclass
class Tree:
    """The folders that SageMaker would mount."""

    base: Path
    environ: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    amphora: Mapping[str, str] = field(default_factory=dict)
    """Variables of a process that has imported what a job does; jobs are forks of it, if given."""

    def configure(self, hyperparameters: Mapping[str, Any] | str = "{}", **files: Any) -> Self:
        """Write input/config: `hyperparameters`, and `files` by stem, as JSON or text."""
        config = self.base / "input" / "config"
        config.mkdir(parents=True, exist_ok=True)
        for stem, content in {"hyperparameters": hyperparameters, **files}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (config / f"{stem}.json").write_text(text, encoding="utf-8")
        return self

    def channel(self, name: str, **files: str) -> Self:
        folder = self.base / "input" / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        return self

    @property
    def code(self) -> Path:
        return self.base / "code"

    def script(self, source: str, name: str = "script.py") -> Self:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return self

    @property
    def failure(self) -> str | None:
        path = self.base / "output" / "failure"
        return path.read_text(encoding="utf-8") if path.exists() else None

    def command(self) -> list[str]:
        return [self.python, "-m", "amphora", "train"]

    def environment(self, **extra: str) -> dict[str, str]:
        return clean_environ(SAGEMAKER_BASE_DIR=str(self.base), **self.environ) | extra

    def train(
        self, timeout: float = 240, prefix: Sequence[str] = (), **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the job to its end, by a command that `prefix` begins."""
        return self.run([*prefix, *self.command()], self.environment(**environ), timeout)

    def run(
        self, command: Sequence[str], environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        if self.amphora and [*command[:3]] == [sys.executable, "-m", "amphora"]:
            return run_script(self.amphora, command[2:], environ, Path.cwd(), "amphora")
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout, check=False
        )

    def doctor(self, *more: str, **environ: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
        """Run `amphora doctor --json`; return its exit code, and the findings by their subject."""
        command = [self.python, "-m", "amphora", "doctor", "--base-dir", str(self.base), "--json"]
        done = self.run([*command, *more], clean_environ(**self.environ) | environ, 1000)
        report = json.loads(done.stdout)
        findings: dict[str, list[dict[str, str]]] = {}
        for finding in report["findings"]:
            findings.setdefault(finding["what"], []).append(finding)
        levels = [finding["level"] for finding in report["findings"]]
        assert report["errors"] == levels.count("error")
        assert report["warnings"] == levels.count("warning")
        return done.returncode, findings

    def start(self, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(),
            env=self.environment(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def wait_for(path: object, seconds: float = 240) -> None:
    until(lambda: os.path.exists(str(path)), seconds, f"{path} did not appear")  # noqa: PTH110
