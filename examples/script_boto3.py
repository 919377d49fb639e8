"""Train your own script with plain boto3: the code as an archive in S3.

    python examples/script_boto3.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        --output s3://bucket/models/ --code s3://bucket/code/ \
        model_name_or_path=bert-base-uncased epochs=1

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); a role
that may read the image, the data and the code and write the output; a quota for the instance
type.
Cost: one instance's hourly price for as long as the script runs, minutes for small data, at most
an hour here. Nothing is left running but a few kilobytes in S3.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
import time
from pathlib import Path

import boto3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the job runs under")
    parser.add_argument("--train", required=True, help="s3:// folder of training data")
    parser.add_argument("--output", required=True, help="s3:// folder for the model")
    parser.add_argument("--code", required=True, help="s3:// folder for the code")
    parser.add_argument("--source-dir", type=Path, default=Path(__file__).parent / "script")
    parser.add_argument("--entry-point", default="train.py", help="a file in --source-dir")
    parser.add_argument("--instance-type", default="ml.g5.2xlarge")
    parser.add_argument("--instance-count", type=int, default=1)
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args()


def upload(source_dir: Path, uri: str) -> str:
    """The s3:// name of an archive of the folder's files."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for path in sorted(source_dir.iterdir()):
                archive.add(path, path.name)
        file.seek(0)
        bucket, _, prefix = uri.removeprefix("s3://").rstrip("/").partition("/")
        key = f"{prefix}/sourcedir.tar.gz".lstrip("/")
        boto3.client("s3").upload_fileobj(file, bucket, key)
    return f"s3://{bucket}/{key}"


def main() -> None:
    options = arguments()
    code = {
        "sagemaker_program": options.entry_point,
        "sagemaker_submit_directory": upload(options.source_dir, options.code),
    }
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": options.train,
        "S3DataDistributionType": "FullyReplicated",
    }
    client = boto3.client("sagemaker")
    name = f"amphora-script-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    client.create_training_job(
        TrainingJobName=name,
        RoleArn=options.role,
        AlgorithmSpecification={"TrainingImage": options.image, "TrainingInputMode": "File"},
        InputDataConfig=[{"ChannelName": "train", "DataSource": {"S3DataSource": source}}],
        OutputDataConfig={"S3OutputPath": options.output},
        ResourceConfig={
            "InstanceType": options.instance_type,
            "InstanceCount": options.instance_count,
            "VolumeSizeInGB": 100,
        },
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
        HyperParameters=dict(pair.split("=", 1) for pair in options.hyperparameters) | code,
    )
    print(f"started {name}")
    client.get_waiter("training_job_completed_or_stopped").wait(TrainingJobName=name)
    done = client.describe_training_job(TrainingJobName=name)
    print(done["TrainingJobStatus"], done.get("FailureReason", ""))


if __name__ == "__main__":
    main()
