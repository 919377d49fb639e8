"""Inference files as users write them for the images of AWS and Hugging Face, and requests.

They are modelled on what the toolkits document and test: subsets of the functions, models of every
kind, each of the types that the defaults read and write. None is copied.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request, and where ours answers otherwise on purpose, what and why."""

    body: bytes
    content_type: str = JSON
    accept: str = JSON
    ours: Any = None
    """What ours answers, where it differs: a status, or the decoded answer."""
    why: str = ""


def ask(value: Any, accept: str = JSON, ours: Any = None, why: str = "") -> Question:
    """A JSON request."""
    return Question(body=json.dumps(value).encode(), accept=accept, ours=ours, why=why)


def ask_csv(text: str, accept: str = JSON, ours: Any = None, why: str = "") -> Question:
    """A CSV request."""
    return Question(body=text.encode(), content_type=CSV, accept=accept, ours=ours, why=why)


def ask_npy(value: Any, accept: str = JSON, ours: Any = None, why: str = "") -> Question:
    """An NPY request."""
    out = io.BytesIO()
    np.save(out, np.asarray(value))
    return Question(body=out.getvalue(), content_type=NPY, accept=accept, ours=ours, why=why)


def ask_bytes(body: bytes, content_type: str, ours: Any = None, why: str = "") -> Question:
    """Any other request."""
    return Question(body=body, content_type=content_type, ours=ours, why=why)


def picture() -> bytes:
    """A PNG of 4 by 3 points."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (4, 3), (200, 10, 10)).save(out, format="PNG")
    return out.getvalue()


@dataclass(frozen=True, kw_only=True)
class File:
    """One inference file: the image it is written for, its model's folder, its requests."""

    name: str
    oracle: str
    model: str
    code: str | None
    questions: Sequence[Question] = ()
    starts: bool = True
    """Whether the image takes it at start: where it does not, neither do ours."""


ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]]


TEXT, TEXTS = {"inputs": "the film was good"}, {"inputs": ["good film", "bad paris"]}

HUB_PIPELINE = """
from transformers import pipeline

def model_fn(model_dir):
    return pipeline("text-classification", model=model_dir, tokenizer=model_dir)
"""


def returning(expression: str, imports: str = "") -> str:
    """A predict_fn beside a trivial model_fn, for what the encoder makes of a prediction."""
    return f"""
from transformers import AutoConfig
{imports}

def model_fn(model_dir):
    return "a model"

def predict_fn(data, model):
    return {expression}
"""


def _hub(
    name: str, code: str | None, *questions: Question, model: str = "classifier", **more: Any
) -> File:
    return File(
        name=f"hf-{name}", oracle="huggingface", model=model, code=code, questions=questions, **more
    )


HUGGING_FACE = [
    _hub("no-file", None, ask(TEXT), ask({"inputs": ["the film was good"]})),
    _hub(
        "predict-only",
        """
        def predict_fn(data, model):
            inputs = data.pop("inputs", data)
            return {"answers": model(inputs), "asked": len(inputs)}
        """,
        ask(TEXT), ask(TEXTS), ask({"inputs": []}, ours=500),
    ),
    _hub(
        "predict-only-npy",
        "def predict_fn(data, model):\n    return {'shape': data.shape, 'sum': data.sum()}",
        ask_npy([[1.5, 2], [3, 4]]), ask_npy(np.arange(6, dtype="int64")),
    ),
    _hub(
        "predict-only-csv",
        "def predict_fn(data, model):\n    return data['inputs']",
        ask_csv("inputs\ngood film\nbad film\n"),
        ask_csv('question,context\nwho,"anna, said paris"\n'),
        ask_csv("good film\nbad film\n", ours=400),
        ask_csv("label,inputs\nx,good\ny,bad\n"),
    ),
    _hub(
        "predict-only-picture",
        "def predict_fn(data, model):\n    image = data['inputs']\n    return [image.mode, image.size]",
        ask_bytes(picture(), "image/png"), ask_bytes(b"no picture", "image/jpeg", ours=400),
    ),
    _hub(
        "predict-only-sound",
        "def predict_fn(data, model):\n    return len(data['inputs'])",
        ask_bytes(b"\0\1\2\3", "audio/x-flac"), ask_bytes(b"\0\1", "audio/wave"),
    ),
    _hub(
        "predict-only-other-types",
        "def predict_fn(data, model):\n    return 1",
        ask_bytes(b"<a/>", "text/xml", ours=415), ask_bytes(b"text", "text/plain", ours=415),
        ask_bytes(b'{"a": 1}', "application/json; charset=utf-8", ours=1, why="a charset is read"),
        ask_bytes(b"{", JSON, ours=400), ask_bytes(b"", JSON, ours=400),
    ),
    _hub(
        "input-only",
        """
        import json
        def input_fn(input_data, content_type):
            return {"inputs": json.loads(input_data)["text"].lower()}
        """,
        ask({"text": "GOOD film"}), ask({"no": 1}, ours=500, why="a KeyError is the handler's"),
    ),
    _hub(
        "input-is-text-for-json-and-csv",
        "def input_fn(input_data, content_type):\n    return {'inputs': type(input_data).__name__}\n"
        "def predict_fn(data, model):\n    return data",
        ask(1), ask_csv("1,2"), ask_npy([1]), ask_bytes(b"x", "text/html"),
        ask_bytes(b"x", "application/x-ndjson"), ask_bytes(b"x", "text/libsvm"),
    ),
    _hub(
        "output-only",
        """
        import json
        def output_fn(prediction, accept):
            assert type(prediction) is list and type(prediction[0]) in (dict, list)
            return json.dumps({"wrapped": prediction, "accept": accept})
        """,
        ask(TEXT), ask({**TEXTS, "parameters": {"top_k": 1}}),
    ),
    _hub("model-only-pipeline", HUB_PIPELINE, ask(TEXT), ask(TEXTS),
         ask({**TEXTS, "parameters": {"top_k": 3}})),
    _hub(
        "model-only-pipeline-csv",
        HUB_PIPELINE,
        ask(TEXTS, CSV), ask_csv("inputs\ngood film\n", CSV), ask_csv("inputs\ngood\nbad\n"),
    ),
    _hub(
        "model-only-wrong-requests",
        HUB_PIPELINE,
        ask({**TEXT, "parameters": {"no_such": 1}}),
        ask({**TEXT, "parameters": [1]}, ours=400),
        ask(TEXT, "text/html", ours=406), ask(TEXT, "application/xml;q=0.9", ours=406),
    ),
    _hub(
        "model-only-callable",
        """
        import transformers
        class Model:
            def __call__(self, inputs, times=1):
                return [inputs] * times
        def model_fn(model_dir):
            return Model()
        """,
        ask({"inputs": "a", "parameters": {"times": 3}}), ask({"inputs": {"b": 1}}),
        ask({"question": "q", "context": "c"}), ask({"inputs": None}), ask_csv("inputs\nz\n"),
    ),
    _hub(
        "model-and-predict-pair",
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        def model_fn(model_dir):
            model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
            return model, AutoTokenizer.from_pretrained(model_dir)

        def predict_fn(data, model_and_tokenizer):
            model, tokenizer = model_and_tokenizer
            encoded = tokenizer(data.pop("inputs", data), return_tensors="pt", padding=True)
            with torch.no_grad():
                scores = model(**encoded).logits.softmax(-1)
            return {"scores": scores, "label": scores.argmax(-1)}
        """,
        ask(TEXTS), ask(TEXT),
    ),
    _hub(
        "transform-only",
        """
        import json
        def transform_fn(model, input_data, content_type, accept):
            return json.dumps([accept, model(json.loads(input_data)["inputs"])])
        """,
        ask(TEXT), ask(TEXT, "text/plain"),
    ),
    _hub("model-not-callable", "import transformers\ndef model_fn(model_dir): return (1, 2)",
         ask(TEXT, ours="refused at start", why="no request could be answered")),
    _hub("no-folder-of-a-model", "def predict_fn(data, model): return 1", model="empty",
         starts=False),
    _hub("returns-nothing", returning("None"), ask(TEXT)),
    _hub("returns-array", returning("np.eye(2)", "import numpy as np"), ask(TEXT), ask(TEXT, NPY)),
    _hub(
        "returns-numpy-numbers",
        returning("{'i': np.int64(3), 'f': np.float32(0.5), 'b': np.bool_(True)}",
                  "import numpy as np"),
        ask(TEXT),
    ),
    _hub("returns-date", returning("[datetime(2026, 1, 2, 3, 4)]", "from datetime import datetime"),
         ask(TEXT)),
    _hub("returns-nan", returning("{'score': float('nan')}"), ask(TEXT, ours=500)),
    _hub("returns-an-object", returning("[object()]"), ask(TEXT, ours=500)),
    _hub("returns-a-set", returning("{3, 1}"),
         ask(TEXT, ours=[1, 3], why="a set is a list; the image has an error")),
    _hub("returns-a-dict-for-csv", returning("{'label': 'a', 'score': 1}"),
         ask(TEXT, CSV, ours=[["label", "score"], ["a", "1"]],
             why="one record; the image has an error")),
    _hub("returns-picture", returning("Image.new('RGB', (2, 2))", "from PIL import Image"),
         ask(TEXT)),
]  # fmt: skip


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
    _torch("output-returns-type", MODEL_ONLY + """
def output_fn(prediction, content_type):
    return ",".join(str(x) for x in prediction.flatten().tolist()), "text/csv"
""", ask([1, 2])),
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
