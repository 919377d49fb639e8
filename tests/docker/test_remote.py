"""SDK v2's @remote: the job that it asks AWS for is run in the image, and the client gets the result."""

import ast
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import transformers

from tests.docker.conftest import Docker
from tests.examples.aws import Aws
from tests.examples.conftest import Run, aws, boto3, run, sdk2  # noqa: F401, fixtures

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]


def test_a_remote_function_runs_in_the_image(
    docker: Docker,
    cpu_image: str,
    aws: Aws,  # noqa: F811
    run: Run,  # noqa: F811
    sdk2: Mapping[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    role = "arn:aws:iam::123456789012:role/SageMakerRole"
    program = Path(__file__).parent / "remote_sdk2.py"
    submitted = run(program, "submit", cpu_image, role, preloaded=sdk2)
    assert submitted.returncode == 0, submitted.stderr
    job = aws.request_of("CreateTrainingJob")
    for channel in job["InputDataConfig"]:
        prefix = channel["DataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://")
        folder = tmp_path / "input" / "data" / channel["ChannelName"]
        folder.mkdir(parents=True)
        for key in [key for key in aws.objects if key.startswith(prefix)]:
            (folder / Path(key).name).write_bytes(aws.objects[key])
    (tmp_path / "input" / "config").mkdir()
    host = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    kind = {"current_instance_type": "ml.m5.large", "current_group_name": "homogeneousCluster"}
    group = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.m5.large"}
    groups = {"instance_groups": [{**group, "hosts": ["algo-1"]}]}
    (tmp_path / "input" / "config" / "resourceconfig.json").write_text(
        json.dumps({**host, **kind, **groups})
    )
    entry, *script = job["AlgorithmSpecification"]["ContainerEntrypoint"]
    done = docker(
        "run", "--rm", "--network", "host", "--entrypoint", entry,
        "-v", f"{tmp_path / 'input'}:/opt/ml/input",
        "-e", f"AWS_ENDPOINT_URL={aws.url}", "-e", "AWS_ACCESS_KEY_ID=id", "-e", "AWS_SECRET_ACCESS_KEY=secret",
        "-e", f"TRAINING_JOB_NAME={job['TrainingJobName']}",
        *(word for pair in job["Environment"].items() for word in ("-e", "=".join(pair))),
        cpu_image, *script, *job["AlgorithmSpecification"]["ContainerArguments"],
        check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    aws.before, aws.requests = aws.requests, []
    outcome = run(program, "result", job["TrainingJobName"], preloaded=sdk2)
    assert outcome.returncode == 0, outcome.stderr
    result = ast.literal_eval(outcome.stdout.splitlines()[-1])
    # The client has no transformers: the function ran beside the image's own.
    assert result == {"halves": [0.5, 1.0], "transformers": transformers.__version__}
