"""Batch transform with SDK v2 (`pip install "sagemaker<3"`): a model over JSON Lines in S3.

    python examples/batch_transform_sdk2.py --image IMAGE --role ROLE \
        --model s3://bucket/models/model.tar.gz --data s3://bucket/texts/ --output s3://bucket/answers/
    python examples/batch_transform_sdk2.py --local --image amphora:cpu \
        --model file://$PWD/model.tar.gz --data file://$PWD/texts --output file://$PWD/answers

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); JSON Lines in
S3, a text or {"inputs": "text"} on each; a role that may read all that and write the answers.
--local: Docker with compose instead of all that, and --port free.
Cost: the instance's hourly price until the job has ended; nothing is left running. --local:
none.
"""

from __future__ import annotations

import argparse

import boto3
from sagemaker.local import LocalSession
from sagemaker.model import Model

NO_ROLE = "arn:aws:iam::000000000000:role/local"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", default=NO_ROLE, help="ARN of the role the model runs under")
    parser.add_argument("--model", required=True, help="s3:// or file:// name of a model.tar.gz")
    parser.add_argument("--data", required=True, help="s3:// or file:// folder of .jsonl files")
    parser.add_argument("--output", required=True, help="s3:// or file:// folder for the answers")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    parser.add_argument("--instance-count", type=int, default=1)
    parser.add_argument("--local", action="store_true", help="in a container on this machine")
    parser.add_argument("--port", type=int, default=8080, help="of the container with --local")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    session = None
    if options.local:
        session = LocalSession(boto3.Session(region_name="us-east-1"))
        session.config = {"local": {"local_code": True, "serving_port": options.port}}
    model = Model(
        image_uri=options.image,
        model_data=options.model,
        role=options.role,
        sagemaker_session=session,
    )
    transformer = model.transformer(
        instance_count=options.instance_count,
        instance_type="local" if options.local else options.instance_type,
        strategy="MultiRecord",
        assemble_with="Line",
        accept="application/jsonlines",
        max_payload=6,
        output_path=options.output,
    )
    transformer.transform(options.data, content_type="application/jsonlines", split_type="Line")
    transformer.wait()
    print(transformer.output_path)
    transformer.delete_model()


if __name__ == "__main__":
    main()
