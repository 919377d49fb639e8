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
