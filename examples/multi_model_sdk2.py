"""Many models behind one endpoint, with SDK v2 (`pip install "sagemaker<3"`): MultiDataModel.

    python examples/multi_model_sdk2.py --image IMAGE --role ROLE --models s3://bucket/models/ \
        --target tweets.tar.gz

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); model archives
directly under --models; a role that may read and list them; a quota for the instance type.
Cost: the instance's hourly price for as long as the endpoint exists, for all models together. It
is deleted at the end, unless --keep is given.
"""

from __future__ import annotations

import argparse

from sagemaker.deserializers import JSONDeserializer
from sagemaker.multidatamodel import MultiDataModel
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer


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
    models = MultiDataModel(
        name="amphora-models",
        model_data_prefix=options.models,
        image_uri=options.image,
        role=options.role,
        predictor_cls=Predictor,
    )
    predictor = models.deploy(
        initial_instance_count=1,
        instance_type=options.instance_type,
        serializer=JSONSerializer(),
        deserializer=JSONDeserializer(),
    )
    try:
        print(predictor.predict({"inputs": [options.text]}, target_model=options.target))
    finally:
        if options.keep:
            print(f"still running: {predictor.endpoint_name}")
        else:
            predictor.delete_endpoint()
            models.delete_model()


if __name__ == "__main__":
    main()
