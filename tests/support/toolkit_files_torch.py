"""Inference files as users write them for PyTorch's image, and for the toolkit below it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.toolkit_questions import (
    CSV,
    JSON,
    NPY,
    ROWS,
    File,
    Question,
    ask,
    ask_bytes,
    ask_csv,
    ask_npy,
)

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale
"""
MODEL_ONLY = (
    NET
    + """
def model_fn(model_dir):
    return Net()
"""
)


def _torch(
    name: str, code: str | None, *questions: Question, model: str = "empty", **more: Any
) -> File:
    return File(
        name=f"pt-{name}", oracle="pytorch", model=model, code=code, questions=questions, **more
    )


PYTORCH = [
    _torch("no-file", None, ask(ROWS), ask([1, 2]), ask_csv("1,2,3\n4,5,6\n"), ask(ROWS, CSV),
           ask_npy(np.float32(ROWS)), ask(ROWS, NPY), model="script"),
    _torch("no-file-other-name", None, ask(ROWS), model="script-named"),
    _torch("no-handler-in-the-file", "VALUE = 1", ask(ROWS), model="script"),
    _torch("several-files", None, model="script-twice", starts=False),
    _torch("no-script", None, model="weights", starts=False),
    _torch("model-only", MODEL_ONLY, ask(ROWS), ask([1, 2, 3]), ask([[[1], [2]]]),
           ask(7, ours=14.0, why="FloatTensor(7) is seven numbers of memory as it was"),
           ask([True, False], ours=[2.0, 0.0], why="FloatTensor takes no booleans"),
           ask([1, 2.5])),
    _torch("model-only-csv", MODEL_ONLY, ask_csv("1,2,3\n4,5,6\n"), ask_csv("1,2,3\n"),
           ask_csv("1,2\n4,6.5\n", ours=[[2.0, 4.0], [8.0, 13.0]],
                   why="columns of integers and of floats make no tensor in the image"),
           ask_csv("1\n2\n"), ask_csv("5", ours=10.0, why="FloatTensor(5) is five numbers of memory as it was"), ask_csv("1e3,-2.0\n3.0,4.5\n"),
           ask_csv("1,,3\n4,5,6\n", ours=400, why="the image reads the gap as -1"),
           ask_csv("a,b\n1,2\n", ours=400)),
    _torch("model-only-npy", MODEL_ONLY, ask_npy(np.float32(ROWS)), ask_npy(np.float64(ROWS)),
           ask_npy(np.arange(3))),
    _torch("model-only-accept", MODEL_ONLY, ask(ROWS, CSV), ask(ROWS, NPY), ask([1, 2], CSV),
           ask(ROWS, "text/csv, application/json"), ask(ROWS, "application/json,text/csv"),
           ask(ROWS, "text/html, text/csv"), ask(ROWS, "image/png", ours=406),
           ask(ROWS, "text/csv;q=0.1, application/json", ours="json",
               why="the image knows no q-values")),
    _torch("model-only-wrong-requests", MODEL_ONLY, ask(["a", "b"], ours=400),
           ask([[1, 2], [3]], ours=400), ask({"inputs": [1]}, ours=500), ask([None], ours=400),
           ask_bytes(b"x", "text/plain", ours=415), ask_bytes(b"[1", JSON, ours=400),
           ask_bytes(b"not npy", NPY, ours=400),
           ask_npy(np.array(["a"]), ours=400)),
    _torch("embedding", """
        import torch
        def model_fn(model_dir):
            torch.manual_seed(0)
            return torch.nn.Embedding(4, 2)
        """, ask_npy(np.array([0, 3])), ask([0, 1], ours=500)),
    _torch("dropout-is-off", """
        import torch
        def model_fn(model_dir):
            return torch.nn.Dropout(0.9)
        """, ask([1, 2, 3, 4, 5, 6, 7, 8])),
    _torch("predict-returns-tensor", MODEL_ONLY + """
def predict_fn(data, model):
    return model(data) + 1
""", ask(ROWS), ask(ROWS, CSV), ask(ROWS, NPY)),
    _torch("predict-returns-dict-of-tensors", MODEL_ONLY + """
def predict_fn(data, model):
    return {"y": model(data).detach(), "n": [data.sum()]}
""", ask(ROWS)),
    _torch("predict-returns-array", MODEL_ONLY + """
def predict_fn(data, model):
    return model(data).detach().numpy()
""", ask(ROWS), ask(ROWS, CSV), ask(ROWS, NPY)),
    _torch("predict-returns-bfloat16", MODEL_ONLY + """
def predict_fn(data, model):
    return model(data).to(torch.bfloat16)
""", ask([1, 2], ours=[2.0, 4.0], why="numpy has no bfloat16; the image has an error")),
    _torch("predict-returns-tuple-of-tensors", MODEL_ONLY + """
def predict_fn(data, model):
    return model(data).detach(), torch.ones(2)
""", ask(ROWS)),
    _torch("predict-takes-an-object", MODEL_ONLY + """
def predict_fn(data, model):
    return model(torch.tensor(data["instances"]))
""", ask({"instances": [1.0, 2.0]}, ours=[2.0, 4.0], why="no tensor can be meant: a dict")),
    _torch("predict-gives-nan", MODEL_ONLY + """
def predict_fn(data, model):
    return model(data) / 0
""", ask([0.0], ours=500, why="the image sends NaN, which is no JSON"),
     ask([1.0], ours=500, why="the image sends Infinity, which is no JSON")),
    _torch("input-and-model", MODEL_ONLY + """
import json
def input_fn(request_body, request_content_type):
    assert request_content_type == "application/json"
    return torch.tensor(json.loads(request_body)["instances"], dtype=torch.float32)
""", ask({"instances": ROWS}), ask({"instances": ROWS}, CSV)),
    _torch("output-and-model", MODEL_ONLY + """
import json
def output_fn(prediction, content_type):
    return json.dumps({"y": prediction.tolist(), "type": content_type})
""", ask(ROWS), ask(ROWS, CSV)),
    _torch("output-returns-type", MODEL_ONLY + """
def output_fn(prediction, content_type):
    return ",".join(str(x) for x in prediction.flatten().tolist()), "text/csv"
""", ask([1, 2])),
    _torch("script-and-predict", """
        def predict_fn(data, model):
            return model(data).sum(0)
        """, ask(ROWS), ask_csv("1,2\n3,4\n"), model="script"),
    _torch("pre-model-and-warm-up", NET + """
CALLS = []
def pre_model_fn(model_dir):
    CALLS.append("pre")
def model_fn(model_dir):
    CALLS.append("model")
    return Net()
def model_warmup_fn(model_dir, model):
    CALLS.append("warm")
def predict_fn(data, model):
    return CALLS
""", ask(ROWS)),
    _torch("module-without-py", MODEL_ONLY, ask(ROWS), program="my_handlers"),
    _torch("model-is-a-function", """
        import torch
        def model_fn(model_dir):
            return torch.relu
        """, ask([[-1.0, 2.0]], ours=[[0.0, 2.0]], why="the image asks the function to eval()")),
]  # fmt: skip

BASE = [
    File(name="base-all-but-output", oracle="base", model="empty", code="""
        import json, numpy as np
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return np.array(json.loads(body))
        def predict_fn(data, model): return data * model
        """, questions=[ask(ROWS), ask(ROWS, CSV), ask(ROWS, NPY), ask(ROWS, "a/b", ours=406)]),
    File(name="base-decoders-of-the-toolkit", oracle="base", model="empty", code="""
        from sagemaker_inference import decoder, encoder
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return decoder.decode(body, content_type)
        def predict_fn(data, model): return data * model
        def output_fn(prediction, accept): return encoder.encode(prediction, accept)
        """, questions=[ask(ROWS), ask_csv("1,2\n3,4\n", CSV), ask_npy(ROWS, NPY),
                        ask_bytes(b"x", "a/b", ours=415)]),
]  # fmt: skip
