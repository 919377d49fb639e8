"""Deploy a trained model with SDK v2 (`pip install "sagemaker<3"`), and send a request.

    python examples/deploy_sdk2.py --image IMAGE --role ROLE --model s3://bucket/models/model.tar.gz
    python examples/deploy_sdk2.py ... --serverless 4096
    python examples/deploy_sdk2.py --local --image amphora:cpu --model file://$PWD/model.tar.gz

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh; cpu for
serverless); a role that may read the image and the model; a quota for the instance type.
--local: Docker with compose instead of all that, and --port free.
Cost: the instance's hourly price for as long as the endpoint exists, idle or not. Serverless: by
the second of work and the memory. It is deleted at the end, unless --keep is given. --local:
none.
"""

from __future__ import annotations

import argparse
from typing import Any

import boto3
from sagemaker.deserializers import JSONDeserializer
from sagemaker.local import LocalSession
from sagemaker.model import Model
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer
from sagemaker.serverless import ServerlessInferenceConfig

NO_ROLE = "arn:aws:iam::000000000000:role/local"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", default=NO_ROLE, help="ARN of the role the model runs under")
    parser.add_argument("--model", required=True, help="s3:// or file:// name of a model.tar.gz")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    parser.add_argument("--serverless", type=int, metavar="MB", help="no instance: so much memory")
    parser.add_argument("--text", default="What a storm last night")
    parser.add_argument("--keep", action="store_true", help="leave the endpoint running")
    parser.add_argument("--local", action="store_true", help="in a container on this machine")
    parser.add_argument("--port", type=int, default=8080, help="of the container with --local")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    session = None
    where: dict[str, Any] = {"instance_type": options.instance_type, "initial_instance_count": 1}
    if options.serverless:
        config = ServerlessInferenceConfig(memory_size_in_mb=options.serverless, max_concurrency=5)
        where = {"serverless_inference_config": config}
    if options.local:
        session = LocalSession(boto3.Session(region_name="us-east-1"))
        session.config = {"local": {"local_code": True, "serving_port": options.port}}
        where = {"instance_type": "local", "initial_instance_count": 1}
    model = Model(
        image_uri=options.image,
        model_data=options.model,
        role=options.role,
        predictor_cls=Predictor,
        sagemaker_session=session,
    )
    predictor = model.deploy(serializer=JSONSerializer(), deserializer=JSONDeserializer(), **where)
    try:
        print(predictor.predict({"inputs": [options.text]}))
    finally:
        if options.keep:
            print(f"still running: {predictor.endpoint_name}")
        else:
            predictor.delete_endpoint()
            model.delete_model()


if __name__ == "__main__":
    main()
