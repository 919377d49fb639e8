"""Asynchronous inference with SDK v2 (`pip install "sagemaker<3"`): large or slow requests, by S3.

    python examples/async_sdk2.py --image IMAGE --role ROLE \
        --model s3://bucket/models/model.tar.gz --data s3://bucket/questions.json \
        --output s3://bucket/answers/

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); a request's
body (JSON here) in S3; a role that may read the image, the model and the body and write the
answers.
Cost: the instance's hourly price for as long as the endpoint exists; it is deleted at the end,
unless --keep is given.
"""

from __future__ import annotations

import argparse

from sagemaker.async_inference import AsyncInferenceConfig, WaiterConfig
from sagemaker.deserializers import JSONDeserializer
from sagemaker.model import Model
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the model runs under")
    parser.add_argument("--model", required=True, help="s3:// name of a model.tar.gz")
    parser.add_argument("--data", required=True, help="s3:// name of a request's body")
    parser.add_argument("--output", required=True, help="s3:// folder for the answers")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    parser.add_argument("--keep", action="store_true", help="leave the endpoint running")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    model = Model(
        image_uri=options.image,
        model_data=options.model,
        role=options.role,
        predictor_cls=Predictor,
    )
    predictor = model.deploy(
        instance_type=options.instance_type,
        initial_instance_count=1,
        async_inference_config=AsyncInferenceConfig(output_path=options.output),
        serializer=JSONSerializer(),
        deserializer=JSONDeserializer(),
    )
    try:
        answer = predictor.predict_async(input_path=options.data)
        print(answer.get_result(WaiterConfig(max_attempts=180, delay=5)))
    finally:
        if options.keep:
            print(f"still running: {predictor.endpoint_name}")
        else:
            predictor.delete_endpoint()
            model.delete_model()


if __name__ == "__main__":
    main()
