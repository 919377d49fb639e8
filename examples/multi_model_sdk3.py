"""Many models behind one endpoint, with SDK v3 (`pip install "sagemaker>=3"`): its resources.

    python examples/multi_model_sdk3.py --image IMAGE --role ROLE --models s3://bucket/models/ \
        --target tweets.tar.gz

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); model archives
directly under --models; a role that may read and list them; a quota for the instance type.
Cost: the instance's hourly price for as long as the endpoint exists, for all models together. It
is deleted at the end, unless --keep is given.
"""

from __future__ import annotations

import argparse
import json
import time

from sagemaker.core.resources import Endpoint, EndpointConfig, Model
from sagemaker.core.shapes import ContainerDefinition, ProductionVariant


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
    name = f"amphora-models-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    model = Model.create(
        model_name=name,
        execution_role_arn=options.role,
        primary_container=ContainerDefinition(
            image=options.image, mode="MultiModel", model_data_url=options.models
        ),
    )
    variant = ProductionVariant(
        variant_name="all",
        model_name=name,
        instance_type=options.instance_type,
        initial_instance_count=1,
    )
    config = EndpointConfig.create(endpoint_config_name=name, production_variants=[variant])
    endpoint = Endpoint.create(endpoint_name=name, endpoint_config_name=name)
    try:
        endpoint.wait_for_status("InService")
        answer = endpoint.invoke(
            body=json.dumps({"inputs": [options.text]}),
            content_type="application/json",
            target_model=options.target,
        )
        print(json.load(answer.body))
    finally:
        if options.keep:
            print(f"still running: {name}")
        else:
            endpoint.delete()
            config.delete()
            model.delete()


if __name__ == "__main__":
    main()
