"""Batch transform with plain boto3: a model over JSON Lines in S3, without an endpoint.

    python examples/batch_transform_boto3.py --image IMAGE --role ROLE \
        --model s3://bucket/models/model.tar.gz --data s3://bucket/texts/ --output s3://bucket/answers/

Prerequisites: boto3; AWS credentials and a region; the image in ECR (build_and_push.sh); JSON
Lines in S3, a text or {"inputs": "text"} on each; a role that may read all that and write the
answers.
Cost: the instance's hourly price until the job has ended; nothing is left running.
"""

from __future__ import annotations

import argparse
import time

import boto3


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
    client = boto3.client("sagemaker")
    name = f"amphora-batch-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    client.create_model(
        ModelName=name,
        ExecutionRoleArn=options.role,
        PrimaryContainer={"Image": options.image, "ModelDataUrl": options.model},
    )
    client.create_transform_job(
        TransformJobName=name,
        ModelName=name,
        BatchStrategy="MultiRecord",
        MaxPayloadInMB=6,
        TransformInput={
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": options.data}},
            "ContentType": "application/jsonlines",
            "SplitType": "Line",
        },
        TransformOutput={
            "S3OutputPath": options.output,
            "Accept": "application/jsonlines",
            "AssembleWith": "Line",
        },
        TransformResources={
            "InstanceType": options.instance_type,
            "InstanceCount": options.instance_count,
        },
    )
    print(f"started {name}")
    client.get_waiter("transform_job_completed_or_stopped").wait(TransformJobName=name)
    done = client.describe_transform_job(TransformJobName=name)
    print(done["TransformJobStatus"], done.get("FailureReason", options.output))
    client.delete_model(ModelName=name)


if __name__ == "__main__":
    main()
