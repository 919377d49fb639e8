"""Runs commands for a laptop: `amphora train data.csv`, `doctor`, `quantize`, `verify` and
`serve FOLDER`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.instances.instance_report import InstanceQuestion
from amphora.local import local_job
from amphora.training import doctor as checks
from amphora.training import entry_point, job_runner
from amphora.training.quantize import quantize as quantize_model


def train(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Write the job that a command line names, and run it. Return its exit code.

    Raise AmphoraError if the command line is wrong.
    """
    job = local_job.read_words(words, environ)
    local_job.write_tree(job)
    code = job_runner.train({**environ, "SAGEMAKER_BASE_DIR": str(job.base)})
    if code == 0:
        shown = os.path.relpath(job.base) if job.base.is_relative_to(Path.cwd()) else str(job.base)
        print(f"\nThe same job on SageMaker, its data in S3:\n\n{local_job.sdk_snippet(job)}\n")
        print(f"Report:  {shown}/output/data/report.html")
        print(f"Serve:   amphora serve {shlex.quote(shown)}")
        print(f"Predict: amphora predict {shlex.quote(shown)} FILE --out ANSWERS.csv", flush=True)
    return code


def doctor(
    words: Sequence[str],
    environ: Mapping[str, str],
    as_json: bool,
    steps: int,
    question: InstanceQuestion | None = None,
) -> int:
    """Check the job that a command line names, without leaving its tree behind; return 1 if there
    is an error. Raise AmphoraError if the command line is wrong."""
    job = local_job.read_words(words, environ)
    if not job.is_local:
        based = {**environ, "SAGEMAKER_BASE_DIR": str(job.base)}
        return checks.doctor(based, as_json, steps, question)
    with tempfile.TemporaryDirectory(prefix="amphora-") as scratch:
        base = Path(scratch) if job.channels else job.base
        local_job.write_tree(replace(job, base=base))
        based = {**environ, "SAGEMAKER_BASE_DIR": str(base)}
        # Nobody knows the folder of links.
        unnamed = f"{scratch}/input/data/" if job.channels else ""
        return checks.doctor(based, as_json, steps, question, unnamed)


def quantize(
    model: str | None, data: str | None, words: Sequence[str], environ: Mapping[str, str]
) -> int:
    """Quantize the model of a run or of a folder, as `amphora.training.quantize` does.

    Args:
        words: NAME=VALUE, `--name value`, and the paths of model and data that are not given.

    Raise AmphoraError if an argument is missing or wrong.
    """
    others, options, problems = local_job.split_words(words)
    settings = [word for word in others if "=" in word]
    paths = [word for word in others if "=" not in word]
    folder = model or (paths.pop(0) if paths else None)
    rows = data or (paths.pop(0) if paths else None)
    if paths:
        problems.append(f"{paths[0]!r} is neither NAME=VALUE nor the path of model or data.")
    if folder is None or rows is None:
        problems.append("Write: amphora quantize FOLDER DATA, or --model FOLDER --data DATA.")
    if problems or folder is None or rows is None:
        raise ConfigError("\n".join(problems))
    run = Path(folder)
    settings += [f"{name}={value}" for name, value in options.items()]
    return quantize_model(
        run / "model" if (run / "model").is_dir() else run, Path(rows), settings, environ
    )


def compare_runs(runs: Sequence[Path], environ: Mapping[str, str]) -> int:
    """Print what differs between two runs; return an exit code."""
    script = entry_point.recipe_dir(environ) / "compare.py"
    return subprocess.run([sys.executable, str(script), *map(str, runs)], check=False).returncode


def show_hyperparameters(name: str, environ: Mapping[str, str]) -> int:
    """Print the recipe's hyperparameters by group, or what is known of one. Return an exit code."""
    script = entry_point.recipe_dir(environ) / "train.py"
    words = ["--help", *([name] if name else [])]
    return subprocess.run([sys.executable, str(script), *words], check=False).returncode


def verify(model: Path, environ: Mapping[str, str]) -> int:
    """Compare the answers of a model with its proof; return 1 if one differs. Raise AmphoraError if
    there is no such folder."""
    if not model.is_dir():
        raise ConfigError(f"--model is {str(model)!r}, which is not a folder.", "Give a model's.")
    folder = model / "model" if (model / "model").is_dir() else model
    script = entry_point.recipe_dir(environ) / "verify.py"
    command = [sys.executable, str(script), str(folder.resolve())]
    return subprocess.run(command, env=dict(environ), check=False).returncode


def serve(folder: Path, port: str | None, environ: Mapping[str, str]) -> int:
    """Serve the model of a run or of a folder until SIGTERM; return the exit code."""
    from amphora.serving.http import server

    named = {"SAGEMAKER_BIND_TO_PORT": port} if port else {}
    if local_job.is_hub_name(folder):
        with tempfile.TemporaryDirectory(prefix="amphora-") as scratch:
            (Path(scratch) / "model").mkdir()
            return server.serve(Path(scratch), {**environ, **named, "HF_MODEL_ID": str(folder)})
    with (
        tempfile.TemporaryDirectory(prefix="amphora-") as scratch,
        local_job.model_base(folder, Path(scratch)) as base,
    ):
        return server.serve(base, {**environ, **named})
