"""Search hyperparameters with SDK v3 (`pip install "sagemaker>=3"`): HyperparameterTuner.

    python examples/tune_sdk3.py --image IMAGE --role ROLE --train s3://bucket/tweets/train/ \
        model_name_or_path=bert-base-uncased

The objective is read from the job's log by one of the recipe's metric definitions.

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); a role that
may read the image and the data and write to the default bucket; a quota for --parallel
instances.
Cost: --jobs training jobs, each an instance's hourly price for as long as it runs. Nothing is
left running.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

from sagemaker.core.parameter import CategoricalParameter, ContinuousParameter
from sagemaker.core.training.configs import Compute, InputData
from sagemaker.train.model_trainer import ModelTrainer
from sagemaker.train.tuner import HyperparameterTuner

METRICS = runpy.run_path(str(Path(__file__).parents[1] / "code" / "recipe" / "metrics.py"))
LESS_IS_BETTER = ("loss", "mse", "perplexity")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the jobs run under")
    parser.add_argument("--train", required=True, help="s3:// folder of training data")
    parser.add_argument("--instance-type", default="ml.g5.2xlarge")
    parser.add_argument("--objective", default="eval_f1_macro", choices=METRICS["metric_names"]())
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY=VALUE", help="docs/TRAINING.md")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    trainer = ModelTrainer(
        training_image=options.image,
        role=options.role,
        compute=Compute(instance_type=options.instance_type, instance_count=1),
        hyperparameters=dict(pair.split("=", 1) for pair in options.hyperparameters),
    )
    tuner = HyperparameterTuner(
        trainer,
        objective_metric_name=options.objective,
        objective_type="Minimize" if options.objective.endswith(LESS_IS_BETTER) else "Maximize",
        metric_definitions=METRICS["metric_definitions"](),
        hyperparameter_ranges={
            "learning_rate": ContinuousParameter(1e-5, 2e-4, scaling_type="Logarithmic"),
            "per_device_train_batch_size": CategoricalParameter([16, 32, 64]),
        },
        max_jobs=options.jobs,
        max_parallel_jobs=options.parallel,
        base_tuning_job_name="amphora",
    )
    tuner.tune([InputData(channel_name="train", data_source=options.train)])
    print(tuner.best_training_job())


if __name__ == "__main__":
    main()
