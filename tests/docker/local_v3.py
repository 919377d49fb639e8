"""What a user of SageMaker's SDK v3 writes for local mode; runs in the SDK's own environment.

python local_v3.py FUNCTION '{"argument": ...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import boto3
from sagemaker.core.local.local_session import LocalSession
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, InputData, SourceCode
from sagemaker.train.distributed import Torchrun
from sagemaker.train.model_trainer import Mode

ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"


def trainer(
    root: str, image: str, hosts: int, torchrun: bool, code: dict[str, str] | None, **settings: Any
) -> ModelTrainer:
    return ModelTrainer(
        training_mode=Mode.LOCAL_CONTAINER,
        training_image=image,
        role=ROLE,
        compute=Compute(instance_type="local_cpu", instance_count=hosts),
        source_code=SourceCode(**code) if code else None,
        distributed=Torchrun() if torchrun else None,
        environment={"OMP_NUM_THREADS": "1"},
        local_container_root=root,
        **settings,
    )


def train(
    root: str,
    image: str,
    inputs: dict[str, str],
    hosts: int = 1,
    torchrun: bool = False,
    code: dict[str, str] | None = None,
    **settings: Any,
) -> str:
    """What the SDK raised; '' where the job ended well. The archives lie below `root`."""
    channels = [InputData(channel_name=name, data_source=path) for name, path in inputs.items()]
    Path(root).mkdir(exist_ok=True)
    job = trainer(root, image, hosts, torchrun, code, **settings)
    try:
        job.train(input_data_config=channels)
    except RuntimeError as error:
        return str(error)
    return ""


def deploy_and_predict(root: str, image: str, archive: str, port: int, texts: list[str]) -> Any:
    session = LocalSession(boto3.Session(region_name="us-east-1"))
    session.config = {"local": {"local_code": True, "serving_port": port, "container_root": root}}
    client = session.sagemaker_client
    client.create_model("a-model", {"Image": image, "ModelDataUrl": archive, "Environment": {}})
    variant = {"ModelName": "a-model", "VariantName": "AllTraffic"}
    variant |= {"InstanceType": "local", "InitialInstanceCount": 1}
    client.create_endpoint_config("a-config", [variant])
    client.create_endpoint("an-endpoint", "a-config")
    try:
        answer = session.sagemaker_runtime_client.invoke_endpoint(
            json.dumps({"inputs": texts}), "an-endpoint", "application/json", "application/json"
        )
        return json.loads(answer["Body"].read())
    finally:
        client.delete_endpoint("an-endpoint")


if __name__ == "__main__":
    value = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(f"\nRETURNED {json.dumps(value)}")
