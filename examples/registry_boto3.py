"""The Model Registry, with plain boto3: list versions, approve one, deploy the approved one.

    python examples/registry_boto3.py --group reviews
    python examples/registry_boto3.py --group reviews --approve 3 --because "f1 0.91 in May"
    python examples/registry_boto3.py --group reviews --deploy texts --role ROLE

`pipeline_sdk2.py` adds models to the group. --deploy creates an endpoint with the newest approved
version; to update a running one, use `update_endpoint.py --package ARN`. It keeps running:
delete it with `aws sagemaker delete-endpoint`.

Prerequisites: boto3; AWS credentials and a region; for --deploy a role that may read image and
model.
Cost: nothing for list and approval; the endpoint's instance as long as it runs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import boto3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", required=True, help="of the Model Registry")
    parser.add_argument("--approve", type=int, metavar="VERSION")
    parser.add_argument("--because", help="the reason, which stays with the version")
    parser.add_argument("--deploy", metavar="ENDPOINT", help="name of a new endpoint")
    parser.add_argument("--role", help="ARN of the role the model runs under")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    options = parser.parse_args()
    if options.approve is not None and not options.because:
        parser.error("--approve wants its reason: --because TEXT")
    if options.deploy and not options.role:
        parser.error("--deploy wants --role")
    return options


def versions(client: Any, group: str, **filters: Any) -> list[dict[str, Any]]:
    """Versions of a group, the newest first."""
    pages = client.get_paginator("list_model_packages").paginate(
        ModelPackageGroupName=group, SortBy="CreationTime", SortOrder="Descending", **filters
    )
    return [version for page in pages for version in page["ModelPackageSummaryList"]]


def approve(client: Any, group: str, number: int, reason: str) -> None:
    named = [
        version
        for version in versions(client, group)
        if version.get("ModelPackageVersion") == number
    ]
    if not named:
        raise SystemExit(f"{group} has no version {number}")
    client.update_model_package(
        ModelPackageArn=named[0]["ModelPackageArn"],
        ModelApprovalStatus="Approved",
        ApprovalDescription=reason,
    )


def deploy(client: Any, options: argparse.Namespace) -> None:
    approved = versions(client, options.group, ModelApprovalStatus="Approved")
    if not approved:
        raise SystemExit(f"{options.group} has no approved version: --approve VERSION")
    package = approved[0]["ModelPackageArn"]
    name = f"{options.deploy[:43]}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    client.create_model(
        ModelName=name,
        ExecutionRoleArn=options.role,
        Containers=[{"ModelPackageName": package}],
    )
    variant = {
        "VariantName": "all",
        "ModelName": name,
        "InstanceType": options.instance_type,
        "InitialInstanceCount": 1,
    }
    client.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant])
    client.create_endpoint(EndpointName=options.deploy, EndpointConfigName=name)
    client.get_waiter("endpoint_in_service").wait(EndpointName=options.deploy)
    print(f"{options.deploy} serves {package}")


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    if options.approve is not None:
        approve(client, options.group, options.approve, options.because)
    if options.deploy:
        deploy(client, options)
    for version in versions(client, options.group):
        print(version["ModelPackageArn"], version["ModelApprovalStatus"])


if __name__ == "__main__":
    main()
