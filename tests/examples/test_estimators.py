"""The requests of docs/ESTIMATORS.md and ENDPOINTS.md are ones that AWS takes, by botocore's service model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.aws import SAGEMAKER, violations

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("ESTIMATORS.md", "ENDPOINTS.md"))
PARTS = re.findall(r"<!-- request: ([\w.]+) -->\n```json\n(.*?)```", PAGES, re.DOTALL)
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
    assert len(PARTS) == PAGES.count("```json") - PAGES.count("<!-- analysis -->") == 12


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
