"""Servers that are maintained today: infinity-emb, and LitServe over OpenVINO.

Each with what its documentation recommends for small models on a CPU: requests that come together
are predicted together, 2 workers of 1 thread, weights in bfloat16. infinity-emb has one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers.peer import (
    TORCH,
    TRANSFORMERS,
    Launch,
    Peer,
    environ_of,
    free_ports,
    list_body,
    run,
)

# One reading of the model for all that bring none: texts to labels, or to vectors.
MODEL = """
import os
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

TASK = os.environ.get("PEER_TASK", "classification")
KIND = AutoModelForSequenceClassification if TASK == "classification" else AutoModel

def values(outputs, mask, names):
    if TASK == "classification":
        best = outputs.softmax(-1).max(-1)
        return [{"label": names[int(i)], "score": float(s)} for s, i in zip(*best)]
    weights = mask[..., None].float()
    means = (outputs * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(means).tolist()

class Model:
    def __init__(self, folder):
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = KIND.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def tokens(self, texts):
        return self.tokenizer(
            texts, padding=True, truncation=True, max_length=512, return_tensors="pt")

    def __call__(self, texts):
        batch = self.tokens(texts)
        with torch.inference_mode():
            outputs = self.model(**batch)[0].float()
        return values(outputs, batch["attention_mask"], self.model.config.id2label)

    def of_lists(self, lists):
        answers = iter(self([text for texts in lists for text in texts]))
        return [[next(answers) for _ in texts] for texts in lists]
"""
# In the place of Model: its network as OpenVINO's, in bfloat16 where the CPU computes that.
OPENVINO = """
import sys
import numpy, openvino, torch
from transformers import AutoConfig, AutoTokenizer
import model
from model import KIND, values

NAMES = ("input_ids", "attention_mask", "token_type_ids")

class Model(model.Model):
    def __init__(self, folder):
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.names = AutoConfig.from_pretrained(folder).id2label
        core = openvino.Core()
        core.set_property({"CACHE_DIR": "cache"})
        self.compiled = core.compile_model("model.xml", "CPU", {
            "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "bf16"})
        self.request = self.compiled.create_infer_request()

    def __call__(self, texts):
        batch = self.tokens(texts)
        outputs = self.request.infer({name: batch[name].numpy() for name in NAMES})
        outputs = torch.from_numpy(numpy.array(outputs[self.compiled.output(0)]))
        return values(outputs, batch["attention_mask"], self.names)

if __name__ == "__main__":
    example = {name: torch.ones(2, 8, dtype=torch.long) for name in NAMES}
    loaded = KIND.from_pretrained(sys.argv[1]).eval()
    openvino.save_model(openvino.convert_model(loaded, example_input=example), "model.xml")
    Model(sys.argv[1])(["It is compiled once, and kept."])
"""
LITSERVE = """
import sys, litserve
from {module} import Model

class API(litserve.LitAPI):
    def setup(self, device):
        self.model = Model(sys.argv[1])
    def decode_request(self, request):
        return request["inputs"]
    def predict(self, lists):
        return self.model.of_lists(list(lists))
    def encode_response(self, output):
        return output

if __name__ == "__main__":
    api = API(max_batch_size=16, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu", workers_per_device=2).run(
        host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, num_api_servers=1,
        log_level="error")
"""


def _litserve(tools: Path, folder: Path, model: Path, task: str, module: str = "model") -> Launch:
    (port,) = free_ports(1)
    (folder / "model.py").write_text(MODEL)
    (folder / "serve.py").write_text(LITSERVE.replace("{module}", module))
    command = [str(tools / "python"), str(folder / "serve.py"), str(model), str(port)]
    environ = environ_of(folder, tools, PEER_TASK=task)
    return Launch(command, environ, port, "/predict", list_body)


def _openvino(tools: Path, folder: Path, model: Path, task: str) -> Launch:
    launch = _litserve(tools, folder, model, task, "by_openvino")
    script = folder / "by_openvino.py"
    script.write_text(OPENVINO)
    command = f"cd {folder} && exec {tools / 'python'} {script} {model}"
    run(["sh", "-c", command], "OpenVINO cannot convert the model", launch.environ)
    return launch


def _infinity(tools: Path, folder: Path, model: Path, task: str) -> Launch:
    (port,) = free_ports(1)
    command = [
        str(tools / "infinity_emb"), "v2", "--model-id", str(model), "--served-model-name", "model",
        "--engine", "torch", "--device", "cpu", "--dtype", "bfloat16", "--batch-size", "32",
        "--no-bettertransformer", "--host", "127.0.0.1", "--port", str(port),
        "--log-level", "error",
    ]  # fmt: skip

    def body(texts: Sequence[str]) -> Any:
        return {"model": "model", "input": list(texts)}

    def values(answer: Any) -> list[Any]:
        if task == "classification":
            return [max(labels, key=lambda one: one["score"]) for labels in answer["data"]]
        return [entry["embedding"] for entry in answer["data"]]

    path = "/classify" if task == "classification" else "/embeddings"
    return Launch(command, environ_of(folder, tools), port, path, body, values)


PEERS = {
    "infinity": Peer("infinity-emb", (TORCH, "infinity-emb[server,torch]==0.0.78"), _infinity),
    "openvino": Peer(
        "LitServe with OpenVINO",
        (TORCH, TRANSFORMERS, "litserve==0.2.19", "openvino==2026.4.1"),
        _openvino,
    ),
}
