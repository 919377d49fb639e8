"""The servers on Java, archived or maintained no more: TorchServe, multi-model-server (MMS) under
SageMaker's toolkit, and Hugging Face's toolkit on it.

Java 17 runs them. The toolkits on multi-model-server write /etc/sagemaker-mms.properties, and so
need root. They answer a classifier's single texts. The Hugging Face toolkit needs transformers 4,
and has a pipeline of its own, in float32.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from servers.in_python import MODEL
from servers.peer import TORCH, TRANSFORMERS, Launch, Peer, environ_of, free_ports, run

TORCHSERVE = """
import json, os
from model import Model

model = None

def handle(data, context):
    global model
    if model is None:
        model = Model(os.environ["PEER_MODEL"])
    if data is None:
        return None
    bodies = [each.get("body") or each.get("data") for each in data]
    orders = [json.loads(body) if isinstance(body, (bytes, bytearray)) else body for body in bodies]
    return [[answer] for answer in model([order["inputs"] for order in orders])]
"""
SAGEMAKER = """
import json
from model import Model

def model_fn(model_dir):
    return Model(model_dir)
def input_fn(body, content_type):
    return json.loads(body)
def predict_fn(data, model):
    return model([data["inputs"]])
def output_fn(prediction, accept):
    return json.dumps(prediction)
"""


def missing_java() -> str:
    """What to install for the servers on Java; '' where it is there."""
    if shutil.which("java") is not None:
        return ""
    return "no Java 17 is installed: apt-get install openjdk-17-jre-headless"


def _torchserve(tools: Path, folder: Path, model: Path, task: str) -> Launch:
    (folder / "model.py").write_text(MODEL)
    (folder / "handler.py").write_text(TORCHSERVE)
    archive = [
        "--model-name", "m", "--version", "1", "--handler", str(folder / "handler.py"),
        "--extra-files", str(folder / "model.py"), "--export-path", str(folder),
    ]  # fmt: skip
    environ = environ_of(folder, tools, PEER_MODEL=str(model))
    run([str(tools / "torch-model-archiver"), *archive], "The model cannot be archived")
    port, management, metrics = free_ports(3)
    settings = {"minWorkers": 2, "maxWorkers": 2, "batchSize": 16, "maxBatchDelay": 5}
    inner = ",".join(f'"{name}":{value}' for name, value in settings.items())
    (folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{port}\n"
        f"management_address=http://127.0.0.1:{management}\n"
        f"metrics_address=http://127.0.0.1:{metrics}\n"
        "load_models=m.mar\ndisable_system_metrics=true\n"
        f'models={{"m":{{"1":{{"defaultVersion":true,"marName":"m.mar",{inner}}}}}}}\n'
    )
    command = [
        str(tools / "torchserve"), "--start", "--foreground", "--ncs", "--disable-token-auth",
        "--model-store", str(folder), "--ts-config", str(folder / "config.properties"),
    ]  # fmt: skip
    return Launch(command, {**environ, "LOG_LOCATION": str(folder)}, port, "/predictions/m")


def _sagemaker_environ(tools: Path, folder: Path, port: int, **more: str) -> dict[str, str]:
    return environ_of(
        folder, tools, SAGEMAKER_BASE_DIR=str(folder), SAGEMAKER_BIND_TO_PORT=str(port),
        SAGEMAKER_MODEL_SERVER_WORKERS="2", **more,
    )  # fmt: skip


def _mms(tools: Path, folder: Path, model: Path, task: str) -> Launch:
    shutil.copytree(model, folder / "model")
    (folder / "model" / "code").mkdir()
    (folder / "model" / "code" / "model.py").write_text(MODEL)
    (folder / "model" / "code" / "inference.py").write_text(SAGEMAKER)
    start = "from sagemaker_inference import model_server as m; m.start_model_server()"
    command = [str(tools / "python"), "-c", start]
    (port,) = free_ports(1)
    return Launch(command, _sagemaker_environ(tools, folder, port), port, "/invocations")


def _hf_toolkit(tools: Path, folder: Path, model: Path, task: str) -> Launch:
    shutil.copytree(model, folder / "model")
    (port,) = free_ports(1)
    environ = _sagemaker_environ(tools, folder, port, HF_TASK="text-classification")
    return Launch([str(tools / "serve")], environ, port, "/invocations")


# sagemaker-inference 1.10.1 imports pkg_resources, which setuptools 82 has no more.
_ON_MMS = ("multi-model-server==1.1.11", "setuptools<82")
_TASKS = frozenset({"classification"})
PEERS = {
    "torchserve": Peer(
        "TorchServe",
        (TORCH, TRANSFORMERS, "torchserve==0.12.0", "torch-model-archiver==0.12.0"),
        _torchserve,
        _TASKS,
        needs_java=True,
    ),
    "mms": Peer(
        "MMS",
        (TORCH, TRANSFORMERS, "sagemaker-inference==1.10.1", *_ON_MMS),
        _mms,
        _TASKS,
        needs_java=True,
    ),
    "hf": Peer(
        "HF toolkit",
        (TORCH, "sagemaker-huggingface-inference-toolkit==2.6.0", "transformers<5", *_ON_MMS),
        _hf_toolkit,
        _TASKS,
        needs_java=True,
    ),
}
