"""Search hyperparameters with plain boto3: CreateHyperParameterTuningJob on the image's recipe.

    python examples/tune_boto3.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        --output s3://bucket/models/ model_name_or_path=bert-base-uncased

The objective is read from the job's log by one of the recipe's metric definitions.

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); a role
that may read the image and the data and write the output; a quota for --parallel instances.
Cost: --jobs training jobs, each an instance's hourly price for as long as it runs. Nothing is
left running.
"""

from __future__ import annotations

import argparse
import runpy
import time
from pathlib import Path

import boto3

METRICS = runpy.run_path(str(Path(__file__).parents[1] / "code" / "recipe" / "metrics.py"))
LESS_IS_BETTER = ("loss", "mse", "perplexity")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the jobs run under")
    parser.add_argument("--train", required=True, help="s3:// folder of training data")
    parser.add_argument("--output", required=True, help="s3:// folder for the models")
    parser.add_argument("--instance-type", default="ml.g5.2xlarge")
    parser.add_argument("--objective", default="eval_f1_macro", choices=METRICS["metric_names"]())
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY=VALUE", help="docs/TRAINING.md")
    return parser.parse_args()


def training_of(options: argparse.Namespace) -> dict[str, object]:
    """What each training job is given beside what is searched for."""
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": options.train,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            "TrainingImage": options.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": METRICS["metric_definitions"](),
        },
        "InputDataConfig": [{"ChannelName": "train", "DataSource": {"S3DataSource": source}}],
        "OutputDataConfig": {"S3OutputPath": options.output},
        "ResourceConfig": {
            "InstanceType": options.instance_type,
            "InstanceCount": 1,
            "VolumeSizeInGB": 100,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 24 * 3600},
        "StaticHyperParameters": dict(pair.split("=", 1) for pair in options.hyperparameters),
    }


def tuning_of(options: argparse.Namespace) -> dict[str, object]:
    """What is searched for, and how."""
    goal = "Minimize" if options.objective.endswith(LESS_IS_BETTER) else "Maximize"
    return {
        "Strategy": "Bayesian",
        "HyperParameterTuningJobObjective": {"Type": goal, "MetricName": options.objective},
        "ResourceLimits": {
            "MaxNumberOfTrainingJobs": options.jobs,
            "MaxParallelTrainingJobs": options.parallel,
        },
        "ParameterRanges": {
            "ContinuousParameterRanges": [
                {
                    "Name": "learning_rate",
                    "MinValue": "1e-5",
                    "MaxValue": "2e-4",
                    "ScalingType": "Logarithmic",
                }
            ],
            "CategoricalParameterRanges": [
                {"Name": "per_device_train_batch_size", "Values": ["16", "32", "64"]}
            ],
        },
    }


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    name = f"amphora-{time.strftime('%y%m%d-%H%M%S')}"  # at most 32 characters
    client.create_hyper_parameter_tuning_job(
        HyperParameterTuningJobName=name,
        HyperParameterTuningJobConfig=tuning_of(options),
        TrainingJobDefinition=training_of(options),
    )
    print(f"started {name}")
    while True:
        job = client.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
        if job["HyperParameterTuningJobStatus"] in ("Completed", "Failed", "Stopped"):
            break
        time.sleep(60)
    best = job.get("BestTrainingJob", {})
    print(best.get("TrainingJobName"), best.get("TunedHyperParameters"))


if __name__ == "__main__":
    main()
