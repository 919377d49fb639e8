"""An endpoint for production, with plain boto3: scaling, data capture, a shadow variant.

    python examples/endpoint_boto3.py --image IMAGE --role ROLE \
        --model s3://bucket/models/model.tar.gz --most 4 --concurrency 16 \
        --capture s3://bucket/captured/ --shadow s3://bucket/models/newer/model.tar.gz

The endpoint keeps running and costing: delete it with `--delete NAME`. docs/ENDPOINTS.md explains
the numbers to choose.

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); a role
that may read the image and the models and write what is captured; a quota for --most instances
(twice with --shadow); the right to call Application Auto Scaling.
Cost: the instance's hourly price times its instances, of the shadow too, until it is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import boto3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", help="image_uri in ECR")
    parser.add_argument("--role", help="ARN of the role the model runs under")
    parser.add_argument("--model", help="s3:// name of a model.tar.gz")
    parser.add_argument("--instance-type", default="ml.c7i.xlarge")
    parser.add_argument("--ami", metavar="VERSION", help="inference_ami_version, for GPUs")
    parser.add_argument("--start-seconds", type=int, default=600, help="until /ping must answer")
    parser.add_argument("--least", type=int, default=1, help="instances that always run")
    parser.add_argument("--most", type=int, default=1, help="instances at the highest load")
    parser.add_argument(
        "--concurrency", type=float, default=16, help="requests in flight to hold each instance at"
    )
    parser.add_argument("--capture", metavar="S3", help="where requests and answers are written")
    parser.add_argument("--capture-percent", type=int, default=100, metavar="PERCENT")
    parser.add_argument("--shadow", metavar="S3", help="a model that gets copies of the requests")
    parser.add_argument("--delete", metavar="NAME", help="delete this endpoint, and nothing else")
    options = parser.parse_args()
    missing = [name for name in ("image", "role", "model") if getattr(options, name) is None]
    if missing and not options.delete:
        parser.error(f"missing: {', '.join(f'--{name}' for name in missing)}")
    if not 1 <= options.least <= options.most:
        parser.error(f"--least {options.least} and --most {options.most}: 1 <= least <= most")
    return options


def variant(name: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Instances that run `model`."""
    ami = {"InferenceAmiVersion": options.ami} if options.ami else {}
    return {
        "VariantName": name,
        "ModelName": model,
        "InstanceType": options.instance_type,
        "InitialInstanceCount": options.least,
        "InitialVariantWeight": 1,
        "ModelDataDownloadTimeoutInSeconds": options.start_seconds,
        "ContainerStartupHealthCheckTimeoutInSeconds": options.start_seconds,
        **ami,
    }


def create(client: Any, name: str, options: argparse.Namespace) -> None:
    """The models, the configuration and the endpoint."""
    models = {name: options.model}
    more: dict[str, Any] = {}
    if options.shadow:
        models[f"{name}-shadow"] = options.shadow
        more["ShadowProductionVariants"] = [variant("shadow", f"{name}-shadow", options)]
    if options.capture:
        more["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": options.capture_percent,
            "DestinationS3Uri": options.capture,
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
            # Written as text; what is not named here is written in base64.
            "CaptureContentTypeHeader": {
                "CsvContentTypes": ["text/csv"],
                "JsonContentTypes": ["application/json", "application/jsonlines"],
            },
        }
    for model, data in models.items():
        client.create_model(
            ModelName=model,
            ExecutionRoleArn=options.role,
            PrimaryContainer={"Image": options.image, "ModelDataUrl": data},
        )
    client.create_endpoint_config(
        EndpointConfigName=name, ProductionVariants=[variant("all", name, options)], **more
    )
    client.create_endpoint(EndpointName=name, EndpointConfigName=name)
    client.get_waiter("endpoint_in_service").wait(EndpointName=name)


def target(name: str) -> dict[str, str]:
    """What Application Auto Scaling calls the instances of an endpoint."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/all",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def scale(name: str, options: argparse.Namespace) -> None:
    """Let the number of instances follow the requests in flight, measured every 10 seconds."""
    client = boto3.client("application-autoscaling")
    client.register_scalable_target(
        **target(name), MinCapacity=options.least, MaxCapacity=options.most
    )
    client.put_scaling_policy(
        **target(name),
        PolicyName=f"{name}-concurrency",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration={
            "TargetValue": options.concurrency,
            "PredefinedMetricSpecification": {
                "PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"
            },
            "ScaleOutCooldown": 60,
            "ScaleInCooldown": 300,
        },
    )


def delete(client: Any, name: str) -> None:
    """The endpoint, what scales it, its configuration and its models."""
    config = client.describe_endpoint_config(EndpointConfigName=name)
    scaling = boto3.client("application-autoscaling")
    with contextlib.suppress(scaling.exceptions.ObjectNotFoundException):
        scaling.deregister_scalable_target(**target(name))
    client.delete_endpoint(EndpointName=name)
    client.delete_endpoint_config(EndpointConfigName=name)
    variants = [*config["ProductionVariants"], *config.get("ShadowProductionVariants", ())]
    for item in variants:
        client.delete_model(ModelName=item["ModelName"])


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    if options.delete:
        delete(client, options.delete)
        return
    name = f"amphora-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    print(f"to delete it: python examples/endpoint_boto3.py --delete {name}", flush=True)
    create(client, name, options)
    if options.most > options.least:
        scale(name, options)
    print(f"in service: {name}")


if __name__ == "__main__":
    main()
