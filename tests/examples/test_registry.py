"""The pipeline and the Model Registry's examples, to the requests that AWS would get."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from .aws import SAGEMAKER, Aws, violations
from .conftest import COMMON, IMAGE, ROLE, Run


def test_update_endpoint_by_a_version_of_the_registry(aws: Aws, run: Run) -> None:
    package = "arn:aws:sagemaker:eu-west-1:123456789012:model-package/reviews/3"
    aws.before = [
        ("CreateEndpoint", {"EndpointName": "live", "EndpointConfigName": "old"}),
        (
            "CreateEndpointConfig",
            {"ProductionVariants": [{"VariantName": "all", "ModelName": "old"}]},
        ),
    ]
    which = ["--endpoint", "live", "--role", ROLE, "--package", package]
    done = run("update_endpoint.py", *which)
    assert done.returncode == 0, done.stderr
    assert aws.request_of("CreateModel")["PrimaryContainer"] == {"ModelPackageName": package}
    for wrong in ([*which, "--image", IMAGE], ["--endpoint", "live", *COMMON]):
        assert "say --image and --model, or --package" in run("update_endpoint.py", *wrong).stderr


def pipeline_requests(steps: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Operation and request of each step of a pipeline; a text for what is known when it runs."""

    def settled(value: Any) -> Any:
        if isinstance(value, dict):
            settled_values = {key: settled(item) for key, item in value.items()}
            return (
                "s3://bucket/settled"
                if settled_values.keys() & {"Get", "Std:Join"}
                else settled_values
            )
        return [settled(item) for item in value] if isinstance(value, list) else value

    operations = {"Training": "CreateTrainingJob", "RegisterModel": "CreateModelPackage"}
    for step in steps:
        if step["Type"] == "Condition":
            yield from pipeline_requests(step["Arguments"]["IfSteps"])
        else:
            yield operations[step["Type"]], settled(step["Arguments"])


@pytest.mark.heavy
def test_a_pipeline_registers_what_is_good_enough(
    aws: Aws, run: Run, sdk2: Mapping[str, str]
) -> None:
    data = ["--train", "s3://bucket/train/", "--test", "s3://bucket/test/"]
    done = run("pipeline_sdk2.py", *COMMON, *data, "--group", "reviews", "--least", "0.9", "epochs=2", preloaded=sdk2)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\namphora-reviews/execution/1\n")
    pipeline = json.loads(aws.request_of("CreatePipeline")["PipelineDefinition"])
    assert {parameter["Name"]: parameter["DefaultValue"] for parameter in pipeline["Parameters"]} == {
        "Train": "s3://bucket/train/", "Test": "s3://bucket/test/", "Least": 0.9,
    }  # fmt: skip
    _, decision = pipeline["Steps"]
    assert decision["Arguments"]["Conditions"] == [
        {
            "Type": "GreaterThanOrEqualTo",
            "LeftValue": {"Get": "Steps.Train.FinalMetricDataList['eval_f1_macro'].Value"},
            "RightValue": {"Get": "Parameters.Least"},
        }
    ]
    assert [else_step["Type"] for else_step in decision["Arguments"]["ElseSteps"]] == ["Fail"]
    requests = dict(pipeline_requests(pipeline["Steps"]))
    training, package = requests["CreateTrainingJob"], requests["CreateModelPackage"]
    assert package["ModelApprovalStatus"] == "PendingManualApproval"
    assert training["HyperParameters"]["epochs"] == "2"
    # The platform names the job.
    for operation, request in (
        ("CreateTrainingJob", {"TrainingJobName": "by-the-platform", **training}),
        ("CreateModelPackage", package),
    ):
        shape = SAGEMAKER.operation_model(operation).input_shape
        assert shape and list(violations(shape, request)) == []


def test_a_registered_model_is_approved_and_deployed(aws: Aws, run: Run) -> None:
    group = ["--group", "reviews"]
    waits = {"ModelPackageGroupName": "reviews", "ModelApprovalStatus": "PendingManualApproval"}
    aws.before = [("CreateModelPackage", waits)] * 3
    refused = run("registry_boto3.py", *group, "--deploy", "texts", "--role", ROLE)
    assert refused.returncode == 1 and "no approved version" in refused.stderr
    assert "wants its reason" in run("registry_boto3.py", *group, "--approve", "2").stderr
    absent = run("registry_boto3.py", *group, "--approve", "4", "--because", "x")
    assert "reviews has no version 4" in absent.stderr
    approved = ["--approve", "2", "--because", "f1 0.91"]
    done = run("registry_boto3.py", *group, *approved, "--deploy", "texts", "--role", ROLE)
    assert done.returncode == 0, done.stderr
    package = "arn:aws:sagemaker:eu-west-1:123456789012:model-package/reviews/2"
    assert aws.request_of("UpdateModelPackage") == {
        "ModelPackageArn": package,
        "ModelApprovalStatus": "Approved",
        "ApprovalDescription": "f1 0.91",
    }
    assert aws.request_of("CreateModel")["Containers"] == [{"ModelPackageName": package}]
    assert aws.request_of("CreateEndpoint")["EndpointName"] == "texts"
    assert f"{package} Approved" in done.stdout and "reviews/3 PendingManual" in done.stdout
