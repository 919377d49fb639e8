"""Train with plain boto3: CreateTrainingJob, and wait for its end.

    python examples/train_boto3.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        --output s3://bucket/models/ model_name_or_path=bert-base-uncased epochs=2

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); a role
that may read the image and the data and write the output; a quota for the instance type (and for
warm pools). The instance type goes with the image: gpu for ml.g* and ml.p*, neuron for ml.trn1*
and ml.trn2*, cpu for ml.c* and ml.m*.
Cost: instance-count x the instance type's hourly price for as long as the job runs, minutes to
hours, at most --max-hours; a warm pool costs the same until --keep-alive seconds have passed.
Nothing is left running. Spot is cheaper, and may wait and be interrupted.
"""

from __future__ import annotations

import argparse
import runpy
import time
from pathlib import Path
from typing import Any

import boto3

METRICS = runpy.run_path(str(Path(__file__).parents[1] / "code" / "recipe" / "metrics.py"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the job runs under")
    parser.add_argument("--train", required=True, help="s3:// folder of training data")
    parser.add_argument("--test", help="s3:// folder of evaluation data")
    parser.add_argument("--output", required=True, help="s3:// folder for the model")
    parser.add_argument("--instance-type", default="ml.g5.2xlarge")
    parser.add_argument("--instance-count", type=int, default=1)
    parser.add_argument("--max-hours", type=int, default=24)
    parser.add_argument("--checkpoints", help="s3:// folder; a restarted job resumes from there")
    parser.add_argument("--spot", action="store_true", help="spot instances; wants --checkpoints")
    parser.add_argument("--keep-alive", type=int, help="seconds a warm pool stays; not with --spot")
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY=VALUE", help="docs/TRAINING.md")
    return parser.parse_args()


def task_of(options: argparse.Namespace) -> str:
    """The recipe's task, if it is named: some tasks have metrics of their own."""
    return dict(pair.split("=", 1) for pair in options.hyperparameters).get("task", "")


def request(options: argparse.Namespace) -> dict[str, Any]:
    """The parameters of CreateTrainingJob."""
    resources = {
        "InstanceType": options.instance_type,
        "InstanceCount": options.instance_count,
        "VolumeSizeInGB": 100,
    }
    if options.keep_alive:
        resources["KeepAlivePeriodInSeconds"] = options.keep_alive
    seconds = options.max_hours * 3600
    stopping = {"MaxRuntimeInSeconds": seconds}
    if options.spot:
        stopping["MaxWaitTimeInSeconds"] = 2 * seconds  # the run itself, and waiting for capacity
    job = {
        "TrainingJobName": f"amphora-{time.strftime('%Y-%m-%d-%H-%M-%S')}",
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            "TrainingImage": options.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": METRICS["metric_definitions"](task_of(options)),
        },
        "InputDataConfig": [
            channel(name, uri)
            for name, uri in (("train", options.train), ("test", options.test))
            if uri
        ],
        "OutputDataConfig": {"S3OutputPath": options.output},
        "ResourceConfig": resources,
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": options.spot,
        # Values are strings, whatever they mean.
        "HyperParameters": dict(pair.split("=", 1) for pair in options.hyperparameters),
    }
    if options.checkpoints:
        job["CheckpointConfig"] = {"S3Uri": options.checkpoints}
    return job


def channel(name: str, uri: str) -> dict[str, Any]:
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": uri,
                "S3DataDistributionType": "FullyReplicated",
            }
        },
    }


def main() -> None:
    job = request(arguments())
    client = boto3.client("sagemaker")
    client.create_training_job(**job)
    name = job["TrainingJobName"]
    print(f"started {name}")
    client.get_waiter("training_job_completed_or_stopped").wait(TrainingJobName=name)
    done = client.describe_training_job(TrainingJobName=name)
    print(done["TrainingJobStatus"], done.get("FailureReason", ""))
    print(done["ModelArtifacts"]["S3ModelArtifacts"])


if __name__ == "__main__":
    main()
