"""Servers that are maintained today: infinity-emb, hf-serve, and LitServe over OpenVINO.

Each is set up as its documentation recommends for small models on a CPU: concurrent requests are
batched, 2 workers of 1 thread, weights in bfloat16. infinity-emb and hf-serve have one process, and
hf-serve does not batch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Server, free_port, run

OPENVINO = """
import sys
import numpy, openvino, torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

NAMES = ("input_ids", "attention_mask", "token_type_ids")

class Model:
    def __init__(self, folder, task):
        torch.set_num_threads(1)
        self.task = task
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.labels = AutoConfig.from_pretrained(folder).id2label
        core = openvino.Core()
        core.set_property({"CACHE_DIR": "cache"})
        self.compiled = core.compile_model("model.xml", "CPU", {
            "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "bf16"})
        self.request = self.compiled.create_infer_request()

    def __call__(self, texts):
        batch = self.tokenizer(
            texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        outputs = self.request.infer({name: batch[name].numpy() for name in NAMES})
        outputs = torch.from_numpy(numpy.array(outputs[self.compiled.output(0)]))
        if self.task == "classification":
            best = outputs.softmax(-1).max(-1)
            return [{"label": self.labels[int(i)], "score": float(s)} for s, i in zip(*best)]
        weights = batch["attention_mask"][..., None].float()
        means = (outputs * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(means).tolist()

if __name__ == "__main__":
    folder, task = sys.argv[1:]
    kind = AutoModelForSequenceClassification if task == "classification" else AutoModel
    example = {name: torch.ones(2, 8, dtype=torch.long) for name in NAMES}
    loaded = kind.from_pretrained(folder).eval()
    openvino.save_model(openvino.convert_model(loaded, example_input=example), "model.xml")
    Model(folder, task)(["It is compiled once, and kept."])
"""
LITSERVE = """
import sys, litserve
from model import Model

class API(litserve.LitAPI):
    def setup(self, device):
        self.model = Model(*sys.argv[1:3])
    def decode_request(self, request):
        return request["inputs"]
    def predict(self, lists):
        values = iter(self.model([text for texts in lists for text in texts]))
        return [[next(values) for _ in texts] for texts in lists]
    def encode_response(self, output):
        return output

if __name__ == "__main__":
    api = API(max_batch_size=16, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu", workers_per_device=2).run(
        host="127.0.0.1", port=int(sys.argv[3]), generate_client_file=False, num_api_servers=1,
        log_level="error")
"""


@dataclass(frozen=True)
class Peer:
    """A server that is compared with `amphora serve`."""

    name: str
    requirements: tuple[str, ...]
    prepare: Callable[[Server, Path, Path, str], Server]
    """Completes a server: (the server, its environment's bin, the model, the task)."""
    python: str = sys.executable
    bare: tuple[str, ...] = ()
    """Requirements that are installed without their dependencies."""

    def server(self, root: Path, folder: Path, model: Path, task: str) -> Server:
        """Return a server whose files are in `folder`; its environment is installed below `root`.

        The environment does not see this Python's packages, which could change its figures.
        """
        python = shutil.which(self.python)
        if python is None:
            raise FileNotFoundError(f"{self.name} needs {self.python}: leave it out of --peers.")
        key = repr((os.path.realpath(python), self.requirements)).encode()
        made = root / f"{self.name.split()[0].lower()}-{hashlib.sha256(key).hexdigest()[:12]}"
        tools = made / "bin"
        if not (made / ".made").is_file():
            print(f"Installing {self.name} into {made}.", file=sys.stderr)
            run([python, "-m", "venv", "--clear", str(made)])
            install = [str(tools / "python"), "-m", "pip", "install", "--quiet"]
            run([*install, *self.requirements])
            if self.bare:
                run([*install, "--no-deps", *self.bare])
            (made / ".made").touch()
        (folder / "tmp").mkdir(parents=True)
        environ = {
            "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]), "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
            "PYTHONPATH": "",
        }  # fmt: skip
        return self.prepare(Server(self.name, [], environ, free_port(), folder), tools, model, task)


def _openvino(server: Server, tools: Path, model: Path, task: str) -> Server:
    folder, python = server.folder, str(tools / "python")
    (folder / "model.py").write_text(OPENVINO)
    (folder / "serve.py").write_text(LITSERVE)
    script = f"cd {folder} && exec {python} model.py {model} {task}"
    run(["sh", "-c", script], server.environ)
    server.command = [python, "serve.py", str(model), task, str(server.port)]
    server.path, server.body = "/predict", lambda texts: {"inputs": list(texts)}
    return server


def usual_precision() -> str:
    """Return bfloat16 if the CPU computes in it, else float32."""
    return "bfloat16" if "bf16" in Path("/proc/cpuinfo").read_text() else "float32"


def _infinity(server: Server, tools: Path, model: Path, task: str) -> Server:
    server.command = [
        str(tools / "infinity_emb"), "v2", "--model-id", str(model), "--served-model-name", "model",
        "--engine", "torch", "--device", "cpu", "--dtype", usual_precision(), "--batch-size", "32",
        "--no-bettertransformer", "--host", "127.0.0.1", "--port", str(server.port),
        "--log-level", "error",
    ]  # fmt: skip

    def values(answer: Any) -> list[Any]:
        if task == "classification":
            return [max(labels, key=lambda label: label["score"]) for labels in answer["data"]]
        return [entry["embedding"] for entry in answer["data"]]

    server.path = "/classify" if task == "classification" else "/embeddings"
    server.body = lambda texts: {"model": "model", "input": list(texts)}
    server.values = values
    return server


def _hf_serve(server: Server, tools: Path, model: Path, task: str) -> Server:
    name = "text-classification" if task == "classification" else "sentence-embeddings"
    server.command = [
        str(tools / "hf-serve"), "--model-dir", str(model), "--task", name, "--cloud", "sagemaker",
        "--dtype", usual_precision(), "--host", "127.0.0.1", "--port", str(server.port),
    ]  # fmt: skip
    server.path = "/invocations"
    if task == "classification":
        # It takes one text a request.
        server.body = lambda texts: {"inputs": texts[0]}
        server.values = lambda answer: [max(answer, key=lambda label: label["score"])]
    return server


TORCH = "torch==2.13.0"
# hf-serve does not start on Python 3.11. It is installed without torchvision and other packages for
# images and sound.
HF_SERVE = (
    TORCH, "transformers==5.24.0", "sentence-transformers==6.2.0", "accelerate", "peft",
    "fastapi", "uvicorn", "prometheus-client", "requests", "pandas", "pillow", "pydub",
    "python-magic", "python-multipart",
)  # fmt: skip
PEERS = {
    "infinity": Peer("infinity-emb", (TORCH, "infinity-emb[server,torch]==0.0.78"), _infinity),
    "hf-serve": Peer("hf-serve", HF_SERVE, _hf_serve, "python3.12", ("hf-serve==0.2.0",)),
    "openvino": Peer(
        "LitServe with OpenVINO",
        (TORCH, "transformers==5.24.0", "litserve==0.2.19", "openvino==2026.4.1"),
        _openvino,
    ),
}
