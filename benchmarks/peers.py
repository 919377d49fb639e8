"""The servers of today that `bench_serve.py` measures beside: installed, configured, started.

Each lives in a virtual environment of its own, which sees this Python's packages behind its own, so
that torch and transformers are the same for all and are not copied (the Hugging Face toolkit needs
transformers 4, and brings it). Java 17 runs three of them. The toolkits on multi-model-server write
/etc/sagemaker-mms.properties, and so need root.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# One reading of the model for all but the Hugging Face toolkit, which has its own pipeline.
MODEL = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

class Model:
    def __init__(self, folder):
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def __call__(self, texts):
        batch = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            best = self.model(**batch).logits.softmax(-1).max(-1)
        names = self.model.config.id2label
        return [{"label": names[int(i)], "score": float(s)} for s, i in zip(*best)]
"""
LITSERVE = """
import sys, litserve
from model import Model

class API(litserve.LitAPI):
    def setup(self, device):
        self.model = Model(sys.argv[1])
    def decode_request(self, request):
        return request["inputs"]
    def predict(self, texts):
        return self.model(list(texts))
    def encode_response(self, output):
        return [output]

if __name__ == "__main__":
    api = API(max_batch_size=16, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu", workers_per_device=2).run(
        port=int(sys.argv[2]), generate_client_file=False, num_api_servers=1, log_level="error")
"""
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


@dataclass(frozen=True)
class Launch:
    """How a server is started, and where it is asked."""

    command: list[str]
    environ: Mapping[str, str]
    path: str
    """Of its invocations."""


@dataclass(frozen=True)
class Peer:
    """A server of today."""

    name: str
    requirements: tuple[str, ...]
    needs_java: bool
    prepare: Callable[[Path, Path, Path, int], Launch]
    """(the venv's bin, an empty folder, the model, a port) to how it is started."""

    def install(self, root: Path) -> Path:
        """Its virtual environment's bin, made where it is not there yet. Needs a package index."""
        name = self.name.lower().replace(" ", "-")
        made = hashlib.sha256(repr((sys.executable, self.requirements)).encode()).hexdigest()
        folder = root / f"{name}-{made[:12]}"
        if (folder / ".made").is_file():
            return folder / "bin"
        print(f"Installing {self.name} into {folder}.", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        ours = sysconfig.get_paths()["purelib"]
        theirs = next(folder.glob("lib/python*/site-packages"))
        (theirs / "shared.pth").write_text(f"{ours}\n")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0", *self.requirements], check=True)
        (folder / ".made").touch()
        return folder / "bin"


def missing_java() -> str:
    """What to install for the servers on Java; '' where it is there."""
    if shutil.which("java") is not None:
        return ""
    return "no Java 17 is installed: apt-get install openjdk-17-jre-headless"


def _environ(folder: Path, tools: Path, **more: str) -> dict[str, str]:
    # A temporary folder each: MMS and TorchServe use one pid file in it.
    (folder / "tmp").mkdir()
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    return {"PATH": path, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", **more}


def _litserve(tools: Path, folder: Path, model: Path, port: int) -> Launch:
    (folder / "model.py").write_text(MODEL)
    (folder / "serve.py").write_text(LITSERVE)
    command = [str(tools / "python"), str(folder / "serve.py"), str(model), str(port)]
    return Launch(command, _environ(folder, tools), "/predict")


def _torchserve(tools: Path, folder: Path, model: Path, port: int) -> Launch:
    (folder / "model.py").write_text(MODEL)
    (folder / "handler.py").write_text(TORCHSERVE)
    archive = [
        "--model-name", "m", "--version", "1", "--handler", str(folder / "handler.py"),
        "--extra-files", str(folder / "model.py"), "--export-path", str(folder),
    ]  # fmt: skip
    environ = _environ(folder, tools, PEER_MODEL=str(model))
    subprocess.run([str(tools / "torch-model-archiver"), *archive], check=True)
    settings = {"minWorkers": 2, "maxWorkers": 2, "batchSize": 16, "maxBatchDelay": 5}
    inner = ",".join(f'"{name}":{value}' for name, value in settings.items())
    (folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{port}\n"
        f"management_address=http://127.0.0.1:{port + 100}\n"
        f"metrics_address=http://127.0.0.1:{port + 200}\n"
        "load_models=m.mar\ndisable_system_metrics=true\n"
        f'models={{"m":{{"1":{{"defaultVersion":true,"marName":"m.mar",{inner}}}}}}}\n'
    )
    command = [
        str(tools / "torchserve"), "--start", "--foreground", "--ncs", "--disable-token-auth",
        "--model-store", str(folder), "--ts-config", str(folder / "config.properties"),
    ]  # fmt: skip
    return Launch(command, {**environ, "LOG_LOCATION": str(folder)}, "/predictions/m")


def _sagemaker_environ(tools: Path, folder: Path, port: int, **more: str) -> dict[str, str]:
    return _environ(
        folder, tools, SAGEMAKER_BASE_DIR=str(folder), SAGEMAKER_BIND_TO_PORT=str(port),
        SAGEMAKER_MODEL_SERVER_WORKERS="2", **more,
    )  # fmt: skip


def _mms(tools: Path, folder: Path, model: Path, port: int) -> Launch:
    shutil.copytree(model, folder / "model")
    (folder / "model" / "code").mkdir()
    (folder / "model" / "code" / "model.py").write_text(MODEL)
    (folder / "model" / "code" / "inference.py").write_text(SAGEMAKER)
    start = "from sagemaker_inference import model_server as m; m.start_model_server()"
    command = [str(tools / "python"), "-c", start]
    return Launch(command, _sagemaker_environ(tools, folder, port), "/invocations")


def _hf_toolkit(tools: Path, folder: Path, model: Path, port: int) -> Launch:
    shutil.copytree(model, folder / "model")
    environ = _sagemaker_environ(tools, folder, port, HF_TASK="text-classification")
    return Launch([str(tools / "serve")], environ, "/invocations")


# sagemaker-inference 1.10.1 imports pkg_resources, which setuptools 82 has no more.
_ON_MMS = ("multi-model-server==1.1.11", "setuptools<82")
PEERS = {
    "torchserve": Peer(
        "TorchServe",
        ("torchserve==0.12.0", "torch-model-archiver==0.12.0"),
        True,
        _torchserve,
    ),
    "litserve": Peer("LitServe", ("litserve==0.2.19",), False, _litserve),
    "mms": Peer("MMS", ("sagemaker-inference==1.10.1", *_ON_MMS), True, _mms),
    "hf": Peer(
        "HF toolkit",
        ("sagemaker-huggingface-inference-toolkit==2.6.0", "transformers<5", *_ON_MMS),
        True,
        _hf_toolkit,
    ),
}
