"""Deploy a trained model with SDK v3 (`pip install "sagemaker>=3"`), and send a request.

    python examples/deploy_sdk3.py --image IMAGE --role ROLE --model s3://bucket/models/model.tar.gz
    python examples/deploy_sdk3.py ... --serverless 4096

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh; cpu for
serverless); a role that may read the image and the model; a quota for the instance type.
Cost: the instance's hourly price for as long as the endpoint exists, idle or not. Serverless: by
the second of work and the memory. It is deleted at the end, unless --keep is given.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from sagemaker.core.inference_config import ServerlessInferenceConfig
from sagemaker.core.resources import EndpointConfig
from sagemaker.serve.model_builder import ModelBuilder


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


def main() -> None:
    options = arguments()
    builder = ModelBuilder(
        image_uri=options.image,
        s3_model_data_url=options.model,
        role_arn=options.role,
        instance_type=options.instance_type,
    )
    model = builder.build()
    where: dict[str, Any] = {"initial_instance_count": 1}
    if options.serverless:
        config = ServerlessInferenceConfig(memory_size_in_mb=options.serverless, max_concurrency=5)
        where = {"inference_config": config}
    endpoint = builder.deploy(endpoint_name=model.model_name, **where)
    try:
        answer = endpoint.invoke(
            body=json.dumps({"inputs": [options.text]}), content_type="application/json"
        )
        print(json.load(answer.body))
    finally:
        if options.keep:
            print(f"still running: {endpoint.endpoint_name}")
        else:
            endpoint.delete()
            EndpointConfig.get(endpoint.endpoint_config_name).delete()
            model.delete()


if __name__ == "__main__":
    main()
