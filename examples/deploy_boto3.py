"""Deploy a trained model with plain boto3, real-time or serverless, and send a request.

    python examples/deploy_boto3.py --image IMAGE --role ROLE --model s3://bucket/models/model.tar.gz
    python examples/deploy_boto3.py ... --serverless 4096

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh; cpu for
serverless); a role that may read the image and the model; a quota for the instance type.
Cost: the instance's hourly price for as long as the endpoint exists, idle or not. Serverless: by
the second of work and the memory. It is deleted at the end, unless --keep is given.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import boto3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the model runs under")
    parser.add_argument("--model", required=True, help="s3:// name of a model.tar.gz")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    parser.add_argument("--serverless", type=int, metavar="MB", help="no instance: so much memory")
    parser.add_argument("--text", default="What a storm last night")
    parser.add_argument("--keep", action="store_true", help="leave the endpoint running")
    return parser.parse_args()


def variant(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Where the model runs."""
    if options.serverless:
        where: dict[str, Any] = {
            "ServerlessConfig": {"MemorySizeInMB": options.serverless, "MaxConcurrency": 5}
        }
    else:
        where = {"InstanceType": options.instance_type, "InitialInstanceCount": 1}
    return {"VariantName": "all", "ModelName": model, **where}


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    name = f"amphora-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    client.create_model(
        ModelName=name,
        ExecutionRoleArn=options.role,
        PrimaryContainer={"Image": options.image, "ModelDataUrl": options.model},
    )
    client.create_endpoint_config(
        EndpointConfigName=name, ProductionVariants=[variant(name, options)]
    )
    client.create_endpoint(EndpointName=name, EndpointConfigName=name)
    try:
        client.get_waiter("endpoint_in_service").wait(EndpointName=name)
        answer = boto3.client("sagemaker-runtime").invoke_endpoint(
            EndpointName=name,
            ContentType="application/json",
            Body=json.dumps({"inputs": [options.text]}),
        )
        print(json.load(answer["Body"]))
    finally:
        if options.keep:
            print(f"still running: {name}")
        else:
            client.delete_endpoint(EndpointName=name)
            client.delete_endpoint_config(EndpointConfigName=name)
            client.delete_model(ModelName=name)


if __name__ == "__main__":
    main()
