"""Finding the handlers, EndpointHandler and imports of Hugging Face's toolkit, and truly why they cannot be used; a call that does not fit into a device's memory is 507."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amphora.common.devices import Devices
from amphora.common.errors import CodeError
from amphora.serving import settings
from amphora.serving.pool.user_code import UserCode
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker import handlers, runner
from amphora.serving.worker.context import Context
from amphora.serving.worker.handlers import Handlers, resolve
from amphora.serving.worker.runner import Item, ModelRunner
from tests.support.images import TEXT as IMAGE
from tests.support.paths import CODE
from tests.support.servers import ECHO, Start
from tests.support.worker_front import JSON, ask, load_runner, write_code


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return a user's folder of code, and the image's with its handlers."""
    image = """
    def model_fn(model_dir): return "image model"
    def input_fn(body: bytes, content_type: str): return body.decode()
    def predict_fn(data, model): return f"{model} saw {data}"
    def output_fn(prediction, accept): return prediction
    def predict_batch_fn(inputs, model): return [predict_fn(data, model) for data in inputs]
    def tokens_fn(data, model): return [len(data)]
    """
    (tmp_path / "code").mkdir()
    return tmp_path / "code", write_code(tmp_path / "image", {"inference.py": image})


def write(folder: Path, text: str, name: str = "inference.py") -> None:
    write_code(folder, {name: text})


def is_images(resolved: Handlers) -> bool:
    """Whether the image's own file answers."""
    return resolved.functions["predict_fn"].function.__module__ == "amphora_image_inference"


def test_without_user_code_the_image_answers(folders: tuple[Path, Path]) -> None:
    resolved = resolve(folders[0], None, folders[1])
    assert "predict_batch_fn" in resolved.functions
    assert resolved.functions["input_fn"].body_type is bytes


@pytest.mark.parametrize(
    ("code", "defined"),
    [
        ("def output_fn(prediction, accept): return prediction.upper()", {"output_fn"}),
        # A user's predict_fn is not merged by the image's predict_batch_fn.
        ("def predict_fn(data, model): return data", {"predict_fn"}),
        ("transform_fn = None\ndef predict_fn(data, model): return data", {"predict_fn"}),
        (
            "def predict_batch_fn(inputs, model): return [value * 2 for value in inputs]",
            {"predict_batch_fn", "predict_fn"},
        ),
    ],
)
def test_what_a_file_leaves_out_waits_for_the_model(
    folders: tuple[Path, Path], code: str, defined: set[str]
) -> None:
    write(folders[0], code)
    resolved = resolve(folders[0], None, CODE)
    assert set(resolved.functions) == {"model_fn", *defined}
    whole = resolved.completed(str.lower).functions
    assert set(whole) == {"model_fn", "input_fn", "predict_fn", "output_fn", *defined}
    if "predict_batch_fn" in defined:
        assert whole["predict_fn"](3, None, context=None) == 6


@pytest.mark.parametrize(
    "code",
    [
        "def helper(): pass\nhelper()",
        "class Model: pass\nprint(Model)",
        "@print\nclass Model: pass",
        "def _private(): pass",
        "pre_model_fn = print",
    ],
)
def test_a_file_without_handlers_leaves_all_to_the_image(
    folders: tuple[Path, Path], code: str
) -> None:
    write(folders[0], code)
    resolved = resolve(folders[0], None, folders[1])
    assert is_images(resolved)
    assert ("pre_model_fn" in resolved.functions) == ("pre_model_fn" in code)


@pytest.mark.parametrize(
    ("signature", "takes"),
    [
        ("data, model", False),
        ("data, model, context", True),
        ("data, model, ctx", True),
        ("data, model, context=None", True),
        ("data, model, top_k=3", False),
        ("*args", False),
    ],
)
def test_context_is_decided_by_the_parameters(
    folders: tuple[Path, Path], signature: str, takes: bool
) -> None:
    write(folders[0], f"def predict_fn({signature}): return 1")
    assert resolve(folders[0], None, CODE).functions["predict_fn"].takes_context is takes


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import not_there_at_all",
            ["needs the module 'not_there_at_all'", "line 1", "requirements.txt"],
        ),
        ("x = 1\n1 / 0", ["ZeroDivisionError", "line 2"]),
        ("def f(:", ["SyntaxError", "line 1"]),
        ("import helper", ["needs the module 'gone'", "helper.py, line 2"]),
        (
            "def predict_fn(data): pass",
            ["predict_fn takes 1 arguments", "def predict_fn(data, model)"],
        ),
        ("model_fn = 3", ["model_fn is 3", "must be a function"]),
        ("async def predict_fn(data, model): pass", ["predict_fn is written with `async def`"]),
        ("def transform_fn(m, b, c, a): pass\ndef input_fn(b, c): pass", ["also input_fn"]),
        (
            "def predict_func(data, model): pass",
            ["defines predict_func", "Rename predict_func to predict_fn"],
        ),
        ("def input_fn(b, c): pass\ndef predictFn(d, m): pass", ["defines predictFn"]),
        (
            "def model_fn(d): pass\ndef predict(d, m): pass",
            ["defines predict,", "Rename predict to predict_fn"],
        ),
        (
            "def load_model(d): pass\ndef predict(d, m): pass\n"
            "if __name__ == '__main__': predict(1, load_model('.'))",
            ["load_model to model_fn", "predict to predict_fn"],
        ),
        (
            "def model_fn(d): pass\ndef preprocess(b): pass\ndef post_process(p): pass",
            ["preprocess to input_fn", "post_process to output_fn"],
        ),
        (
            "def input_handler(b, c): pass\ndef output_handler(d, c): pass",
            ["input_handler to input_fn", "output_handler to output_fn"],
        ),
        ("from helper_of_json import loads as predict", ["Rename predict to predict_fn"]),
        ("from ts.torch_handler import base_handler", ["module 'ts'", "of another server"]),
        ("class Predictor:\n  def predict(self): pass", ["Predictor, and no function that"]),
        ("class Server:\n  pass\nserver = Server()", ["defines server, and no function that"]),
        (
            "class EndpointHandler:\n  async def __call__(self, data): pass",
            ["with an `async def __call__`", "def __call__(self"],
        ),
    ],
)
def test_what_is_wrong_is_said(folders: tuple[Path, Path], code: str, words: list[str]) -> None:
    write(folders[0], code)
    write(folders[0], "\nimport gone", "helper.py")
    write(folders[0], "from json import *", "helper_of_json.py")
    with pytest.raises(CodeError) as caught:
        resolve(folders[0], None, folders[1])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("code/Inference.py", "", "Inference.py is not run"),
        ("code/inference.py.txt", "def model_fn(d): pass", "defines model_fn, is not run"),
        ("code/inference.ipynb", "{}", "inference.ipynb is not run"),
        ("code/mine.py", "def model_fn(d):\nreturn 1", "defines model_fn, is not run"),
        ("code/serve.py", "", "serve.py is not run"),
        ("code/model.py", "def handle(inputs): pass", "defines handle, is not run"),
        ("inference.py", "def predict_fn(d, m): pass", "defines predict_fn, is not run"),
        ("Code/inference.py", "def predict(d): pass", "defines predict, is not run"),
        ("model/code/handler.py", "class EndpointHandler: pass", "EndpointHandler, is not run"),
        ("code/src/inference.py", "def predict_fn(d, m): pass", "defines predict_fn, is not run"),
        ("pipeline.py", "class PreTrainedPipeline: pass", "PreTrainedPipeline, is not run"),
        ("cog.yaml", "predict: predict.py:Predictor", "cog.yaml is not run"),
        ("MAR-INF/MANIFEST.json", "{}", "MAR-INF is not run"),
        ("bentofile.yaml", "service: service:svc", "bentofile.yaml is not run"),
        ("1/model.py", "class TritonPythonModel: pass", "TritonPythonModel, is not run"),
        ("my_handler.py", "from ts.context import Context", "imports ts, is not run"),
        ("code/main.py", "import os\nfrom fastapi import FastAPI", "imports fastapi, is not run"),
        ("code/train.py", "def main(): pass\nif __name__ == '__main__': main()", ""),
        ("inference.py", "def demo(): pass", ""),
        ("serve.py", "def predict(): pass", ""),
        ("scripts/eval.py", "def load_model(): pass", ""),
    ],
)
def test_a_file_of_handlers_that_is_not_run_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, name: str, code: str, words: str
) -> None:
    model = tmp_path / "model"
    (model / name).parent.mkdir(parents=True)
    (model / name).write_text(code)
    if not words:
        assert is_images(resolve(model / "code", None, folders[1], model))
        return
    # SAGEMAKER_PROGRAM names Python files of code/ only, and no program of another server.
    below, remedy = name.removeprefix("code/"), "or remove"
    if below != name and name.endswith(".py") and "imports" not in words:
        remedy = f"set SAGEMAKER_PROGRAM to '{below}', or remove"
    with pytest.raises(
        CodeError, match=f"{words}.*Move its code to .*/code/inference.py, {remedy}"
    ):
        resolve(model / "code", None, folders[1], model)


def test_helpers_beside_predict_fn_are_not_taken_for_handlers(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    write(
        folders[0],
        "def preprocess(data): return data\ndef predict(data): return preprocess(data) + 1\n"
        "def predict_fn(data, model): return predict(data)",
    )
    predict_fn = resolve(folders[0], None, CODE).functions["predict_fn"]
    assert predict_fn(1, None, context=None) == 2
    write(folders[0], "def preprocess(data): return data\ndef predict_fn(data, model): return data")
    assert "predict_fn" in resolve(folders[0], None, CODE).functions
    assert "defines preprocess, which is not called: input_fn is" in caplog.text


def test_a_program_that_is_not_there_is_named_with_what_is(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    write(folders[0], "", "serve_me.py")
    with pytest.raises(CodeError, match=r"'serve_mee.py'.*It holds serve_me.py.*Did you mean"):
        resolve(folders[0], "serve_mee.py", folders[1])
    with pytest.raises(CodeError, match="AMPHORA_CODE_DIR"):
        resolve(folders[0], None, tmp_path / "nowhere")


WARM = (
    ECHO
    + """
    def model_warmup_fn(model_dir, model):
        if not predict_fn(1, model):
            raise RuntimeError("cold")
        model["answer"] = "warm"
"""
)


def test_ping_is_200_only_after_the_warm_up(start: Start) -> None:
    assert start(WARM).ready().invoke(1).json()["answer"] == "warm"


LOAD = 'return {"answer": 42}'


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        (ECHO.replace(LOAD, 'raise OSError("no weights in " + model_dir)'),
         "cannot be served: OSError: no weights in"),
        (WARM + "\n    def predict_fn(data, model):\n        return None\n",
         r"cannot be served: RuntimeError: cold[^\n]*\s*$"),
        (ECHO.replace(LOAD, "import os; os.kill(os.getpid(), 9)"), r"was killed \(SIGKILL\)"),
        (ECHO.replace(LOAD, "import time; time.sleep(600)"),
         "was not loaded within 1 s. Raise SAGEMAKER_STARTUP_TIMEOUT"),
    ],
    ids=["fails", "fails at its warm-up", "dies", "takes too long"],
)  # fmt: skip
def test_a_model_that_is_not_loaded_ends_the_server_once_with_the_reason(
    start: Start, code: str, reported: str
) -> None:
    limit = {"SAGEMAKER_STARTUP_TIMEOUT": "1"} if "600" in code else {}
    server = start(code, SAGEMAKER_MODEL_SERVER_WORKERS="2", **limit)
    seen = set()
    while server.process.poll() is None:
        seen.add(server.ping())
        time.sleep(0.02)
    assert server.process.returncode != 0
    assert 200 not in seen
    assert len(re.findall(reported, server.log)) == 1
    assert server.log.count("Traceback") == ("cannot be served" in reported)


DEVICES = Devices(reason="", cpus=1, efa=False)
TOOLKIT = "sagemaker_huggingface_inference_toolkit"


def load(tmp_path: Path, folder: str, code: str) -> ModelRunner:
    """Return a runner over handler.py in that folder of a model."""
    files = {
        f"{folder}/handler.py": code,
        f"{folder}/helper.py": "def double(value): return [value, value]",
        "settings.json": '{"unit": "m"}',
    }
    model = write_code(tmp_path / "model", files)
    chosen = settings.read(tmp_path, {}, DEVICES)
    return runner.load(handlers.resolve(chosen.code_dir, chosen.program, CODE, model), chosen)


def value_of(loaded: ModelRunner, body: bytes, content_type: str = JSON) -> Any:
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
    code: str, folder: str, tmp_path: Path
) -> None:
    loaded = load(tmp_path, folder, code)
    assert "predict_batch_fn" not in loaded.handlers
    kind = sys.modules["handler"].EndpointHandler
    for value in ({"inputs": [1.0, 2.0]}, {"inputs": [3.0], "parameters": {"top_k": 1}}):
        expected = kind(str(tmp_path / "model"))(dict(value))
        expected = expected.tolist() if hasattr(expected, "tolist") else expected
        assert value_of(loaded, json.dumps(value).encode()) == expected
    with pytest.raises(Fault, match="Send an object, such as") as caught:
        value_of(loaded, b"[1]")
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
    assert value_of(load_runner(model), b'{"inputs": 1}') == {"answer": ["the class", 1]}


def test_an_endpoint_handler_reads_images_and_csv(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        ".",
        """
        class EndpointHandler:
            def __init__(self, path): pass
            def __call__(self, data):
                inputs = data["inputs"]
                return inputs if isinstance(inputs, list) else inputs.size
        """,
    )
    assert value_of(loaded, base64.b64decode(IMAGE), "image/png") == [50, 40]
    assert value_of(loaded, b"inputs\na\nb\n", "text/csv") == ["a", "b"]


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


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The image's stand-in, not what a test before this one has imported. The toolkit itself, which
    tests compare with, is installed here without its server."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(TOOLKIT)]:
            del sys.modules[name]

    forget()
    paths = [folder for folder in sys.path if not folder.endswith("stand_ins")]
    monkeypatch.setattr(sys, "path", paths)
    yield
    forget()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"from {TOOLKIT}.handler_service import HuggingFaceHandlerService", "model_fn(model_dir)"),
        (f"from {TOOLKIT} import handler_service", "preprocess as input_fn"),
        (f"from {TOOLKIT} import transformers_utils", "leave model_fn out"),
    ],
)
def test_what_is_not_here_of_the_toolkit_has_its_replacement(
    line: str, words: str, tmp_path: Path, stand_in: None
) -> None:
    with pytest.raises(CodeError) as caught:
        load(tmp_path, "code", line)
    assert words in str(caught.value)


def test_a_file_with_the_toolkits_decoder_and_encoder_answers(
    tmp_path: Path, stand_in: None
) -> None:
    loaded = load(
        tmp_path,
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
    assert value_of(loaded, b'{"inputs": "a"}') == {"got": "a", "n": 2.0}
    assert value_of(loaded, b"inputs\na\nb\n", "text/csv") == {"got": ["a", "b"], "n": 2.0}


TORCH = 'OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")'


def full_device(tmp_path: Path, old: str = "", new: str = "") -> tuple[ModelRunner, Any]:
    """Return a runner of handlers whose memory holds one text that is not huge, and a maker of items.

    torch's exception is known by its name: this package knows no torch.
    """
    code = f"""
import weakref
made = []
class OutOfMemoryError(RuntimeError): pass
class Tensor: pass
def model_fn(model_dir): return "a model"
def input_fn(body: str, content_type): return body
def predict_fn(data, model):
    taken = Tensor()
    made.append(weakref.ref(taken))
    if "huge" in data or sum(1 for each in made if each() is not None) > 1:
        raise {TORCH}
    return data
def predict_batch_fn(inputs, model):
    too_many = "huge " * (len(inputs) > 1)
    return [predict_fn(too_many + each, model) for each in inputs]
def output_fn(prediction, accept): return prediction
"""
    files = {"code/inference.py": code.replace(old, new) if old else code}
    loaded = load_runner(write_code(tmp_path, files))

    def item(text: str) -> Item:
        context = Context("id", {}, loaded.settings)
        return Item("id", text.encode(), "text/plain", "text/plain", context)

    return loaded, item


@pytest.mark.parametrize(
    "error",
    [
        TORCH,
        'RuntimeError("CUDA error: out of memory\\nCompile with `TORCH_USE_CUDA_DSA`")',
        'RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")',
    ],
)
def test_a_request_that_does_not_fit_is_507_and_the_next_one_is_answered(
    error: str, tmp_path: Path
) -> None:
    loaded, item = full_device(tmp_path, TORCH, error)
    with pytest.raises(Fault, match=r"out of memory|ALLOC_FAILED") as caught:
        loaded.answer(item("huge"))
    assert (caught.value.status, caught.value.code) == (507, "out_of_memory")
    # Though the error is kept, what the call had taken is free.
    assert loaded.answer(item("small"))[0] == b"small"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("yields", [False, True])
def test_requests_that_do_not_fit_together_are_answered_alone(yields: bool, tmp_path: Path) -> None:
    listed = "return [predict_fn(too_many + each, model) for each in inputs]"
    generated = "for each in inputs: yield predict_fn(too_many + each, model)"
    loaded, item = full_device(tmp_path, listed, generated if yields else listed)
    items = [item("one"), item("huge"), item("two")]
    for entry in items:
        loaded.read_input(entry)
    first, second, third = loaded.predict_batch(items)
    assert (first, third) == ("one", "two")
    assert isinstance(second, Fault) and second.status == 507


def test_another_error_keeps_its_frames_for_the_log(tmp_path: Path) -> None:
    loaded, item = full_device(tmp_path, TORCH, TORCH.replace("OutOfMemoryError", "ValueError"))
    with pytest.raises(Fault) as caught:
        loaded.answer(item("huge"))
    assert caught.value.status == 500
    frame = caught.value.__cause__.__traceback__  # type: ignore[union-attr]
    assert frame is not None
    while frame.tb_next is not None:
        frame = frame.tb_next
    assert isinstance(weakref.ref(frame.tb_frame.f_locals["taken"]), weakref.ref)
