"""Asynchronous inference with SDK v3 (`pip install "sagemaker>=3"`): large or slow requests, by S3.

    python examples/async_sdk3.py --image IMAGE --role ROLE \
        --model s3://bucket/models/model.tar.gz --data s3://bucket/questions.json \
        --output s3://bucket/answers/ --failures s3://bucket/failures/

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); a request's
body (JSON here) in S3; a role that may read the image, the model and the body and write the
answers.
Cost: the instance's hourly price for as long as the endpoint exists; it is deleted at the end,
unless --keep is given.
"""

from __future__ import annotations

import argparse
import time

import boto3
from sagemaker.core.inference_config import AsyncInferenceConfig
from sagemaker.core.resources import EndpointConfig
from sagemaker.serve.model_builder import ModelBuilder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the model runs under")
    parser.add_argument("--model", required=True, help="s3:// name of a model.tar.gz")
    parser.add_argument("--data", required=True, help="s3:// name of a request's body")
    parser.add_argument("--output", required=True, help="s3:// folder for the answers")
    parser.add_argument("--failures", required=True, help="s3:// folder for error messages")
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
    builder = ModelBuilder(
        image_uri=options.image,
        s3_model_data_url=options.model,
        role_arn=options.role,
        instance_type=options.instance_type,
    )
    model = builder.build()
    endpoint = builder.deploy(
        endpoint_name=model.model_name,
        initial_instance_count=1,
        inference_config=AsyncInferenceConfig(
            output_path=options.output, failure_path=options.failures
        ),
    )
    try:
        accepted = endpoint.invoke_async(
            input_location=options.data, content_type="application/json"
        )
        print(wait_for(accepted.output_location).decode())
    finally:
        if options.keep:
            print(f"still running: {endpoint.endpoint_name}")
        else:
            endpoint.delete()
            EndpointConfig.get(endpoint.endpoint_config_name).delete()
            model.delete()


if __name__ == "__main__":
    main()
