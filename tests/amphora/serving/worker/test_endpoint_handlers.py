"""Code for Hugging Face's other servers: `EndpointHandler`, and imports of its toolkit."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from amphora.common.devices import Devices
from amphora.common.errors import CodeError
from amphora.serving import settings
from amphora.serving.pool.user_code import UserCode
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker import handlers, runner
from amphora.serving.worker.runner import ModelRunner
from tests.support.paths import CODE
from tests.support.toolkit_files import picture
from tests.support.worker_front import JSON, ask, load_runner, write_code

DEVICES = Devices(reason="", cpus=1, efa=False)
TOOLKIT = "sagemaker_huggingface_inference_toolkit"


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., ModelRunner]]:
    """load(folder, code): a runner over handler.py in that folder of a model."""

    def _load(folder: str, code: str) -> ModelRunner:
        files = {
            f"{folder}/handler.py": code,
            f"{folder}/helper.py": "def double(value): return [value, value]",
            "settings.json": '{"unit": "m"}',
        }
        model = write_code(tmp_path / "model", files)
        chosen = settings.read(tmp_path, {}, DEVICES)
        resolved = handlers.resolve(chosen.code_dir, chosen.program, CODE, model)
        return runner.load(resolved, chosen)

    yield _load
    for name in ("handler", "helper"):
        sys.modules.pop(name, None)


def answer(loaded: ModelRunner, body: bytes, content_type: str = JSON) -> Any:
    return json.loads(ask(loaded, body, content_type)[0])


@pytest.mark.parametrize("folder", [".", "code"])
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name)
        for name, code in {
            "as documented": """
        from typing import Any, Dict, List
        class EndpointHandler():
            def __init__(self, path=""):
                self.path = path
            def __call__(self, data: Dict[str, Any]) -> List[Dict[str, Any]]:
                inputs = data.pop("inputs", data)
                parameters = data.pop("parameters", None) or {}
                return [{"inputs": inputs, "parameters": parameters, "path": self.path}]
        """,
            "with a module and a file of the folder": """
        import json, pathlib
        from helper import double
        class EndpointHandler:
            def __init__(self, model_dir: str, **kwargs):
                self.settings = json.loads(pathlib.Path(model_dir, "settings.json").read_text())
            def __call__(self, data):
                return {"answer": double(data["inputs"]), **self.settings}
        """,
            "with torch, and a tensor as the answer": """
        import torch
        class EndpointHandler:
            def __init__(self, path):
                self.weight = torch.tensor(2.0)
            @torch.no_grad()
            def __call__(self, data):
                return torch.tensor(data["inputs"]) * self.weight
        """,
            "with functions that have handlers' names": """
        def model_fn(path): return "not the class"
        def predict_fn(data, model): return "not called"
        def output_fn(answer): return answer
        class EndpointHandler:
            def __init__(self, path): pass
            def __call__(self, data): return output_fn(["the class", data["inputs"]])
        """,
            "with a base class": """
        class Base:
            def __call__(self, data): return self.answer(data)
        class EndpointHandler(Base):
            def __init__(self, path): pass
            def answer(self, data): return str(sorted(data))
        """,
        }.items()
    ],
)
def test_an_endpoint_handler_answers_as_its_own_call(
    code: str, folder: str, load: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    loaded = load(folder, code)
    assert "predict_batch_fn" not in loaded.handlers
    kind = sys.modules["handler"].EndpointHandler
    for value in ({"inputs": [1.0, 2.0]}, {"inputs": [3.0], "parameters": {"top_k": 1}}):
        expected = kind(str(tmp_path / "model"))(dict(value))
        expected = expected.tolist() if hasattr(expected, "tolist") else expected
        assert answer(loaded, json.dumps(value).encode()) == expected
    with pytest.raises(Fault, match="Send an object, such as") as caught:
        answer(loaded, b"[1]")
    assert caught.value.status == 400


def test_an_endpoint_handler_is_called_between_input_fn_and_output_fn(tmp_path: Path) -> None:
    code = """
        import json
        class EndpointHandler:
            def __init__(self, path): pass
            def __call__(self, data): return ["the class", data["inputs"]]
        def output_fn(prediction, accept): return json.dumps({"answer": prediction})
        """
    model = write_code(tmp_path / "model", {"code/inference.py": code})
    assert answer(load_runner(model), b'{"inputs": 1}') == {"answer": ["the class", 1]}


def test_an_endpoint_handler_reads_images_and_csv(load: Callable[..., ModelRunner]) -> None:
    loaded = load(
        ".",
        """
        class EndpointHandler:
            def __init__(self, path): pass
            def __call__(self, data):
                inputs = data["inputs"]
                return inputs if isinstance(inputs, list) else inputs.size
        """,
    )
    assert answer(loaded, picture(), "image/png") == [4, 3]
    assert answer(loaded, b"inputs\na\nb\n", "text/csv") == ["a", "b"]


def test_a_handler_at_the_root_has_its_requirements_installed_and_an_inference_py_comes_first(
    tmp_path: Path,
) -> None:
    """Installed is what cannot be had here, as the error says."""
    files = {
        "handler.py": "class EndpointHandler: ...",
        "requirements.txt": "--no-index\nabsent==9",
    }
    model = write_code(tmp_path / "model", files)
    with pytest.raises(CodeError, match=f"requirements.txt of {model} cannot be installed"):
        UserCode(settings.read(tmp_path, {}, DEVICES), {**os.environ}).prepare()
    write_code(model, {"code/inference.py": "def predict_fn(data, model): return 2"})
    assert settings.read(tmp_path, {}, DEVICES).code_dir == model / "code"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"from {TOOLKIT}.handler_service import HuggingFaceHandlerService", "model_fn(model_dir)"),
        (f"from {TOOLKIT} import handler_service", "preprocess as input_fn"),
        (f"from {TOOLKIT} import transformers_utils", "leave model_fn out"),
    ],
)
def test_what_is_not_here_of_the_toolkit_has_its_replacement(
    line: str, words: str, load: Callable[..., ModelRunner], stand_in: None
) -> None:
    with pytest.raises(CodeError) as caught:
        load("code", line)
    assert words in str(caught.value)


def test_a_file_with_the_toolkits_decoder_and_encoder_answers(
    load: Callable[..., ModelRunner], stand_in: None
) -> None:
    loaded = load(
        "code",
        f"""
        import numpy as np
        from {TOOLKIT} import decoder_encoder
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return decoder_encoder.decode(body, content_type)
        def predict_fn(data, model): return {{"got": data["inputs"], "n": np.float32(model)}}
        def output_fn(prediction, accept): return decoder_encoder.encode(prediction, accept)
        """,
    )
    assert answer(loaded, b'{"inputs": "a"}') == {"got": "a", "n": 2.0}
    assert answer(loaded, b"inputs\na\nb\n", "text/csv") == {"got": ["a", "b"], "n": 2.0}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's stand-in, as if the toolkit were not installed here, which tests compare with."""
    for name in [name for name in sys.modules if name.startswith(TOOLKIT)]:
        monkeypatch.delitem(sys.modules, name)
    path = CODE / "toolkits" / TOOLKIT / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        TOOLKIT, path, submodule_search_locations=[str(path.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, TOOLKIT, module)
    monkeypatch.setitem(sys.modules, f"{TOOLKIT}.x", module)
    spec.loader.exec_module(module)
