"""A pipeline with SDK v2 (`pip install "sagemaker<3"`): train, judge, register the model.

    python examples/pipeline_sdk2.py --image IMAGE --role ROLE --group reviews \
        --train s3://bucket/tweets/train/ --test s3://bucket/tweets/test/ --least 0.8 \
        model_name_or_path=bert-base-uncased

It makes (or changes) the pipeline and starts it. A model whose metric is high enough waits in the
Model Registry for approval; then `registry_boto3.py` deploys it. Name the image by its digest: a
step is skipped if its arguments equal those of an earlier run, and a tag may stay the same while
the image changes.

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); a role that may
read the image and the data, write to the default bucket, and call SageMaker; a quota for the
instance.
Cost: the instance's hourly price for as long as it trains; then the model's storage.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

from sagemaker.estimator import Estimator
from sagemaker.model import Model
from sagemaker.workflow.condition_step import ConditionStep
from sagemaker.workflow.conditions import ConditionGreaterThanOrEqualTo
from sagemaker.workflow.fail_step import FailStep
from sagemaker.workflow.functions import Join
from sagemaker.workflow.model_step import ModelStep
from sagemaker.workflow.parameters import ParameterFloat, ParameterString
from sagemaker.workflow.pipeline import Pipeline
from sagemaker.workflow.pipeline_context import PipelineSession
from sagemaker.workflow.steps import CacheConfig, TrainingStep

METRICS = runpy.run_path(str(Path(__file__).parents[1] / "code" / "recipe" / "metrics.py"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role of pipeline, job and model")
    parser.add_argument("--group", required=True, help="of the Model Registry; made if missing")
    parser.add_argument("--train", required=True, help="s3:// folder of training data")
    parser.add_argument("--test", required=True, help="s3:// folder that the metric is measured on")
    parser.add_argument("--metric", default="eval_f1_macro", choices=METRICS["metric_names"]())
    parser.add_argument("--least", type=float, default=0.8, help="to be registered")
    parser.add_argument("--instance-type", default="ml.g5.2xlarge")
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY=VALUE", help="docs/TRAINING.md")
    return parser.parse_args()


def pipeline(options: argparse.Namespace) -> Pipeline:
    session = PipelineSession()
    train = ParameterString("Train", default_value=options.train)
    test = ParameterString("Test", default_value=options.test)
    least = ParameterFloat("Least", default_value=options.least)
    estimator = Estimator(
        image_uri=options.image,
        role=options.role,
        instance_type=options.instance_type,
        instance_count=1,
        hyperparameters=dict(pair.split("=", 1) for pair in options.hyperparameters),
        metric_definitions=METRICS["metric_definitions"](),
        disable_profiler=True,
        sagemaker_session=session,
    )
    training = TrainingStep(
        "Train",
        step_args=estimator.fit({"train": train, "test": test}),
        cache_config=CacheConfig(enable_caching=True, expire_after="P30D"),
    )
    model = Model(
        image_uri=options.image,
        model_data=training.properties.ModelArtifacts.S3ModelArtifacts,
        role=options.role,
        sagemaker_session=session,
    )
    registration = ModelStep(
        "Register",
        step_args=model.register(
            content_types=["application/json", "application/jsonlines", "text/csv"],
            response_types=["application/json", "application/jsonlines", "text/csv"],
            inference_instances=["ml.m5.xlarge", "ml.g5.xlarge"],
            transform_instances=["ml.m5.xlarge", "ml.g5.xlarge"],
            model_package_group_name=options.group,
            approval_status="PendingManualApproval",
        ),
    )
    value = training.properties.FinalMetricDataList[options.metric].Value
    refusal = Join(on=" ", values=[f"{options.metric} is below", least])
    decision = ConditionStep(
        "GoodEnough",
        conditions=[ConditionGreaterThanOrEqualTo(left=value, right=least)],
        if_steps=[registration],
        else_steps=[FailStep("TooLow", error_message=refusal)],
    )
    return Pipeline(
        f"amphora-{options.group}",
        parameters=[train, test, least],
        steps=[training, decision],
        sagemaker_session=session,
    )


def main() -> None:
    options = arguments()
    built = pipeline(options)
    built.upsert(role_arn=options.role)
    print(built.start().arn)


if __name__ == "__main__":
    main()
