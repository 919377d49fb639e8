"""Put another model or image behind a running endpoint, without downtime (plain boto3).

    python examples/update_endpoint.py --endpoint NAME --image IMAGE --role ROLE \
        --model s3://bucket/models/newer/model.tar.gz
    python examples/update_endpoint.py --endpoint NAME --role ROLE --package ARN

A new endpoint configuration is the running one with the new model; SageMaker starts its
instances, and moves the traffic when they answer /ping. It does not matter what made the
endpoint. The former model and configuration stay, so that `update_endpoint` with them is the way
back.

Prerequisites: boto3; AWS credentials and a region; an endpoint of one variant; a quota for twice
its instances.
Cost: both sets of instances while it moves, minutes; then as before. The endpoint goes on
running.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import boto3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint", required=True, help="the running endpoint's name")
    parser.add_argument("--role", required=True, help="ARN of the role the model runs under")
    parser.add_argument("--image", help="image_uri in ECR")
    parser.add_argument("--model", help="s3:// name of a model.tar.gz")
    parser.add_argument("--package", help="instead of both: ARN of a version in the Model Registry")
    options = parser.parse_args()
    given = (bool(options.image), bool(options.model), bool(options.package))
    if given not in ((True, True, False), (False, False, True)):
        parser.error("say --image and --model, or --package alone")
    return options


def update(client: Any, endpoint: str, role: str, container: dict[str, str]) -> str:
    """Move `endpoint` to a new model; returns the name of the new model and configuration."""
    running = client.describe_endpoint(EndpointName=endpoint)["EndpointConfigName"]
    config = client.describe_endpoint_config(EndpointConfigName=running)
    variants = config["ProductionVariants"]
    if len(variants) != 1:
        raise SystemExit(f"{endpoint} has {len(variants)} variants: this moves one")
    # Data capture, shadow variants, encryption ...: all that can be asked for.
    request = client.meta.service_model.operation_model("CreateEndpointConfig").input_shape
    kept = {key: config[key] for key in request.members if config.get(key)}
    name = f"{endpoint[:43]}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    client.create_model(
        ModelName=name,
        ExecutionRoleArn=role,
        PrimaryContainer=container,
    )
    client.create_endpoint_config(
        **{
            **kept,
            "EndpointConfigName": name,
            "ProductionVariants": [{**variants[0], "ModelName": name}],
        }
    )
    client.update_endpoint(EndpointName=endpoint, EndpointConfigName=name)
    return name


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    container = {"Image": options.image, "ModelDataUrl": options.model}
    if options.package:
        container = {"ModelPackageName": options.package}
    name = update(client, options.endpoint, options.role, container)
    print(f"moving {options.endpoint} to {name}")
    client.get_waiter("endpoint_in_service").wait(EndpointName=options.endpoint)
    print("in service")


if __name__ == "__main__":
    main()
