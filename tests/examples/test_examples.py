"""Every example runs for real, to the request that AWS would get; the request is held to botocore's
service model. No network: see aws.py."""

import ast
import io
import json
import re
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_tree import Tree

from .aws import SAGEMAKER, Aws, violations
from .conftest import COMMON, EXAMPLES, IMAGE, ROLE, ROOT, Run
from .iam import is_allowed, read_policy

MODEL = "s3://bucket/models/model.tar.gz"
TRAIN = [*COMMON, "--train", "s3://bucket/train/"]
SERVE = [*COMMON, "--model", MODEL]
KINDS = [
    "boto3",
    pytest.param("sdk2", marks=pytest.mark.heavy),
    pytest.param("sdk3", marks=pytest.mark.heavy),
]
METRICS = runpy.run_path(str(ROOT / "code" / "recipe" / "metrics.py"))["metric_definitions"]()
Example = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def example(run: Run, request: pytest.FixtureRequest) -> Example:
    """Runs `<case>_<kind>.py` with that kind's Python; it must succeed."""

    def start(case: str, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = run(f"{case}_{kind}.py", *arguments, preloaded=request.getfixturevalue(kind))
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return start


def channels(job: dict[str, Any]) -> dict[str, str]:
    return {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in job["InputDataConfig"]
    }


def output(kind: str) -> list[str]:
    """boto3 has no default bucket."""
    return ["--output", "s3://bucket/models"] if kind == "boto3" else []


@pytest.mark.parametrize("kind", KINDS)
def test_train_on_spot_with_two_hosts_and_lora(aws: Aws, example: Example, kind: str) -> None:
    spot = ["--spot", "--checkpoints", "s3://bucket/checkpoints", "--max-hours", "2"]
    hyperparameters = ["epochs=2", "lora_r=8", "lr=2e-4", "model_name_or_path=a/b=c"]
    hosts = ["--instance-count", "2", "--test", "s3://bucket/test"]
    done = example(
        "train", kind, *TRAIN, *hosts, *spot, *hyperparameters, "--output", "s3://bucket/models"
    )
    assert MODEL in done.stdout
    job = aws.request_of("CreateTrainingJob")
    assert job["RoleArn"] == ROLE
    assert job["AlgorithmSpecification"]["TrainingImage"] == IMAGE
    assert job["AlgorithmSpecification"]["MetricDefinitions"] == METRICS
    assert "ContainerEntrypoint" not in job["AlgorithmSpecification"]
    assert channels(job) == {"train": "s3://bucket/train/", "test": "s3://bucket/test"}
    assert job["HyperParameters"] == dict(pair.split("=", 1) for pair in hyperparameters)
    assert job["OutputDataConfig"]["S3OutputPath"] == "s3://bucket/models"
    assert job["ResourceConfig"]["InstanceCount"] == 2
    assert job["EnableManagedSpotTraining"] is True
    assert job["CheckpointConfig"]["S3Uri"] == "s3://bucket/checkpoints"
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400}


@pytest.mark.parametrize("kind", KINDS)
def test_train_with_a_warm_pool(aws: Aws, example: Example, kind: str) -> None:
    example("train", kind, *TRAIN, *output(kind), "--keep-alive", "1800")
    job = aws.request_of("CreateTrainingJob")
    assert job["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 1800
    assert not job.get("EnableManagedSpotTraining")
    assert "CheckpointConfig" not in job


@pytest.mark.parametrize(
    "instance", ["ml.g5.2xlarge", "ml.trn1.2xlarge", "ml.trn2.48xlarge", "ml.c7i.4xlarge"]
)
def test_train_on_each_kind_of_instance(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(EXAMPLES / "train_boto3.py"))
    options = [*TRAIN, *output("boto3"), "--instance-type", instance]
    monkeypatch.setattr(sys, "argv", ["train_boto3.py", *options])
    shape = SAGEMAKER.operation_model("CreateTrainingJob").input_shape
    assert shape
    assert not [*violations(shape, script["request"](script["arguments"]()))]


def test_a_script_goes_to_s3_whole(aws: Aws, example: Example) -> None:
    code = ["--code", "s3://bucket/code/", *output("boto3")]
    example("script", "boto3", *TRAIN, *code, "epochs=1")
    hyperparameters = aws.request_of("CreateTrainingJob")["HyperParameters"]
    assert hyperparameters == {
        "epochs": "1",
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": "s3://bucket/code/sourcedir.tar.gz",
    }
    holds_the_script(aws.objects["bucket/code/sourcedir.tar.gz"])


def holds_the_script(archive: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        member = files.extractfile("train.py")
        assert member
        assert member.read() == (EXAMPLES / "script" / "train.py").read_bytes()


@pytest.mark.heavy
def test_a_script_with_sdk2(aws: Aws, example: Example) -> None:
    example("script", "sdk2", *TRAIN, "--torchrun", "epochs=1")
    hyperparameters = aws.request_of("CreateTrainingJob")["HyperParameters"]
    assert json.loads(hyperparameters["sagemaker_program"]) == "train.py"
    assert json.loads(hyperparameters["epochs"]) == "1"
    assert hyperparameters["sagemaker_torch_distributed_enabled"] == "true"
    uri = json.loads(hyperparameters["sagemaker_submit_directory"])
    holds_the_script(aws.objects[uri.removeprefix("s3://")])


@pytest.mark.heavy
def test_a_script_with_sdk3(aws: Aws, example: Example) -> None:
    example("script", "sdk3", *TRAIN, "--torchrun", "epochs=1")
    job = aws.request_of("CreateTrainingJob")
    assert job["AlgorithmSpecification"]["ContainerEntrypoint"] == ["/bin/bash"]
    assert set(channels(job)) == {"train", "code", "sm_drivers"}
    assert job["HyperParameters"] == {"epochs": "1"}
    key = channels(job)["code"].removeprefix("s3://").rstrip("/") + "/train.py"
    assert aws.objects[key] == (EXAMPLES / "script" / "train.py").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_tune(aws: Aws, example: Example, kind: str) -> None:
    done = example("tune", kind, *TRAIN, *output(kind), "--jobs", "4", "epochs=2")
    assert "best" in done.stdout
    tuning = aws.request_of("CreateHyperParameterTuningJob")
    config, training = (tuning["HyperParameterTuningJobConfig"], tuning["TrainingJobDefinition"])
    objective = config["HyperParameterTuningJobObjective"]
    assert objective == {"Type": "Maximize", "MetricName": "eval_f1_macro"}
    assert config["ResourceLimits"]["MaxNumberOfTrainingJobs"] == 4
    (rate,) = config["ParameterRanges"]["ContinuousParameterRanges"]
    assert (float(rate["MinValue"]), float(rate["MaxValue"])) == (1e-5, 2e-4)
    (batch,) = config["ParameterRanges"]["CategoricalParameterRanges"]
    assert batch["Values"] == ["16", "32", "64"]
    assert training["StaticHyperParameters"] == {"epochs": "2"}
    regexes = {
        d["Name"]: d["Regex"] for d in training["AlgorithmSpecification"]["MetricDefinitions"]
    }
    line = "metric step=40 {'eval_loss': 0.31, 'eval_f1_macro': 0.875, 'epoch': 1.0}"
    match = re.search(regexes[objective["MetricName"]], line)
    assert match
    assert match[1] == "0.875"


@pytest.mark.parametrize("kind", KINDS)
def test_deploy(aws: Aws, example: Example, kind: str) -> None:
    done = example("deploy", kind, *SERVE)
    assert "incident" in done.stdout
    assert aws.request_of("CreateModel")["PrimaryContainer"]["ModelDataUrl"] == MODEL
    (variant,) = aws.request_of("CreateEndpointConfig")["ProductionVariants"]
    assert variant["InstanceType"] == "ml.m5.xlarge"
    assert aws.request_of("InvokeEndpoint")["Body"] == {"inputs": ["What a storm last night"]}
    nothing_is_left(aws)


def nothing_is_left(aws: Aws) -> None:
    for kind in ("Model", "EndpointConfig", "Endpoint"):
        assert aws.request_of(f"Delete{kind}") == {
            f"{kind}Name": aws.request_of(f"Create{kind}")[f"{kind}Name"]
        }


@pytest.mark.parametrize("kind", KINDS)
def test_deploy_serverless(aws: Aws, example: Example, kind: str) -> None:
    done = example("deploy", kind, *SERVE, "--serverless", "4096", "--keep")
    assert f"still running: {aws.request_of('CreateEndpoint')['EndpointName']}" in done.stdout
    (variant,) = aws.request_of("CreateEndpointConfig")["ProductionVariants"]
    assert variant["ServerlessConfig"] == {"MemorySizeInMB": 4096, "MaxConcurrency": 5}
    assert "InstanceType" not in variant
    assert not [name for name, _ in aws.requests if name.startswith("Delete")]


@pytest.mark.parametrize("kind", KINDS)
def test_async(aws: Aws, example: Example, kind: str) -> None:
    arguments = ["--data", "s3://bucket/questions.json", "--output", "s3://bucket/answers"]
    failures = ["--failures", "s3://bucket/failures"] if kind == "sdk3" else []
    done = example("async", kind, *SERVE, *arguments, *failures)
    assert "incident" in done.stdout
    config = aws.request_of("CreateEndpointConfig")["AsyncInferenceConfig"]["OutputConfig"]
    assert config["S3OutputPath"] == "s3://bucket/answers"
    assert aws.request_of("InvokeEndpointAsync")["InputLocation"] == "s3://bucket/questions.json"
    nothing_is_left(aws)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_transform(aws: Aws, example: Example, kind: str) -> None:
    arguments = ["--data", "s3://bucket/texts/", "--output", "s3://bucket/answers"]
    example("batch_transform", kind, *SERVE, *arguments)
    job = aws.request_of("CreateTransformJob")
    assert job["BatchStrategy"] == "MultiRecord"
    assert job["TransformInput"]["SplitType"] == "Line"
    assert job["TransformInput"]["ContentType"] == "application/jsonlines"
    assert job["TransformOutput"] == {
        "S3OutputPath": "s3://bucket/answers",
        "Accept": "application/jsonlines",
        "AssembleWith": "Line",
    }
    assert aws.request_of("DeleteModel") == {"ModelName": job["ModelName"]}


@pytest.mark.parametrize("kind", KINDS)
def test_multi_model(aws: Aws, example: Example, kind: str) -> None:
    arguments = ["--models", "s3://bucket/models/", "--target", "tweets.tar.gz"]
    example("multi_model", kind, *COMMON, *arguments)
    container = aws.request_of("CreateModel")["PrimaryContainer"]
    assert container["Mode"] == "MultiModel"
    assert container["ModelDataUrl"] == "s3://bucket/models/"
    assert aws.request_of("InvokeEndpoint")["TargetModel"] == "tweets.tar.gz"
    nothing_is_left(aws)


def scaling(aws: Aws) -> list[dict[str, Any]]:
    return [params for name, params in aws.requests if name == "PutScalingPolicy"]


def test_an_endpoint_of_a_team(aws: Aws, run: Run) -> None:
    newer = "s3://bucket/models/newer/model.tar.gz"
    ami = "al2023-ami-sagemaker-inference-gpu-4-1"
    load = ["--least", "2", "--most", "6", "--concurrency", "24", "--ami", ami]
    done = run("endpoint_boto3.py", *SERVE, *load, "--capture", "s3://bucket/seen/", "--shadow", newer)  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = aws.request_of("CreateEndpointConfig")
    (variant,), (shadow,) = config["ProductionVariants"], config["ShadowProductionVariants"]
    assert variant["InferenceAmiVersion"] == shadow["InferenceAmiVersion"] == ami
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 600
    assert variant["InitialInstanceCount"] == 2
    created = [params for name, params in aws.requests if name == "CreateModel"]
    data = {
        request["ModelName"]: request["PrimaryContainer"]["ModelDataUrl"] for request in created
    }
    assert data == {variant["ModelName"]: MODEL, shadow["ModelName"]: newer}
    assert config["DataCaptureConfig"]["DestinationS3Uri"] == "s3://bucket/seen/"
    (policy,) = scaling(aws)
    name = aws.request_of("CreateEndpoint")["EndpointName"]
    assert policy["ResourceId"] == f"endpoint/{name}/variant/all"
    assert policy["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 24
    bounds = aws.request_of("RegisterScalableTarget")
    assert (bounds["MinCapacity"], bounds["MaxCapacity"]) == (2, 6)
    aws.before, aws.requests = aws.requests, []
    done = run("endpoint_boto3.py", "--delete", name)
    assert done.returncode == 0, done.stderr
    deleted = [params["ModelName"] for name, params in aws.requests if name == "DeleteModel"]
    assert set(deleted) == set(data)
    assert aws.request_of("DeregisterScalableTarget")["ResourceId"] == policy["ResourceId"]
    assert run("endpoint_boto3.py", *SERVE, "--least", "3", "--most", "2").returncode == 2


def test_inference_components(aws: Aws, run: Run) -> None:
    models = ["--model", f"tweets={MODEL}", "--model", "emotion=s3://bucket/emotion/model.tar.gz"]
    done = run("components_boto3.py", *COMMON, *models, "--most-copies", "3")
    assert done.returncode == 0, done.stderr
    components = [params for name, params in aws.requests if name == "CreateInferenceComponent"]
    assert [component["Specification"]["Container"]["ArtifactUrl"] for component in components] == [
        MODEL,
        "s3://bucket/emotion/model.tar.gz",
    ]
    requested = [params for name, params in aws.requests if name == "InvokeEndpoint"]
    names = [component["InferenceComponentName"] for component in components]
    assert [item["InferenceComponentName"] for item in requested] == names
    assert [item["ResourceId"] for item in scaling(aws)] == [
        f"inference-component/{n}" for n in names
    ]
    order = [name for name, _ in aws.requests if name.startswith("Delete")]
    assert order == ["DeleteInferenceComponent"] * 2 + ["DeleteEndpoint", "DeleteEndpointConfig"]
    assert run("components_boto3.py", *COMMON, "--model", MODEL).returncode == 2


def test_async_scales_from_none(aws: Aws, run: Run) -> None:
    arguments = ["--data", "s3://bucket/questions.json", "--output", "s3://bucket/answers/"]
    done = run("async_boto3.py", *SERVE, *arguments, "--most", "5")
    assert done.returncode == 0, done.stderr
    assert aws.request_of("RegisterScalableTarget")["MinCapacity"] == 0
    tracking, step = scaling(aws)
    assert tracking["PolicyType"] == "TargetTrackingScaling"
    (change,) = step["StepScalingPolicyConfiguration"]["StepAdjustments"]
    assert change["ScalingAdjustment"] == 1
    alarms = [params for name, params in aws.requests if name == "PutMetricAlarm"]
    assert [(alarm["MetricName"], bool(alarm["AlarmActions"])) for alarm in alarms] == [
        ("HasBacklogWithoutCapacity", True),
        ("ApproximateAgeOfOldestRequest", False),
    ]


def test_update_endpoint_keeps_what_the_endpoint_has(aws: Aws, run: Run) -> None:
    variant = {
        "VariantName": "all",
        "ModelName": "old",
        "InstanceType": "ml.g5.xlarge",
        "InitialInstanceCount": 3,
    }
    answers = {"OutputConfig": {"S3OutputPath": "s3://bucket/answers"}}
    shadow = {**variant, "VariantName": "shadow", "ModelName": "newer"}
    aws.before = [
        ("CreateEndpoint", {"EndpointName": "live", "EndpointConfigName": "old"}),
        (
            "CreateEndpointConfig",
            {
                "ProductionVariants": [variant],
                "AsyncInferenceConfig": answers,
                "ShadowProductionVariants": [shadow],
            },
        ),
    ]
    done = run("update_endpoint.py", "--endpoint", "live", *SERVE)
    assert done.returncode == 0, done.stderr
    new = aws.request_of("CreateModel")["ModelName"]
    config = aws.request_of("CreateEndpointConfig")
    assert config["ProductionVariants"] == [{**variant, "ModelName": new}]
    assert config["AsyncInferenceConfig"] == answers
    assert config["ShadowProductionVariants"] == [shadow]
    assert aws.request_of("UpdateEndpoint") == {
        "EndpointName": "live",
        "EndpointConfigName": config["EndpointConfigName"],
    }
    assert done.stdout.endswith("in service\n")


def test_a_request_that_aws_would_refuse_is_refused_here(aws: Aws, run: Run) -> None:
    """What botocore sends all the same: a name that breaks the service model's pattern."""
    done = run("deploy_boto3.py", *COMMON, "--model", "models/model.tar.gz")
    assert done.returncode == 1
    assert "ModelDataUrl: 'models/model.tar.gz' does not match" in done.stderr


def test_a_role_that_the_caller_may_not_pass_is_refused(aws: Aws, run: Run) -> None:
    role = "arn:aws:iam::123456789012:role/Admin"
    done = run("deploy_boto3.py", "--image", IMAGE, "--role", role, "--model", MODEL)
    assert done.returncode == 1
    assert f"AccessDenied: iam:PassRole on {role}" in done.stderr
    aws.refused.clear()


def test_violations_are_found() -> None:
    shape = SAGEMAKER.operation_model("CreateTransformJob").input_shape
    assert shape
    job: dict[str, Any] = {
        "TransformJobName": "a_b",
        "TransformInput": {"DataSource": {}},
        "BatchStrategy": "Both",
        "MaxPayloadInMb": 6,
        "TransformResources": {"InstanceType": "ml.m5.xlarge", "InstanceCount": "1"},
    }
    assert sorted(violation.split(":")[0] for violation in violations(shape, job)) == [
        ".BatchStrategy",
        ".MaxPayloadInMb",
        ".ModelName",
        ".TransformInput.DataSource.S3DataSource",
        ".TransformJobName",
        ".TransformOutput",
        ".TransformResources.InstanceCount",
    ]


SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "demo.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_what_it_needs_and_costs(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert docstring
    assert f"python examples/{name} " in docstring
    assert "\nPrerequisites: " in docstring
    assert "\nCost: " in docstring
    assert name in (EXAMPLES / "README.md").read_text()


def test_every_example_is_tested_here() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    cases = set(re.findall(r'example\(\s*"(\w+)"', text))
    expected = {f"{case}_{kind}.py" for case in cases for kind in ("boto3", "sdk2", "sdk3")}
    assert set(SCRIPTS) == expected | set(re.findall(r'run\(\s*"(\w+\.py)"', text))


@pytest.mark.heavy
def test_the_script_trains_where_the_image_starts_it(tmp_path: Path, tiny_model: Path) -> None:
    rows = ["the film was good,0", "the film was bad,1"] * 8
    tree = Tree(tmp_path / "ml", {"HF_HUB_OFFLINE": "1"})
    tree.channel("train", **{"texts.csv": "\n".join(["text,label", *rows])})
    hyperparameters = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": str(EXAMPLES / "script"),
        "model_name_or_path": str(tiny_model),
        "epochs": "2",
    }
    done = tree.configure(hyperparameters).train()
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(next(d["Regex"] for d in METRICS if d["Name"] == "loss"), done.stdout)
    assert len(losses) == 2
    assert (tree.base / "model" / "model.safetensors").is_file()


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


@pytest.mark.heavy
def test_a_pipeline_registers_what_is_good_enough(
    aws: Aws, run: Run, sdk2: Mapping[str, str]
) -> None:
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
    role, job = read_policy("pipeline_role.json"), "arn:aws:sagemaker:eu-west-1:123456789012:a/b"
    assert all(is_allowed(role, f"sagemaker:{operation}", job) for operation in requests)
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
