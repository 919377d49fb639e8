"""Several models share an endpoint's instances as inference components, with plain boto3.

    python examples/components_boto3.py --image IMAGE --role ROLE \
        --model tweets=s3://bucket/tweets/model.tar.gz --model emotion=s3://bucket/emotion/model.tar.gz

Each model has its own container with a share of the CPUs (or GPUs) and of the memory. The number of
its copies is scaled automatically, and SageMaker places them on the instances.

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); a role
that may read the image and the models; a quota for the instances; an instance type that
inference components take (no serverless, no ml.t2).
Cost: the instances' hourly price for as long as the endpoint exists; it is deleted at the end,
unless --keep is given.
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
    parser.add_argument("--role", required=True, help="ARN of the role the endpoint runs under")
    parser.add_argument(
        "--model",
        required=True,
        action="append",
        metavar="NAME=S3",
        help="a name and the s3:// name of its model.tar.gz; once for each model",
    )
    parser.add_argument("--instance-type", default="ml.c7i.2xlarge")
    parser.add_argument("--cpus", type=float, default=2, help="of each copy")
    parser.add_argument("--accelerators", type=float, default=0, help="of each copy")
    parser.add_argument("--memory", type=int, default=2048, metavar="MB", help="of each copy")
    parser.add_argument("--copies", type=int, default=1, help="of each model, at least")
    parser.add_argument("--most-copies", type=int, default=4, help="of each model, at most")
    parser.add_argument("--concurrency", type=float, default=16, help="requests in flight a copy")
    parser.add_argument("--text", default="What a storm last night")
    parser.add_argument("--keep", action="store_true", help="leave the endpoint running")
    options = parser.parse_args()
    if wrong := [model for model in options.model if not all(model.partition("=")[::2])]:
        parser.error(f"--model takes NAME=S3, not {wrong}")
    return options


def component(
    client: Any, name: str, endpoint: str, data: str, options: argparse.Namespace
) -> None:
    """A container for one model."""
    resources = {"NumberOfCpuCoresRequired": options.cpus, "MinMemoryRequiredInMb": options.memory}
    if options.accelerators:
        resources["NumberOfAcceleratorDevicesRequired"] = options.accelerators
    client.create_inference_component(
        InferenceComponentName=name,
        EndpointName=endpoint,
        VariantName="all",
        Specification={
            "Container": {
                "Image": options.image,
                "ArtifactUrl": data,
                # As many workers and threads as the copy has CPUs, not as many as the instance has.
                "Environment": {
                    "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
                    "OMP_NUM_THREADS": str(max(1, int(options.cpus))),
                },
            },
            "StartupParameters": {
                "ModelDataDownloadTimeoutInSeconds": 600,
                "ContainerStartupHealthCheckTimeoutInSeconds": 600,
            },
            "ComputeResourceRequirements": resources,
        },
        RuntimeConfig={"CopyCount": options.copies},
    )


def scale(name: str, options: argparse.Namespace) -> None:
    """Let the number of copies follow the requests in flight."""
    client = boto3.client("application-autoscaling")
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"inference-component/{name}",
        "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount",
    }
    client.register_scalable_target(
        **target, MinCapacity=options.copies, MaxCapacity=options.most_copies
    )
    client.put_scaling_policy(
        **target,
        PolicyName=f"{name}-concurrency",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration={
            "TargetValue": options.concurrency,
            "PredefinedMetricSpecification": {
                "PredefinedMetricType": (
                    "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
                )
            },
        },
    )


def wait_for(client: Any, name: str, seconds: int = 1800) -> None:
    """Return once the component is in service."""
    for _ in range(seconds // 10):
        described = client.describe_inference_component(InferenceComponentName=name)
        if described["InferenceComponentStatus"] == "InService":
            return
        if described["InferenceComponentStatus"] == "Failed":
            raise SystemExit(f"{name}: {described.get('FailureReason', 'failed')}")
        time.sleep(10)
    raise SystemExit(f"{name} is not in service after {seconds} s: look into the endpoint's log")


def delete(client: Any, names: list[str], endpoint: str, seconds: int = 900) -> None:
    """Delete the components, and the endpoint once it has none."""
    for name in names:
        client.delete_inference_component(InferenceComponentName=name)
    for _ in range(seconds // 10):
        if not client.list_inference_components(EndpointNameEquals=endpoint)["InferenceComponents"]:
            break
        time.sleep(10)
    client.delete_endpoint(EndpointName=endpoint)
    client.delete_endpoint_config(EndpointConfigName=endpoint)


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    endpoint = f"amphora-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    models = {}
    for model in options.model:
        name, _, data = model.partition("=")
        models[f"{name}-{endpoint}"] = data
    client.create_endpoint_config(
        EndpointConfigName=endpoint,
        ExecutionRoleArn=options.role,
        ProductionVariants=[
            {
                "VariantName": "all",
                "InstanceType": options.instance_type,
                "InitialInstanceCount": 1,
                "ManagedInstanceScaling": {
                    "Status": "ENABLED",
                    "MinInstanceCount": 1,
                    "MaxInstanceCount": 4,
                },
                "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
            }
        ],
    )
    client.create_endpoint(EndpointName=endpoint, EndpointConfigName=endpoint)
    created: list[str] = []
    try:
        client.get_waiter("endpoint_in_service").wait(EndpointName=endpoint)
        for name, data in models.items():
            component(client, name, endpoint, data, options)
            created.append(name)
        for name in models:
            wait_for(client, name)
            scale(name, options)
            answer = boto3.client("sagemaker-runtime").invoke_endpoint(
                EndpointName=endpoint,
                InferenceComponentName=name,
                ContentType="application/json",
                Body=json.dumps({"inputs": [options.text]}),
            )
            print(name, json.load(answer["Body"]))
    finally:
        if options.keep:
            print(f"still running: {endpoint}")
        else:
            delete(client, created, endpoint)


if __name__ == "__main__":
    main()
