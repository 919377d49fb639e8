"""Files written for the images of AWS and Hugging Face answer here as they do there.

Each file of `toolkit_files` is loaded twice in this process, by the image's toolkit and by a worker's
runner, and asked the same. What differs on purpose says so beside the request, with our answer.

- `base`: sagemaker_inference's Transformer with its DefaultInferenceHandler.
- `pytorch`: the same Transformer with the functions that sagemaker-pytorch-inference-toolkit puts
  behind it. That toolkit is on no package index as a wheel, so that its functions are written here
  anew, over sagemaker_inference's decoders and encoders, which do the work.
- `huggingface`: sagemaker_huggingface_inference_toolkit's HuggingFaceHandlerService. It imports the
  model server `mms` for one exception, and a name that transformers 5 has dropped: both stand in.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sagemaker_inference import decoder, default_inference_handler, encoder, transformer, utils
from transformers import (
    BertConfig,
    BertForSequenceClassification,
)

from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker import runner
from tests.support.paths import CODE
from tests.support.serving_kit import tokenizer
from tests.support.toolkit_files import BASE, CSV, HUGGING_FACE, NPY, PYTORCH, File, Question
from tests.support.worker_front import ask, load_runner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class ServersContext:
    """The part of a model server's context that the toolkits use."""

    def __init__(self, model_dir: Path, question: Question | None = None) -> None:
        self.system_properties = {"model_dir": str(model_dir), "gpu_id": None, "batch_size": 1}
        self.headers = {}
        if question is not None:
            self.headers = {"Content-Type": question.content_type, "Accept": question.accept}
        self.request_processor = [self]
        self.metrics = self
        self.status, self.content_type = 200, ""

    def get_request_properties(self) -> Mapping[str, str]:
        return self.headers

    def add_time(self, *_: Any) -> None: ...

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.content_type = value

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self.status = code


class PyTorchDefaults(default_inference_handler.DefaultInferenceHandler):  # type: ignore[misc]
    """As sagemaker-pytorch-inference-toolkit 2.0.26.dev0 documents and computes them, on a CPU."""

    def default_model_fn(self, model_dir: str) -> Any:
        files = [path for path in Path(model_dir).iterdir() if path.suffix in (".pt", ".pth")]
        preferred = Path(model_dir) / "model.pt"
        if not preferred.is_file():
            if len(files) != 1:
                raise ValueError(f"Exactly one .pth or .pt file is required: {files}")
            preferred = files[0]
        load: Any = torch.jit.load
        return load(str(preferred), map_location="cpu")

    def default_input_fn(self, input_data: Any, content_type: str) -> Any:
        array = decoder.decode(input_data, content_type)
        if content_type in ("application/json", "text/csv"):
            return torch.FloatTensor(array)
        return torch.from_numpy(array)

    def default_predict_fn(self, data: Any, model: Any) -> Any:
        with torch.no_grad():
            return model.eval()(data)

    def default_output_fn(self, prediction: Any, accept: str) -> Any:
        if type(prediction) is torch.Tensor:
            prediction = prediction.detach().cpu().numpy().tolist()
        for content_type in utils.parse_accept(accept):
            if content_type in encoder.SUPPORTED_CONTENT_TYPES:
                return encoder.encode(prediction, content_type)
        raise TypeError(accept)


class TransformerOracle:
    """sagemaker_inference's Transformer over some defaults."""

    def __init__(self, model_dir: Path, defaults: Any) -> None:
        self._model_dir = model_dir
        self._transformer = transformer.Transformer(default_inference_handler=defaults)
        context = ServersContext(model_dir)
        self._transformer.validate_and_initialize(model_dir=str(model_dir), context=context)

    def answer(self, question: Question) -> tuple[int, Any]:
        """The status and the body."""
        context = ServersContext(self._model_dir, question)
        (body,) = self._transformer.transform([{"body": bytearray(question.body)}], context)
        return context.status, body


class HuggingFaceOracle:
    """Hugging Face's handler service."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._service = importlib.import_module(
            "sagemaker_huggingface_inference_toolkit.handler_service"
        ).HuggingFaceHandlerService()
        self._service.initialize(ServersContext(model_dir))

    def answer(self, question: Question) -> tuple[int, Any]:
        """The status and the body; every error is 400 there."""
        try:
            (body,) = self._service.handle(
                [{"body": bytearray(question.body)}], ServersContext(self._model_dir, question)
            )
        except Exception as error:
            return 400, str(error)
        return 200, body


def prepare_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's toolkit be imported without its model server, in this environment."""
    import transformers.file_utils

    class PredictionException(Exception):
        def __init__(self, message: str, error_code: int = 500) -> None:
            super().__init__(message)

    mms, service = types.ModuleType("mms"), types.ModuleType("mms.service")
    service.__dict__["PredictionException"] = PredictionException
    monkeypatch.setitem(sys.modules, "mms", mms)
    monkeypatch.setitem(sys.modules, "mms.service", service)
    monkeypatch.setattr(transformers.file_utils, "is_tf_available", lambda: False, raising=False)


def make_oracle(kind: str, model_dir: Path) -> Any:
    """The oracle of that kind over a model's folder, whose code/ is first on sys.path."""
    if kind == "huggingface":
        return HuggingFaceOracle(model_dir)
    plain = default_inference_handler.DefaultInferenceHandler()
    return TransformerOracle(model_dir, PyTorchDefaults() if kind == "pytorch" else plain)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model's folder of each kind, without code, written once."""
    base = tmp_path_factory.mktemp("models")
    reader = tokenizer(32)
    size = {"vocab_size": len(reader), "hidden_size": 16, "num_hidden_layers": 1}
    bert = BertConfig(
        **size, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
        num_labels=3,
    )  # fmt: skip

    def folder(kind: str) -> Path:
        path = base / kind
        if path.is_dir():
            return path
        path.mkdir()
        torch.manual_seed(1)
        if kind == "classifier":
            BertForSequenceClassification(bert).save_pretrained(path)
            reader.save_pretrained(path)
        if kind == "weights":
            torch.save({"scale": torch.tensor(5.0)}, path / "weights.pth")
        return path

    return folder


@pytest.fixture
def install_file(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[File], Path]]:
    """place(file): a model's folder with that file as its code."""
    prepare_toolkit(monkeypatch)
    # The toolkit writes HF_TASK: what was set here before is set again after the test.
    monkeypatch.setenv("HF_TASK", "")
    monkeypatch.delenv("HF_TASK")
    # As in an image, where nobody but the server knows the folder with the image's inference.py.
    monkeypatch.setattr(
        sys, "path", [element for element in sys.path if Path(element).resolve() != CODE]
    )
    monkeypatch.delitem(sys.modules, "inference", raising=False)
    before = set(sys.modules)

    def write(file: File) -> Path:
        model = tmp_path / "model"
        model.mkdir()
        for entry in folders(file.model).iterdir():
            (model / entry.name).symlink_to(entry)
        (model / "code").mkdir()
        if file.code is not None:
            (model / "code" / "inference.py").write_text(textwrap.dedent(file.code))
        return model

    yield write
    forget(before)


def forget(before: set[str]) -> None:
    """Neither side's module of the user's file is the other's."""
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if "/model/code/" in path:
            del sys.modules[name]


def _number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.allclose(one, other, rtol=1e-4, atol=1e-5)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    return bool(one == other)


FILES = [*HUGGING_FACE, *PYTORCH, *BASE]
REFUSED = "refused at start"


# Every fourth of the large sets in each run, the others in the heavy one.
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            id=file.name,
            marks=[] if number % 4 == 0 or file.oracle == "base" else pytest.mark.heavy,
        )
        for number, file in enumerate(FILES)
    ],
)
def test_a_file_answers_as_in_the_image_it_was_written_for(
    file: File, install_file: Callable[[File], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_decoded(value: Any, kind: str) -> Any:
        return [[_number(cell) for cell in row] for row in value] if kind == CSV else value

    def decoded(body: Any, kind: str) -> Any:
        """What a client makes of an answer."""
        raw = body if isinstance(body, bytes) else str(body).encode()
        if kind == NPY:
            return np.load(io.BytesIO(raw))
        if kind == CSV:
            return [
                [_number(cell) for cell in row] for row in csv.reader(io.StringIO(raw.decode()))
            ]
        try:
            return json.loads(raw)
        except ValueError:
            return raw.decode()

    def answer(loaded: runner.ModelRunner, question: Question) -> tuple[int, str, bytes]:
        """Status, type and body."""
        try:
            body, kind, context = ask(loaded, question.body, question.content_type, question.accept)
        except Fault as fault:
            return fault.status, "", str(fault).encode()
        status, _ = context.get_response_status(0)
        return status, context.get_response_content_type(0) or kind, body

    def compare(
        question: Question, status: int, kind: str, body: bytes, image: tuple[int, Any]
    ) -> None:
        reported = f"{question}\nours: {status} {kind} {body[:300]!r}\nthe image's: {image}"
        if isinstance(question.ours, int) and question.ours >= 400:
            assert status == question.ours, reported
            assert image[0] >= 400 or question.why, reported
            return
        assert status == 200, reported
        answer = decoded(body, kind)
        if question.ours is not None:
            assert question.why
            assert question.ours == "json" or same(answer, as_decoded(question.ours, kind)), (
                reported
            )
            assert kind in question.accept
            return
        assert image[0] == 200, reported
        assert same(answer, decoded(image[1], kind)), reported

    model = install_file(file)
    if not file.starts:
        with pytest.raises(Exception, match=r"."):
            load_runner(model)
    refused = any(question.ours == REFUSED for question in file.questions)
    if refused:
        with pytest.raises(ValueError, match="define predict_fn"):
            load_runner(model)
    answers = []
    if file.starts and not refused:
        loaded = load_runner(model)
        answers = [answer(loaded, question) for question in file.questions]

    forget({name for name in sys.modules if not name.startswith("inference")})
    sys.modules.pop("inference", None)
    monkeypatch.syspath_prepend(str(model / "code"))
    if not file.starts:
        with pytest.raises(Exception, match=r"."):
            make_oracle(file.oracle, model)
        return
    oracle = make_oracle(file.oracle, model)
    for question, (status, kind, body) in zip(file.questions, answers, strict=False):
        compare(question, status, kind, body, oracle.answer(question))
