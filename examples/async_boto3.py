"""Asynchronous inference with plain boto3: large or slow requests, through S3.

    python examples/async_boto3.py --image IMAGE --role ROLE \
        --model s3://bucket/models/model.tar.gz --data s3://bucket/questions.json \
        --output s3://bucket/answers/

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); a
request's body (JSON here) in S3; a role that may read the image, the model and the body and
write the answers.
Cost: the instance's hourly price for as long as the endpoint exists; it is deleted at the end,
unless --keep is given.
"""

from __future__ import annotations

import argparse
import time

import boto3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the model runs under")
    parser.add_argument("--model", required=True, help="s3:// name of a model.tar.gz")
    parser.add_argument("--data", required=True, help="s3:// name of a request's body")
    parser.add_argument("--output", required=True, help="s3:// folder for the answers")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    parser.add_argument(
        "--most", type=int, default=0, metavar="INSTANCES", help="scale from none to so many"
    )
    parser.add_argument("--keep", action="store_true", help="leave the endpoint running")
    return parser.parse_args()


def wait_for(uri: str, seconds: int = 900) -> bytes:
    """The object of this name, once it exists."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for _ in range(seconds // 5):
        try:
            return client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except client.exceptions.NoSuchKey:
            time.sleep(5)
    raise SystemExit(f"no answer at {uri} within {seconds} s: look into the endpoint's log")


def scale(name: str, most: int) -> None:
    """Let the number of instances follow the waiting requests, down to none.

    Target tracking divides the backlog by the instances, so that it says nothing while there are
    none: an alarm on `HasBacklogWithoutCapacity` starts the first.
    """
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/all",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    of_endpoint = [{"Name": "EndpointName", "Value": name}]
    client = boto3.client("application-autoscaling")
    client.register_scalable_target(**target, MinCapacity=0, MaxCapacity=most)
    client.put_scaling_policy(
        **target,
        PolicyName=f"{name}-backlog",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration={
            "TargetValue": 5.0,
            "CustomizedMetricSpecification": {
                "MetricName": "ApproximateBacklogSizePerInstance",
                "Namespace": "AWS/SageMaker",
                "Dimensions": of_endpoint,
                "Statistic": "Average",
            },
            "ScaleOutCooldown": 120,
            "ScaleInCooldown": 600,
        },
    )
    first = client.put_scaling_policy(
        **target,
        PolicyName=f"{name}-first",
        PolicyType="StepScaling",
        StepScalingPolicyConfiguration={
            "AdjustmentType": "ChangeInCapacity",
            "MetricAggregationType": "Average",
            "Cooldown": 300,
            "StepAdjustments": [{"MetricIntervalLowerBound": 0, "ScalingAdjustment": 1}],
        },
    )
    alarms = {
        # An alarm that starts the first instance, and one that tells a person: requests get old.
        "HasBacklogWithoutCapacity": ("Average", 1.0, [first["PolicyARN"]]),
        "ApproximateAgeOfOldestRequest": ("Maximum", 900.0, []),
    }
    for metric, (statistic, threshold, actions) in alarms.items():
        boto3.client("cloudwatch").put_metric_alarm(
            AlarmName=f"{name}-{metric}",
            MetricName=metric,
            Namespace="AWS/SageMaker",
            Dimensions=of_endpoint,
            Statistic=statistic,
            Period=60,
            EvaluationPeriods=2,
            Threshold=threshold,
            ComparisonOperator="GreaterThanOrEqualToThreshold",
            TreatMissingData="missing",
            AlarmActions=actions,
        )


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    name = f"amphora-async-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    client.create_model(
        ModelName=name,
        ExecutionRoleArn=options.role,
        PrimaryContainer={"Image": options.image, "ModelDataUrl": options.model},
    )
    client.create_endpoint_config(
        EndpointConfigName=name,
        ProductionVariants=[
            {
                "VariantName": "all",
                "ModelName": name,
                "InstanceType": options.instance_type,
                "InitialInstanceCount": 1,
            }
        ],
        AsyncInferenceConfig={"OutputConfig": {"S3OutputPath": options.output}},
    )
    client.create_endpoint(EndpointName=name, EndpointConfigName=name)
    try:
        client.get_waiter("endpoint_in_service").wait(EndpointName=name)
        if options.most:
            scale(name, options.most)
        accepted = boto3.client("sagemaker-runtime").invoke_endpoint_async(
            EndpointName=name, InputLocation=options.data, ContentType="application/json"
        )
        print(wait_for(accepted["OutputLocation"]).decode())
    finally:
        if options.keep:
            print(f"still running: {name}")
        else:
            client.delete_endpoint(EndpointName=name)
            client.delete_endpoint_config(EndpointConfigName=name)
            client.delete_model(ModelName=name)


if __name__ == "__main__":
    main()
