"""What a user of SageMaker's SDK v3 writes for local mode; runs in the SDK's own environment.

python local_v3.py FUNCTION '{"argument": ...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, InputData, SourceCode
from sagemaker.train.distributed import Torchrun
from sagemaker.train.model_trainer import Mode

ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"


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
    job = ModelTrainer(
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
    try:
        job.train(input_data_config=channels)
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    value = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(f"\nRETURNED {json.dumps(value)}")
