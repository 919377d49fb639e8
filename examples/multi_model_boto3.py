"""Many models behind one endpoint, with plain boto3: each is loaded at its first request.

    python examples/multi_model_boto3.py --image IMAGE --role ROLE --models s3://bucket/models/ \
        --target tweets.tar.gz

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); model
archives directly under --models; a role that may read and list them; a quota for the instance
type.
Cost: the instance's hourly price for as long as the endpoint exists, for all models together. It
is deleted at the end, unless --keep is given.
"""

from __future__ import annotations

import argparse
import json
import time

import boto3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the models run under")
    parser.add_argument("--models", required=True, help="s3:// folder of model archives")
    parser.add_argument("--target", required=True, help="the archive in it to ask")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    parser.add_argument("--text", default="What a storm last night")
    parser.add_argument("--keep", action="store_true", help="leave the endpoint running")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    client = boto3.client("sagemaker")
    name = f"amphora-models-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    client.create_model(
        ModelName=name,
        ExecutionRoleArn=options.role,
        PrimaryContainer={
            "Image": options.image,
            "Mode": "MultiModel",
            "ModelDataUrl": options.models,
        },
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
    )
    client.create_endpoint(EndpointName=name, EndpointConfigName=name)
    try:
        client.get_waiter("endpoint_in_service").wait(EndpointName=name)
        answer = boto3.client("sagemaker-runtime").invoke_endpoint(
            EndpointName=name,
            TargetModel=options.target,
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
