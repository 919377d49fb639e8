"""Inference files as users write them for Hugging Face's image."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.toolkit_questions import (
    CSV,
    JSON,
    NPY,
    File,
    Question,
    ask,
    ask_bytes,
    ask_csv,
    ask_npy,
    picture,
)

TEXT, TEXTS = {"inputs": "the film was good"}, {"inputs": ["good film", "bad paris"]}

HUB_PIPELINE = """
from transformers import pipeline

def model_fn(model_dir):
    return pipeline("text-classification", model=model_dir, tokenizer=model_dir)
"""
HUB_PAIR = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

def model_fn(model_dir):
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    return model, AutoTokenizer.from_pretrained(model_dir)
"""
LOGITS = """
def logits_of(texts, model, tokenizer):
    import torch
    with torch.no_grad():
        return model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
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
        "predict-only-with-parameters",
        """
        def predict_fn(data, model):
            return model(data["inputs"], **(data.get("parameters") or {}))
        """,
        ask({**TEXTS, "parameters": {"top_k": 2}}), ask({**TEXTS, "parameters": None}),
    ),
    _hub(
        "predict-only-inside-the-pipeline",
        LOGITS + """
def predict_fn(data, model):
    return logits_of(data["inputs"], model.model, model.tokenizer)
""",
        ask(TEXTS), ask(TEXTS, NPY),
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
        "predict-raises",
        "def predict_fn(data, model):\n    return data['not there']",
        ask(TEXT, ours=500, why="the handler's fault, not the client's"),
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
        HUB_PAIR + LOGITS + """
def predict_fn(data, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    scores = logits_of(data.pop("inputs", data), model, tokenizer).softmax(-1)
    return {"scores": scores, "label": scores.argmax(-1)}
""",
        ask(TEXTS), ask(TEXT),
    ),
    _hub(
        "all-four-with-context",
        """
        import json
        def model_fn(model_dir, context): return {"place": bool(context.system_properties)}
        def input_fn(data, content_type, context): return json.loads(data)
        def predict_fn(data, model, context): return [data, model]
        def output_fn(prediction, accept, context): return json.dumps(prediction)
        """,
        ask(TEXT),
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
    _hub(
        "transform-beside-predict", "def transform_fn(m, b, c, a): return b\n"
        "def predict_fn(d, m): return d", starts=False,
    ),
    _hub("model-not-callable", "import transformers\ndef model_fn(model_dir): return (1, 2)",
         ask(TEXT, ours="refused at start", why="no request could be answered")),
    _hub("no-folder-of-a-model", "def predict_fn(data, model): return 1", model="empty",
         starts=False),
    _hub("returns-text", returning("'a text'"), ask(TEXT)),
    _hub("returns-nothing", returning("None"), ask(TEXT)),
    _hub("returns-dict", returning("{'a': {'b': [1]}, 'c': 'é'}"), ask(TEXT)),
    _hub("returns-array", returning("np.eye(2)", "import numpy as np"), ask(TEXT), ask(TEXT, NPY)),
    _hub(
        "returns-numpy-numbers",
        returning("{'i': np.int64(3), 'f': np.float32(0.5), 'b': np.bool_(True)}",
                  "import numpy as np"),
        ask(TEXT),
    ),
    _hub("returns-date", returning("[datetime(2026, 1, 2, 3, 4)]", "from datetime import datetime"),
         ask(TEXT)),
    _hub("returns-records", returning("[{'label': 'a', 'score': 0.5}, {'label': 'b', 'score': 1}]"),
         ask(TEXT), ask(TEXT, CSV)),
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
