"""What the images of AWS and Hugging Face answer: their own toolkits, in this process.

- `base`: sagemaker_inference's Transformer with its DefaultInferenceHandler.
- `pytorch`: the same Transformer with the functions that sagemaker-pytorch-inference-toolkit puts
  behind it. That toolkit is on no package index as a wheel, so that its functions are written here
  anew, over sagemaker_inference's decoders and encoders, which do the work.
- `huggingface`: sagemaker_huggingface_inference_toolkit's HuggingFaceHandlerService. It imports the
  model server `mms` for one exception, and a name that transformers 5 has dropped: both stand in.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sagemaker_inference import decoder, default_inference_handler, encoder, transformer, utils

from tests.support.toolkit_questions import Question


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


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
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


def make(kind: str, model_dir: Path) -> Any:
    """The oracle of that kind over a model's folder, whose code/ is first on sys.path."""
    if kind == "huggingface":
        return HuggingFaceOracle(model_dir)
    plain = default_inference_handler.DefaultInferenceHandler()
    return TransformerOracle(model_dir, PyTorchDefaults() if kind == "pytorch" else plain)
