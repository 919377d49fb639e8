"""Train with SDK v3 (`pip install "sagemaker>=3"`): ModelTrainer, and the image's recipe.

    python examples/train_sdk3.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        model_name_or_path=bert-base-uncased epochs=2
    python examples/train_sdk3.py --local --image amphora:cpu --train $PWD/tweets/train \
        model_name_or_path=bert-base-uncased

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); a role that
may read the image and the data and write to the default bucket; a quota for the instance type
(and for warm pools). The instance type goes with the image: gpu for ml.g* and ml.p*, neuron for
ml.trn1* and ml.trn2*, cpu for ml.c* and ml.m*. --local: Docker with compose instead of all that.
Cost: instance-count x the instance type's hourly price for as long as the job runs, minutes to
hours, at most --max-hours; a warm pool costs the same until --keep-alive seconds have passed.
Nothing is left running. Spot is cheaper, and may wait and be interrupted. --local: none.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

from sagemaker.core.training.configs import (
    CheckpointConfig,
    Compute,
    InputData,
    MetricDefinition,
    OutputDataConfig,
    StoppingCondition,
)
from sagemaker.train.model_trainer import Mode, ModelTrainer

METRICS = runpy.run_path(str(Path(__file__).parents[1] / "code" / "recipe" / "metrics.py"))
NO_ROLE = "arn:aws:iam::000000000000:role/local"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", default=NO_ROLE, help="ARN of the role the job runs under")
    parser.add_argument("--train", required=True, help="s3:// folder; a folder here with --local")
    parser.add_argument("--test", help="the same for evaluation data")
    parser.add_argument("--output", help="s3:// folder for the model; default: the default bucket")
    parser.add_argument("--instance-type", default="ml.g5.2xlarge")
    parser.add_argument("--instance-count", type=int, default=1)
    parser.add_argument("--max-hours", type=int, default=24)
    parser.add_argument("--checkpoints", help="s3:// folder; a restarted job resumes from there")
    parser.add_argument("--spot", action="store_true", help="spot instances; wants --checkpoints")
    parser.add_argument("--keep-alive", type=int, help="seconds a warm pool stays; not with --spot")
    parser.add_argument("--local", action="store_true", help="in containers on this machine")
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY=VALUE", help="docs/TRAINING.md")
    return parser.parse_args()


def task_of(options: argparse.Namespace) -> str:
    """The recipe's task, if it is named: some tasks have metrics of their own."""
    return dict(pair.split("=", 1) for pair in options.hyperparameters).get("task", "")


def trainer(options: argparse.Namespace) -> ModelTrainer:
    seconds = options.max_hours * 3600
    where: dict[str, Any] = {
        "training_mode": Mode.SAGEMAKER_TRAINING_JOB,
        "compute": Compute(
            instance_type=options.instance_type,
            instance_count=options.instance_count,
            volume_size_in_gb=100,
            enable_managed_spot_training=options.spot,
            keep_alive_period_in_seconds=options.keep_alive,
        ),
        "stopping_condition": StoppingCondition(
            max_runtime_in_seconds=seconds,
            # The run itself, and waiting for capacity.
            max_wait_time_in_seconds=2 * seconds if options.spot else None,
        ),
    }
    if options.output:
        where["output_data_config"] = OutputDataConfig(s3_output_path=options.output)
    if options.checkpoints:
        where["checkpoint_config"] = CheckpointConfig(s3_uri=options.checkpoints)
    if options.local:
        where = {
            "training_mode": Mode.LOCAL_CONTAINER,
            "compute": Compute(instance_type="local", instance_count=options.instance_count),
        }
    return ModelTrainer(
        training_image=options.image,
        role=options.role,
        base_job_name="amphora",
        hyperparameters=dict(pair.split("=", 1) for pair in options.hyperparameters),
        **where,
    )


def main() -> None:
    options = arguments()
    channels = (("train", options.train), ("test", options.test))
    job = trainer(options).with_metric_definitions(
        [
            MetricDefinition(name=definition["Name"], regex=definition["Regex"])
            for definition in METRICS["metric_definitions"](task_of(options))
        ]
    )
    job.train([InputData(channel_name=name, data_source=uri) for name, uri in channels if uri])
    if not options.local:
        print(job._latest_training_job.model_artifacts.s3_model_artifacts)


if __name__ == "__main__":
    main()
