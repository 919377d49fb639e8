"""The requests of docs/ESTIMATORS.md and ENDPOINTS.md are ones that AWS takes, by botocore's service model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.aws import SAGEMAKER, Aws, violations
from tests.examples.conftest import Run

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("ESTIMATORS.md", "ENDPOINTS.md"))
PARTS = re.findall(r"<!-- request: ([\w.]+) -->\n```json\n(.*?)```", PAGES, re.DOTALL)
SDK2 = re.findall(
    r"<!-- request: ([\w.]+) -->\n```json\n([^`]*)```\n\n<!-- sdk2 -->\n```python\n(.*?)```",
    PAGES,
    re.DOTALL,
)
PRELUDE = """
from sagemaker.estimator import Estimator
from sagemaker.inputs import FileSystemInput
from sagemaker.instance_group import InstanceGroup
from sagemaker.pytorch import PyTorch
from sagemaker.tuner import ContinuousParameter, HyperparameterTuner

common = {"image_uri": "an-image", "role": "arn:aws:iam::123456789012:role/training"}
"""
TRAINING: dict[str, Any] = {
    "AlgorithmSpecification": {"TrainingImage": "an-image", "TrainingInputMode": "File"},
    "RoleArn": "arn:aws:iam::123456789012:role/training",
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/models/"},
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 10},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
}
TUNING: dict[str, Any] = {
    "HyperParameterTuningJobName": "a-tuning",
    "HyperParameterTuningJobConfig": {
        "Strategy": "Bayesian",
        "ResourceLimits": {"MaxParallelTrainingJobs": 2},
    },
}


def whole(operation: str, part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The operation, and its request with what the page leaves out."""
    if operation == "CreateTrainingJob":
        return operation, {"TrainingJobName": "a-job", **TRAINING, **part}
    if operation == "CreateHyperParameterTuningJob.TrainingJobDefinition":
        name, _, member = operation.partition(".")
        return name, {**TUNING, member: {**TRAINING, **part}}
    if operation == "CreateEndpointConfig":
        variant = {"VariantName": "all", "ModelName": "reviews-3", "InstanceType": "ml.m5.xlarge"}
        variants = [{**variant, "InitialInstanceCount": 1}]
        return operation, {"EndpointConfigName": "a-config", "ProductionVariants": variants, **part}
    return operation, part


def test_no_block_is_left_out() -> None:
    assert len(PARTS) == PAGES.count("```json") - PAGES.count("<!-- analysis -->") == 11


@pytest.mark.parametrize(("operation", "text"), PARTS, ids=[name for name, _ in PARTS])
def test_a_request_holds_to_the_service_model(operation: str, text: str) -> None:
    name, request = whole(operation, json.loads(text))
    shape = SAGEMAKER.operation_model(name).input_shape
    assert shape is not None and list(violations(shape, request)) == []


def test_a_wrong_one_is_found() -> None:
    part = {"ResourceConfig": {"InstanceTyp": "ml.g5.2xlarge"}}
    name, request = whole("CreateTrainingJob", part)
    shape = SAGEMAKER.operation_model(name).input_shape
    assert shape is not None and any("InstanceTyp" in each for each in violations(shape, request))


def plain(value: Any) -> Any:
    """A text that SDK v2 wrote as JSON, as what it means."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def missing(part: Any, asked: Any, at: str = "") -> list[str]:
    """What a part of a request says that the request does not."""
    if isinstance(part, dict) and isinstance(asked, dict):
        return [
            text
            for name, value in part.items()
            for text in missing(value, asked.get(name), f"{at}.{name}")
        ]
    if isinstance(part, list) and isinstance(asked, list) and len(part) == len(asked):
        pairs = enumerate(zip(part, asked, strict=True))
        return [text for place, (a, b) in pairs for text in missing(a, b, f"{at}[{place}]")]
    return [] if plain(part) == plain(asked) else [f"{at}: {asked!r} is not {part!r}"]


@pytest.mark.heavy
def test_sdk_v2_asks_for_what_the_page_shows(aws: Aws, run: Run, sdk2: str, tmp_path: Path) -> None:
    assert len(SDK2) == PAGES.count("<!-- sdk2 -->") == 6
    program = tmp_path / "shown.py"
    program.write_text("\n".join([PRELUDE, *(code for *_, code in SDK2)]))
    done = run(program, python=sdk2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    names = ("CreateTrainingJob", "CreateHyperParameterTuningJob")
    asked = [each for each in aws.requests if each[0] in names]
    assert [name for name, _ in asked] == [operation.split(".")[0] for operation, *_ in SDK2]
    for (operation, text, _), (_, request) in zip(SDK2, asked, strict=True):
        _, _, member = operation.partition(".")
        assert missing(json.loads(text), request[member] if member else request) == []
