"""What a user of SageMaker's SDK v2 writes for local mode; runs in the SDK's own environment.

python local_v2.py FUNCTION '{"argument": ...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import boto3
from sagemaker.deserializers import JSONDeserializer
from sagemaker.estimator import Estimator
from sagemaker.huggingface import HuggingFace
from sagemaker.local import LocalSession
from sagemaker.model import Model
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer

ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"
ESTIMATORS = {"generic": Estimator, "huggingface": HuggingFace}


def local_session(root: str, port: int = 8080) -> LocalSession:
    session = LocalSession(boto3.Session(region_name="us-east-1"))
    session.config = {"local": {"local_code": True, "serving_port": port, "container_root": root}}
    return session


def fit(kind: str, root: str, inputs: dict[str, str], **settings: Any) -> str:
    """The archive of the model."""
    made: Any = ESTIMATORS[kind](
        role=ROLE, instance_type="local", sagemaker_session=local_session(root),
        environment={"OMP_NUM_THREADS": "1"}, **settings,
    )  # fmt: skip
    made.fit({name: f"file://{folder}" for name, folder in inputs.items()})
    return str(made.model_data)


def deploy_and_predict(root: str, image: str, archive: str, port: int, texts: list[str]) -> Any:
    session = local_session(root, port)
    model = Model(
        image_uri=image,
        model_data=archive,
        role=ROLE,
        sagemaker_session=session,
        predictor_cls=Predictor,
    )
    predictor = model.deploy(
        1, "local", serializer=JSONSerializer(), deserializer=JSONDeserializer()
    )
    try:
        return predictor.predict({"inputs": texts})
    finally:
        predictor.delete_endpoint()


def transform(root: str, image: str, archive: str, port: int, lines: str, output: str) -> list[str]:
    """The lines of a batch transform's output, of one JSON document a line."""
    session = local_session(root, port)
    model = Model(image_uri=image, model_data=archive, role=ROLE, sagemaker_session=session)
    model.create(instance_type="local")
    transformer = model.transformer(
        1,
        "local",
        strategy="MultiRecord",
        assemble_with="Line",
        output_path=f"file://{output}",
        accept="application/jsonlines",
        max_payload=1,
    )
    # The SDK would read the job's logs from CloudWatch, in local mode too.
    transformer.transform(
        f"file://{lines}", content_type="application/jsonlines", split_type="Line", logs=False
    )
    (written,) = Path(output).rglob("*.out")
    return written.read_text().splitlines()


if __name__ == "__main__":
    value = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(f"\nRETURNED {json.dumps(value)}")
