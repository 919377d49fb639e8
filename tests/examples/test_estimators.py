"""What docs/ESTIMATORS.md, ENDPOINTS.md and MIGRATING.md show is what SDKs send and the code does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from amphora.common.devices import Devices
from amphora.common.variables import SETTINGS
from amphora.serving import settings
from amphora.serving.vllm import selection
from tests.examples.aws import SAGEMAKER, Aws, violations
from tests.examples.conftest import ROOT, Run

DOCS = ROOT / "docs"
ESTIMATORS = (DOCS / "ESTIMATORS.md").read_text()
ENDPOINTS = (DOCS / "ENDPOINTS.md").read_text()
PAGES = ESTIMATORS + ENDPOINTS
PARTS = re.findall(r"<!-- request: ([\w.]+) -->\n```json\n(.*?)```", PAGES, re.DOTALL)
PROGRAMS = re.findall(r"<!-- sdk3: (\w+) -->\n```python\n(.*?)```", ESTIMATORS, re.DOTALL)


def first_block(version: str) -> str:
    """Return what the page says to paste before each program for an SDK."""
    (code,) = re.findall(rf"<!-- first: {version} -->\n```python\n(.*?)```", ESTIMATORS, re.DOTALL)
    return str(code)


def test_each_program_has_all_names_as_pasted() -> None:
    blocks = re.findall(
        r"<!-- (?:first: )?(sdk\d).*? -->\n```python\n(.*?)```", ESTIMATORS, re.DOTALL
    )
    assert len(blocks) == ESTIMATORS.count("```python")
    programs = [f"{first_block(version)}\n{code}" for version, code in blocks]
    for page in {DOCS.parent / "README.md", *DOCS.glob("*.md")} - {DOCS / "ESTIMATORS.md"}:
        programs += re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    # A script's loop, of which a page shows what is new.
    elsewhere = "model = batches = train_step = None\n"
    for program in programs:
        command = [
            Path(sys.executable).parent / "ruff",
            "check",
            "--isolated",
            "--select",
            "F821",
            "-",
        ]
        done = subprocess.run(command, input=elsewhere + program, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout


def test_no_block_is_left_out() -> None:
    assert len(PARTS) == PAGES.count("```json") - PAGES.count("<!-- analysis -->") == 4


@pytest.mark.parametrize(("operation", "text"), PARTS, ids=[name for name, _ in PARTS])
def test_a_request_holds_to_the_service_model(operation: str, text: str) -> None:
    tuning: dict[str, Any] = {
        "HyperParameterTuningJobName": "a-tuning",
        "HyperParameterTuningJobConfig": {
            "Strategy": "Bayesian",
            "ResourceLimits": {"MaxParallelTrainingJobs": 2},
        },
    }
    training: dict[str, Any] = {
        "AlgorithmSpecification": {"TrainingImage": "an-image", "TrainingInputMode": "File"},
        "RoleArn": "arn:aws:iam::123456789012:role/SageMakerRole",
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/models/"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 10},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    }

    def whole(operation: str, part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The operation, and its request with what the page leaves out."""
        if operation == "CreateTrainingJob":
            return operation, {"TrainingJobName": "a-job", **training, **part}
        if operation == "CreateHyperParameterTuningJob.TrainingJobDefinition":
            name, _, member = operation.partition(".")
            return name, {**tuning, member: {**training, **part}}
        if operation == "CreateEndpointConfig":
            variant = {
                "VariantName": "all",
                "ModelName": "reviews-3",
                "InstanceType": "ml.m5.xlarge",
            }
            variants = [{**variant, "InitialInstanceCount": 1}]
            return operation, {
                "EndpointConfigName": "a-config",
                "ProductionVariants": variants,
                **part,
            }
        return operation, part

    name, request = whole(operation, json.loads(text))
    shape = SAGEMAKER.operation_model(name).input_shape
    assert shape is not None and list(violations(shape, request)) == []


@pytest.mark.heavy
@pytest.mark.parametrize("version", ["sdk3", "sdk2"])
def test_both_sdks_send_what_the_page_says(
    version: str, aws: Aws, run: Run, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    key = "arn:aws:kms:eu-west-1:123456789012:key/0123"
    vpc = {"Subnets": ["subnet-0123456789abcdef0"], "SecurityGroupIds": ["sg-0123456789abcdef0"]}
    script = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": "s3://bucket/code/sourcedir.tar.gz",
        "sagemaker_torch_distributed_enabled": "true",
    }
    mlflow = "arn:aws:sagemaker:eu-west-1:123456789012:mlflow-app/app-ABCDEFGHIJKL"
    expected: list[dict[str, Any]] = [
        {
            "ResourceConfig": {
                "InstanceType": "ml.g5.2xlarge",
                "InstanceCount": 1,
                "KeepAlivePeriodInSeconds": 1800,
            }
        },
        {
            "InputDataConfig": [
                {
                    "ChannelName": "train",
                    "DataSource": {
                        "FileSystemDataSource": {
                            "FileSystemId": "fs-0123456789abcdef0",
                            "FileSystemType": "FSxLustre",
                            "FileSystemAccessMode": "ro",
                            "DirectoryPath": "/fsx/reviews/train",
                        }
                    },
                }
            ],
            "VpcConfig": vpc,
        },
        {
            "VpcConfig": vpc,
            "EnableInterContainerTrafficEncryption": True,
            "OutputDataConfig": {"S3OutputPath": "s3://bucket/models/", "KmsKeyId": key},
            "ResourceConfig": {
                "InstanceType": "ml.c7i.4xlarge",
                "InstanceCount": 2,
                "VolumeKmsKeyId": key,
            },
        },
        {
            "Environment": {"AMPHORA_STOP_SECONDS": "60", "NCCL_DEBUG": "WARN"},
            "StaticHyperParameters": script,
        },
        {
            "Environment": {"MLFLOW_TRACKING_URI": mlflow, "MLFLOW_EXPERIMENT_NAME": "reviews"},
            "HyperParameters": {"report_to": "mlflow", "model_name_or_path": "bert-base-uncased"},
        },
    ]

    def job_of(request: dict[str, Any]) -> dict[str, Any]:
        """The training job that a request defines."""
        job: dict[str, Any] = request.get("TrainingJobDefinition", request)
        resources = job.pop("HyperParameterTuningResourceConfig", None)
        return job | {"ResourceConfig": resources or job.get("ResourceConfig")}

    def plain(value: Any) -> Any:
        """A text that SDK v2 wrote as JSON, as what it means."""
        try:
            return json.loads(value)
        except (TypeError, ValueError):
            return value

    def missing(part: Any, sent: Any, path: str = "") -> list[str]:
        """What a part of a request says that the request does not."""
        if isinstance(part, dict) and isinstance(sent, dict):
            return [
                text
                for name, value in part.items()
                for text in missing(value, sent.get(name), f"{path}.{name}")
            ]
        if isinstance(part, list) and isinstance(sent, list) and len(part) == len(sent):
            pairs = enumerate(zip(part, sent, strict=True))
            return [text for index, (a, b) in pairs for text in missing(a, b, f"{path}[{index}]")]
        return [] if plain(part) == plain(sent) else [f"{path}: {sent!r} is not {part!r}"]

    sdk2 = re.findall(r"<!-- sdk2 -->\n```python\n(.*?)```", ESTIMATORS, re.DOTALL)
    programs = {"sdk3": [code for _, code in PROGRAMS], "sdk2": sdk2}[version]
    assert len(PROGRAMS) == ESTIMATORS.count("<!-- sdk3") == len(expected) == len(sdk2) + 1
    program = tmp_path / "shown.py"
    program.write_text("\n".join([first_block(version), *programs]))
    done = run(program, preloaded=request.getfixturevalue(version))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    names = ("CreateTrainingJob", "CreateHyperParameterTuningJob")
    sent = [(name, params) for name, params in aws.requests if name in names]
    assert [name for name, _ in sent] == [name for name, _ in PROGRAMS][: len(programs)]
    for part, (_, params) in zip(expected, sent, strict=False):
        assert missing(part, job_of(params)) == []


@pytest.mark.heavy
def test_sdk_v3_deploys_as_the_page_says(
    aws: Aws, run: Run, sdk3: Mapping[str, str], tmp_path: Path
) -> None:
    (code,) = re.findall(r"<!-- sdk3 -->\n```python\n(.*?)```", ENDPOINTS, re.DOTALL)
    aws.objects["bucket/models/job/output/model.tar.gz"] = b""
    program = tmp_path / "shown.py"
    program.write_text(code)
    done = run(program, preloaded=sdk3)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert aws.request_of("CreateEndpoint")["EndpointName"].startswith("texts")
    container = aws.request_of("CreateModel")["PrimaryContainer"]
    assert container["ModelDataUrl"] == "s3://bucket/models/job/output/model.tar.gz"


@pytest.mark.heavy
def test_sdk_v3_trains_on_spot_as_the_page_says(
    aws: Aws, run: Run, sdk3: Mapping[str, str], tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "SPOT.md").read_text(), re.DOTALL)
    program = tmp_path / "shown.py"
    program.write_text(code)
    done = run(program, preloaded=sdk3)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    job = aws.request_of("CreateTrainingJob")
    assert job["EnableManagedSpotTraining"] is True
    assert job["CheckpointConfig"]["S3Uri"] == "s3://bucket/checkpoints/reviews-1"
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 14400, "MaxWaitTimeInSeconds": 28800}


@pytest.mark.heavy
def test_the_page_on_migrating_names_what_the_libraries_changed() -> None:
    program = (
        "import json\nfrom transformers.pipelines import SUPPORTED_TASKS\n"
        "from recipe.backend.pipelines.dropped import PIPELINES\nfrom recipe.task_table import SERVED\n"
        "from recipe.tasks.post_training.trainers import KINDS\n"
        "served = [*SERVED, *(name for name, *_ in PIPELINES)]\n"
        "trainers = {name: kind.trainer for name, kind in KINDS.items()}\n"
        "print(json.dumps([list(SUPPORTED_TASKS), served, trainers]))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "code")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, text=True, capture_output=True
    )
    library, served, kinds = json.loads(done.stdout.splitlines()[-1])
    page = (DOCS / "MIGRATING.md").read_text()
    (dropped,) = re.findall(r"has no pipelines for (.*?)\. `HF_TASK`", page, re.DOTALL)
    names = re.findall(r"`([\w-]+)`", dropped)
    assert len(names) == 7 and not set(names) & set(library)
    assert set(names) <= set(served)
    (trainers, tasks) = re.findall(r"for (`DPOTrainer`.*?): (`dpo`.*?)\n", page, re.DOTALL)[0]
    shown = zip(re.findall(r"`(\w+)Trainer`", trainers), re.findall(r"`(\w+)`", tasks), strict=True)
    assert {task: trainer for trainer, task in shown} == kinds


def test_the_page_on_migrating_is_short_and_says_what_the_code_does() -> None:
    page = (DOCS / "MIGRATING.md").read_text()
    assert len(page.split()) <= 500
    named = set(re.findall(r"`((?:AMPHORA|SAGEMAKER)_[A-Z_]+)", page))
    read = Path(settings.__file__).read_text()
    assert named
    assert not [name for name in named if name not in SETTINGS and f'"{name}"' not in read]

    def cell(row: str, column: int) -> str:
        """A cell of the row whose first cell begins with `row`."""
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
        return line.split(" | ")[column].strip("| ")

    most = re.search(r"up to (\d+)", cell("requests in one batch", 2))
    host = Devices(cpus=2, efa=False, reason="")
    assert most and settings.read(Path("/absent"), {}, host).batch_size == int(most[1])
    assert f"`{selection.PREFIX}*`" == cell("AWS's vLLM image", 2)
    assert f"`{selection._LMI}*` is refused" == cell("LMI (DJL)", 2)
