"""Train your own script with SDK v3 (`pip install "sagemaker>=3"`): ModelTrainer, SourceCode.

    python examples/script_sdk3.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        model_name_or_path=bert-base-uncased epochs=1
    python examples/script_sdk3.py --local --image amphora:cpu --train $PWD/tweets/train \
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

from sagemaker.core.training.configs import Compute, InputData, SourceCode, StoppingCondition
from sagemaker.train.distributed import Torchrun
from sagemaker.train.model_trainer import Mode, ModelTrainer

NO_ROLE = "arn:aws:iam::000000000000:role/local"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", default=NO_ROLE, help="ARN of the role the job runs under")
    parser.add_argument("--train", required=True, help="s3:// folder; a folder here with --local")
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
    where: dict[str, Any] = {
        "training_mode": Mode.SAGEMAKER_TRAINING_JOB,
        "compute": Compute(
            instance_type=options.instance_type, instance_count=options.instance_count
        ),
        "stopping_condition": StoppingCondition(max_runtime_in_seconds=3600),
    }
    if options.local:
        where = {
            "training_mode": Mode.LOCAL_CONTAINER,
            "compute": Compute(instance_type="local", instance_count=options.instance_count),
        }
    trainer = ModelTrainer(
        training_image=options.image,
        role=options.role,
        source_code=SourceCode(
            source_dir=str(options.source_dir), entry_script=options.entry_point
        ),
        distributed=Torchrun() if options.torchrun else None,
        base_job_name="amphora-script",
        hyperparameters=dict(pair.split("=", 1) for pair in options.hyperparameters),
        **where,
    )
    trainer.train([InputData(channel_name="train", data_source=options.train)])


if __name__ == "__main__":
    main()
