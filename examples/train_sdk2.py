"""Train with SDK v2 (`pip install "sagemaker<3"`): the generic Estimator, and the image's recipe.

    python examples/train_sdk2.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        model_name_or_path=bert-base-uncased epochs=2
    python examples/train_sdk2.py --local --image amphora:cpu --train file://$PWD/tweets/train \
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

import boto3
from sagemaker.estimator import Estimator
from sagemaker.local import LocalSession

METRICS = runpy.run_path(str(Path(__file__).parents[1] / "code" / "recipe" / "metrics.py"))
NO_ROLE = "arn:aws:iam::000000000000:role/local"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", default=NO_ROLE, help="ARN of the role the job runs under")
    parser.add_argument("--train", required=True, help="s3:// folder; file:// with --local")
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


def estimator(options: argparse.Namespace) -> Estimator:
    seconds = options.max_hours * 3600
    where: dict[str, Any] = {
        "instance_type": options.instance_type,
        "max_run": seconds,
        "checkpoint_s3_uri": options.checkpoints,
        "keep_alive_period_in_seconds": options.keep_alive,
        "metric_definitions": METRICS["metric_definitions"](task_of(options)),
    }
    if options.spot:
        # max_wait: the run itself, and waiting for capacity.
        where |= {"use_spot_instances": True, "max_wait": 2 * seconds}
    if options.local:
        session = LocalSession(boto3.Session(region_name="us-east-1"))
        session.config = {"local": {"local_code": True}}
        where = {"instance_type": "local", "sagemaker_session": session}
    return Estimator(
        image_uri=options.image,
        role=options.role,
        instance_count=options.instance_count,
        output_path=options.output,
        base_job_name="amphora",
        hyperparameters=dict(pair.split("=", 1) for pair in options.hyperparameters),
        **where,
    )


def main() -> None:
    options = arguments()
    trained = estimator(options)
    channels = {"train": options.train, "test": options.test}
    trained.fit({name: uri for name, uri in channels.items() if uri})
    print(trained.model_data)


if __name__ == "__main__":
    main()
