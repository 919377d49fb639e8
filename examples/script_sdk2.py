"""Train your own script with SDK v2 (`pip install "sagemaker<3"`): the PyTorch estimator.

    python examples/script_sdk2.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        model_name_or_path=bert-base-uncased epochs=1
    python examples/script_sdk2.py --local --image amphora:cpu --train file://$PWD/tweets/train \
        model_name_or_path=bert-base-uncased

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); a role that
may read the image and the data and use the default bucket; a quota for the instance type.
--local: Docker with compose instead of all that.
Cost: instance-count x the instance type's hourly price for as long as the script runs, minutes
for small data, at most an hour here. Nothing is left running. --local: none.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import boto3
from sagemaker.local import LocalSession
from sagemaker.pytorch import PyTorch

NO_ROLE = "arn:aws:iam::000000000000:role/local"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", default=NO_ROLE, help="ARN of the role the job runs under")
    parser.add_argument("--train", required=True, help="s3:// folder; file:// with --local")
    parser.add_argument("--source-dir", type=Path, default=Path(__file__).parent / "script")
    parser.add_argument("--entry-point", default="train.py", help="a file in --source-dir")
    parser.add_argument("--instance-type", default="ml.g5.2xlarge")
    parser.add_argument("--instance-count", type=int, default=1)
    parser.add_argument("--torchrun", action="store_true", help="for a script that is distributed")
    parser.add_argument("--local", action="store_true", help="in containers on this machine")
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    where: dict[str, Any] = {"instance_type": options.instance_type, "max_run": 3600}
    if options.local:
        session = LocalSession(boto3.Session(region_name="us-east-1"))
        session.config = {"local": {"local_code": True}}
        where = {"instance_type": "local", "sagemaker_session": session}
    if options.torchrun:
        where["distribution"] = {"torch_distributed": {"enabled": True}}
    estimator = PyTorch(
        image_uri=options.image,
        role=options.role,
        entry_point=options.entry_point,
        source_dir=str(options.source_dir),
        instance_count=options.instance_count,
        base_job_name="amphora-script",
        hyperparameters=dict(pair.split("=", 1) for pair in options.hyperparameters),
        **where,
    )
    estimator.fit({"train": options.train})
    print(estimator.model_data)


if __name__ == "__main__":
    main()
