"""Batch transform with SDK v3 (`pip install "sagemaker>=3"`): a model over JSON Lines in S3.

    python examples/batch_transform_sdk3.py --image IMAGE --role ROLE \
        --model s3://bucket/models/model.tar.gz --data s3://bucket/texts/ --output s3://bucket/answers/

Prerequisites: AWS credentials and a region; the image in ECR (build_and_push.sh); JSON Lines in
S3, a text or {"inputs": "text"} on each; a role that may read all that and write the answers.
Cost: the instance's hourly price until the job has ended; nothing is left running.
"""

from __future__ import annotations

import argparse

from sagemaker.serve.model_builder import ModelBuilder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True, help="image_uri in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role the model runs under")
    parser.add_argument("--model", required=True, help="s3:// name of a model.tar.gz")
    parser.add_argument("--data", required=True, help="s3:// folder of .jsonl files")
    parser.add_argument("--output", required=True, help="s3:// folder for the answers")
    parser.add_argument("--instance-type", default="ml.m5.xlarge")
    parser.add_argument("--instance-count", type=int, default=1)
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
    transformer = builder.transformer(
        instance_count=options.instance_count,
        instance_type=options.instance_type,
        strategy="MultiRecord",
        assemble_with="Line",
        accept="application/jsonlines",
        max_payload=6,
        output_path=options.output,
    )
    transformer.transform(options.data, content_type="application/jsonlines", split_type="Line")
    print(transformer.output_path)
    model.delete()


if __name__ == "__main__":
    main()
