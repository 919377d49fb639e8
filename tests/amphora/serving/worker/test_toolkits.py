"""Files written for the images of AWS and Hugging Face answer here as they do there.

Each file is loaded by a worker's runner. Hugging Face's toolkit, beside it, is asked the same; the
PyTorch image's is on no package index: what it documents is written down, and sagemaker_inference's decoders
and encoders, over which it lies, are users' own imports.
"""

import base64
import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from amphora.common.errors import CodeError
from amphora.serving.protocol.media_types import Fault
from tests.support.images import TEXT as IMAGE
from tests.support.paths import CODE
from tests.support.serving_kit import assert_close, npy, save
from tests.support.toolkit import import_toolkit
from tests.support.worker_front import ask as ask_runner
from tests.support.worker_front import load_runner, write_code

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
PNG = base64.b64decode(IMAGE)
ROWS, DOUBLED = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]], [[2.0, 4.0, 6.0], [8.0, 10.0, 13.0]]
TEXT, TEXTS = {"inputs": "the film was good"}, {"inputs": ["good film", "bad paris"]}


class Question(NamedTuple):
    """A request; `ours` is our answer where it differs from the image's: a status, or what is decoded."""

    body: bytes
    content_type: str = JSON
    accept: str = JSON
    ours: Any = None


def ask(value: Any, accept: str = JSON, ours: Any = None) -> Question:
    return Question(json.dumps(value).encode(), JSON, accept, ours)


def csv_of(text: str, accept: str = JSON, ours: Any = None) -> Question:
    return Question(text.encode(), CSV, accept, ours)


def answer(loaded: Any, question: Question) -> tuple[int, str, Any]:
    """Return a runner's status, type, and what a client makes of its body."""
    try:
        body, kind, context = ask_runner(loaded, *question[:3])
    except Fault as fault:
        return fault.status, "", str(fault)
    kind = context.get_response_content_type(0) or kind
    return context.get_response_status(0)[0], kind, decoded(body, kind)


def decoded(body: Any, kind: str) -> Any:
    def number(cell: str) -> Any:
        try:
            return float(cell)
        except ValueError:
            return cell

    raw = body if isinstance(body, bytes) else str(body).encode()
    if kind == NPY:
        return np.load(io.BytesIO(raw)).tolist()
    if kind == CSV:
        return [[*map(number, row)] for row in csv.reader(io.StringIO(raw.decode()))]
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Path]:
    """install(code): a model's folder with that inference file, if any."""
    # As in an image, where nobody but the server knows the folder with the image's inference.py.
    monkeypatch.setattr(sys, "path", [e for e in sys.path if Path(e).resolve() != CODE])
    monkeypatch.delitem(sys.modules, "inference", raising=False)
    (tmp_path / "model" / "code").mkdir(parents=True)
    return lambda code: write_code(
        tmp_path / "model", {} if code is None else {"code/inference.py": code}
    )


def hub(name: str, code: str | None, *questions: Question, saved: bool = True) -> Any:
    # Some in each run, the others in the heavy one.
    marks = [] if name.startswith("predict-only") else [pytest.mark.heavy]
    return pytest.param(code, questions, saved, id=name, marks=marks)


def returning(expression: str, imports: str = "") -> str:
    """A predict_fn beside a trivial model_fn, for what the encoder makes of a prediction."""
    return (
        f"from transformers import AutoConfig\n{imports}\n"
        f"def model_fn(model_dir): return 'a model'\ndef predict_fn(data, model): return {expression}"
    )


HUB_PIPELINE = """
from transformers import pipeline

def model_fn(model_dir):
    return pipeline("text-classification", model=model_dir, tokenizer=model_dir)
"""


@pytest.mark.parametrize(
    ("code", "questions", "saved"),
    [
        hub("no-file", None, ask(TEXT), ask({"inputs": ["the film was good"]})),
        hub(
            "predict-only",
            """
            def predict_fn(data, model):
                inputs = data.pop("inputs", data)
                return {"answers": model(inputs), "asked": len(inputs)}
            """,
            ask(TEXT), ask(TEXTS), ask({"inputs": []}, ours=500),
        ),
        hub(
            "predict-only-npy",
            "def predict_fn(data, model):\n    return {'shape': data.shape, 'sum': data.sum()}",
            Question(npy([[1.5, 2], [3, 4]]), NPY), Question(npy(np.arange(6)), NPY),
        ),
        hub(
            "predict-only-csv",
            "def predict_fn(data, model):\n    return data['inputs']",
            csv_of("inputs\ngood film\nbad film\n"),
            csv_of('question,context\nwho,"anna, said paris"\n'),
            csv_of("good film\nbad film\n", ours=400),
            csv_of("label,inputs\nx,good\ny,bad\n"),
        ),
        hub(
            "predict-only-picture",
            "def predict_fn(data, model):\n    image = data['inputs']\n    return [image.mode, image.size]",
            Question(PNG, "image/png"), Question(b"no picture", "image/jpeg", ours=400),
        ),
        hub(
            "predict-only-sound",
            "def predict_fn(data, model):\n    return len(data['inputs'])",
            Question(b"\0\1\2\3", "audio/x-flac"), Question(b"\0\1", "audio/wave"),
        ),
        hub(
            "predict-only-other-types",
            "def predict_fn(data, model):\n    return 1",
            Question(b"<a/>", "text/xml", ours=415), Question(b"text", "text/plain", ours=415),
            Question(b'{"a": 1}', "application/json; charset=utf-8", ours=1),  # a charset is read
            Question(b"{", JSON, ours=400), Question(b"", JSON, ours=400),
        ),
        hub(
            "input-only",
            """
            import json
            def input_fn(input_data, content_type):
                return {"inputs": json.loads(input_data)["text"].lower()}
            """,
            ask({"text": "GOOD film"}), ask({"no": 1}, ours=500),
        ),
        hub(
            "output-only",
            """
            import json
            def output_fn(prediction, accept):
                assert type(prediction) is list and type(prediction[0]) in (dict, list)
                return json.dumps({"wrapped": prediction, "accept": accept})
            """,
            ask(TEXT), ask({**TEXTS, "parameters": {"top_k": 1}}),
        ),
        hub("model-only-pipeline", HUB_PIPELINE, ask(TEXT), ask(TEXTS),
             ask({**TEXTS, "parameters": {"top_k": 3}})),
        hub(
            "model-only-pipeline-csv",
            HUB_PIPELINE,
            ask(TEXTS, CSV), csv_of("inputs\ngood film\n", CSV), csv_of("inputs\ngood\nbad\n"),
        ),
        hub(
            "model-only-wrong-requests",
            HUB_PIPELINE,
            ask({**TEXT, "parameters": {"no_such": 1}}),
            ask({**TEXT, "parameters": [1]}, ours=400),
            ask(TEXT, "text/html", ours=406), ask(TEXT, "application/xml;q=0.9", ours=406),
        ),
        hub(
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
            ask({"question": "q", "context": "c"}), ask({"inputs": None}), csv_of("inputs\nz\n"),
        ),
        hub(
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
        hub(
            "transform-only",
            """
            import json
            def transform_fn(model, input_data, content_type, accept):
                return json.dumps([accept, model(json.loads(input_data)["inputs"])])
            """,
            ask(TEXT), ask(TEXT, "text/plain"),
        ),
        hub("model-not-callable", "import transformers\ndef model_fn(model_dir): return (1, 2)",
             ask(TEXT, ours="refused at start")),
        hub("no-folder-of-a-model", "def predict_fn(data, model): return 1", saved=False),
        hub("returns-nothing", returning("None"), ask(TEXT)),
        hub("returns-array", returning("np.eye(2)", "import numpy as np"), ask(TEXT), ask(TEXT, NPY)),
        hub(
            "returns-numpy-numbers",
            returning("{'i': np.int64(3), 'f': np.float32(0.5), 'b': np.bool_(True)}",
                      "import numpy as np"),
            ask(TEXT),
        ),
        hub("returns-date", returning("[datetime(2026, 1, 2, 3, 4)]", "from datetime import datetime"),
             ask(TEXT)),
        hub("returns-nan", returning("{'score': float('nan')}"), ask(TEXT, ours=500)),
        hub("returns-an-object", returning("[object()]"), ask(TEXT, ours=500)),
        hub("returns-a-set", returning("{3, 1}"),
             ask(TEXT, ours=[1, 3])),  # the image has an error
        hub("returns-a-dict-for-csv", returning("{'label': 'a', 'score': 1}"),
             ask(TEXT, CSV, ours=[["label", "score"], ["a", 1.0]])),  # the image has an error
        hub("returns-picture", returning("Image.new('RGB', (2, 2))", "from PIL import Image"),
             ask(TEXT)),
    ],
)  # fmt: skip
def test_a_file_answers_as_in_hugging_faces_image(
    code: str | None,
    questions: tuple[Question, ...],
    saved: bool,
    install: Callable[[str | None], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = install(code)
    # The image computes in float32; on some CPUs this project does not.
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")
    if saved:
        save("BertForSequenceClassification", model, num_labels=3)
    # It writes HF_TASK: what was set here before is set again after the test.
    monkeypatch.setenv("HF_TASK", "")
    monkeypatch.delenv("HF_TASK")
    toolkit = import_toolkit(monkeypatch, "handler_service").HuggingFaceHandlerService()
    properties = {"model_dir": str(model), "gpu_id": None, "batch_size": 1}

    def image_answer(question: Question) -> Any:
        """Return the image's body; None for an error."""
        headers = {"Content-Type": question.content_type, "Accept": question.accept}
        context = mock.MagicMock(system_properties=properties)
        context.request_processor[0].get_request_properties.return_value = headers
        try:
            (body,) = toolkit.handle([{"body": bytearray(question.body)}], context)
        except Exception:
            return None
        return body

    refused = any(question.ours == "refused at start" for question in questions)
    if refused or not saved:
        with pytest.raises(Exception, match=r"define predict_fn" if refused else r"."):
            load_runner(model)
        answers = []
    else:
        loaded = load_runner(model)
        answers = [answer(loaded, question) for question in questions]
    sys.modules.pop("inference", None)
    monkeypatch.syspath_prepend(str(model / "code"))
    if not saved:
        with pytest.raises(Exception, match=r"."):
            toolkit.initialize(mock.MagicMock(system_properties=properties))
        return
    toolkit.initialize(mock.MagicMock(system_properties=properties))
    for question, (status, kind, value) in zip(questions, answers, strict=False):
        image = image_answer(question)
        shown = f"{question}\nours: {status} {kind} {value}\nthe image's: {image}"
        if isinstance(question.ours, int) and question.ours >= 400:
            assert (status, image) == (question.ours, None), shown
            continue
        assert status == 200, shown
        if question.ours is None:
            assert image is not None, shown
        else:
            assert kind in question.accept, shown
        expected = decoded(image, kind) if question.ours is None else question.ours
        assert_close(value, expected, 1e-4, shown)


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale

def model_fn(model_dir):
    return Net()
"""


@pytest.mark.parametrize(("code", "questions"), [pytest.param(*row, id=name) for name, row in {
    "model only, JSON": (NET, [
        ask(ROWS, ours=DOUBLED), ask([1, 2.5], ours=[2.0, 5.0]), ask([[[1], [2]]], ours=[[[2.0], [4.0]]]),
        # There, a number is so many numbers of memory as it was, and booleans are refused.
        ask(7, ours=14.0), ask([True, False], ours=[2.0, 0.0]),
    ]),
    "model only, CSV": (NET, [
        csv_of("1,2,3\n4,5,6.5\n", ours=DOUBLED), csv_of("1,2,3\n", ours=DOUBLED[0]),
        csv_of("1\n2\n", ours=[2.0, 4.0]), csv_of("5", ours=10.0),
        csv_of("1e3,-2.0\n3.0,4.5\n", ours=[[2000.0, -4.0], [6.0, 9.0]]),
        csv_of("1,,3\n4,5,6\n", ours=400),  # there, -1
        csv_of("a,b\n1,2\n", ours=400),
    ]),
    "model only, NPY": (NET, [
        Question(npy(np.float32(ROWS)), NPY, ours=DOUBLED), Question(npy(np.float64(ROWS)), NPY, ours=DOUBLED),
        Question(npy(np.arange(3)), NPY, ours=[0.0, 2.0, 4.0]), ask(ROWS, NPY, ours=DOUBLED),
    ]),
    "model only, types": (NET, [
        ask(ROWS, CSV, ours=DOUBLED), ask([1, 2], CSV, ours=[[2.0], [4.0]]),
        ask(ROWS, "text/csv, application/json", ours=DOUBLED), ask(ROWS, "text/html, text/csv", ours=DOUBLED),
        ask(ROWS, "text/csv;q=0.1, application/json", ours=DOUBLED), ask(ROWS, "image/png", ours=406),
    ]),
    "model only, wrong requests": (NET, [
        ask(["a", "b"], ours=400), ask([[1, 2], [3]], ours=400), ask({"inputs": [1]}, ours=500),
        ask([None], ours=400), Question(b"x", "text/plain", ours=415), Question(b"[1", ours=400),
        Question(b"not npy", NPY, ours=400), Question(npy(np.array(["a"])), NPY, ours=400),
    ]),
    "whole numbers of NPY index an embedding": (
        "import torch\ndef model_fn(d): return torch.nn.Embedding.from_pretrained(torch.eye(4)[:, :2])",
        [Question(npy([0, 3]), NPY, ours=[[1.0, 0.0], [0.0, 0.0]]), ask([0, 1], ours=500)],
    ),
    "dropout is off": ("import torch\ndef model_fn(d): return torch.nn.Dropout(0.9)",
                       [ask([1, 2, 3, 4, 5, 6], ours=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])]),
    "a tensor": (NET + "def predict_fn(data, model): return model(data)",
                 [ask(ROWS, ours=DOUBLED), ask(ROWS, CSV, ours=DOUBLED), ask(ROWS, NPY, ours=DOUBLED)]),
    "an array": (NET + "def predict_fn(data, model): return model(data).detach().numpy()",
                 [ask(ROWS, ours=DOUBLED), ask(ROWS, CSV, ours=DOUBLED), ask(ROWS, NPY, ours=DOUBLED)]),
    "bfloat16": (NET + "def predict_fn(data, model): return model(data).to(torch.bfloat16)",
                 [ask([1, 2], ours=[2.0, 4.0])]),  # the image has an error
    "a tuple of tensors": (NET + "def predict_fn(data, model): return model(data).detach(), torch.ones(2)",
                           [ask(ROWS, ours=[DOUBLED, [1.0, 1.0]])]),
    "an object": (NET + "def predict_fn(data, model): return model(torch.tensor(data['instances']))",
                  [ask({"instances": [1.0, 2.0]}, ours=[2.0, 4.0])]),
    # The image sends NaN and Infinity, which are no JSON.
    "NaN": (NET + "def predict_fn(data, model): return model(data) / 0", [ask([0.0], ours=500), ask([1.0], ours=500)]),
    "a type of output_fn's": (
        NET + "def output_fn(prediction, content_type): return str(prediction.tolist())[1:-1], 'text/csv'",
        [ask([1, 2], "*/*", ours=[[2.0, 4.0]])],
    ),
    "functions before and after the load": (NET.replace("return Net()", "CALLS.append('model')\n    return Net()") + """
CALLS = []
def pre_model_fn(model_dir): CALLS.append("pre")
def model_warmup_fn(model_dir, model): CALLS.append("warm")
def predict_fn(data, model): return CALLS
""", [ask(ROWS, ours=["pre", "model", "warm"])]),
    "a function as the model": ("import torch\ndef model_fn(model_dir): return torch.relu",
                                [ask([[-1.0, 2.0]], ours=[[0.0, 2.0]])]),
    "all but output_fn": ("""
        import json, numpy as np
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return np.array(json.loads(body))
        def predict_fn(data, model): return data * model
        """, [ask(ROWS, ours=DOUBLED), ask(ROWS, CSV, ours=DOUBLED), ask(ROWS, NPY, ours=DOUBLED),
              ask(ROWS, "a/b", ours=406)]),
    "the toolkit's decoders and encoders": ("""
        from sagemaker_inference import decoder, encoder
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return decoder.decode(body, content_type)
        def predict_fn(data, model): return data * model
        def output_fn(prediction, accept): return encoder.encode(prediction, accept)
        """, [ask(ROWS, ours=DOUBLED), csv_of("1,2\n3,4\n", CSV, ours=[[2.0, 4.0], [6.0, 8.0]]),
              Question(npy(ROWS), NPY, NPY, DOUBLED), Question(b"x", "a/b", ours=415)]),
}.items()])  # fmt: skip
def test_a_file_answers_as_the_pytorch_image_documents(
    code: str, questions: list[Question], install: Callable[[str | None], Path]
) -> None:
    loaded = load_runner(install(code))
    for question in questions:
        status, kind, value = answer(loaded, question)
        shown = f"{question}: {status} {kind} {value}"
        if isinstance(question.ours, int):
            assert status == question.ours, shown
        else:
            assert status == 200, shown
            assert_close(value, question.ours, 1e-5, shown)
            first = re.search(f"({JSON}|{CSV}|{NPY})(?!;q)", question.accept)
            assert first is None or kind == first[0], shown


ARROW = """
import pyarrow as pa
def model_fn(model_dir): return 3
def input_fn(body, content_type): return pa.ipc.open_stream(body).read_all()
def predict_fn(table, model): return table.append_column("b", pa.array([model] * len(table)))
def output_fn(table, accept):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue(), accept
"""


def test_arrow_is_read_and_sent(install: Callable[[str | None], Path]) -> None:
    import pyarrow as pa

    kind, table, sink = "application/vnd.apache.arrow.stream", pa.table({"a": [1, 2]}), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body, sent, _ = ask_runner(load_runner(install(ARROW)), sink.getvalue(), kind, kind)
    assert sent == kind
    assert pa.ipc.open_stream(body).read_all().to_pydict() == {"a": [1, 2], "b": [3, 3]}


MMS = """
import json
class ModelHandler:
    initialized = False
    def initialize(self, context): self.initialized = True
    def handle(self, data, context): return [json.dumps(json.loads(row["body"])) for row in data]
_service = ModelHandler()
def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    return None if data is None else _service.handle(data, context)
"""


@pytest.mark.parametrize(("code", "outcome"), {
    "with contexts": ("""
        import json
        def model_fn(model_dir, context=None): return {"gpu": context.system_properties.get("gpu_id")}
        def input_fn(input_data, content_type, context=None): return json.loads(input_data)
        def predict_fn(data, model, context=None): return [model["gpu"], data.pop("inputs", data)]
        def output_fn(prediction, accept, context=None): return json.dumps(prediction)
        """, [None, "a"]),
    "scikit-learn's arguments": ("""
        import json
        import numpy as np
        def model_fn(model_dir): return None
        def input_fn(input_data, content_type="application/json"): return np.array([[json.loads(input_data)["n"]]])
        def predict_fn(input_object, model): return input_object.sum(axis=1)
        def output_fn(prediction, response_content_type="application/json"): return json.dumps(prediction.tolist())
        """, [2]),
    "a loop of its own": ("""
        import asyncio
        async def answer(data):
            await asyncio.sleep(0)
            return data["inputs"]
        def model_fn(model_dir): return None
        def predict_fn(data, model): return asyncio.run(answer(data))
        """, "a"),
    "async": ("async def predict_fn(data, model): return data\ndef model_fn(d): return 1", "Write it with `def`"),
    "a coroutine": ("async def go(data): return data\ndef model_fn(d): return 1\n"
                    "def predict_fn(data, model): return go(data)", 500),
    "MMS": (MMS, "defines handle, ModelHandler, _service, and no function that the server calls. Define model_fn"),
    "scikit-learn's image": ("from sagemaker_containers.beta.framework import worker\ndef model_fn(d): return 1",
                             "'sagemaker_containers', .* is of another server or image"),
    "DJL": ("from djl_python import Input, Output\ndef handle(inputs: Input): return Output()", "of another server or image"),
    "TorchServe": ("from ts.torch_handler.base_handler import BaseHandler\nclass A(BaseHandler): ...", "of another server or image"),
    "an exit": ("def model_fn(d): return 1\ndef predict_fn(data, model): exit(3)", 500),
}.values())  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_as_others_publish_it_answers_or_is_refused_with_the_remedy(
    code: str, outcome: Any, install: Callable[[str | None], Path]
) -> None:
    folder = install(code)
    if isinstance(outcome, str) and len(outcome) > 1:
        with pytest.raises(CodeError, match=outcome):
            load_runner(folder)
        return
    status, _, value = answer(load_runner(folder), ask({"inputs": "a", "n": 2}))
    assert (status, None if status == 500 else value) == (
        (500, None) if outcome == 500 else (200, outcome)
    )
