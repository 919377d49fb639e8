"""Finding the handlers, and saying truly why they cannot be used."""

import re
import textwrap
import time
from pathlib import Path

import pytest

from amphora.common.errors import CodeError
from amphora.serving.worker.handlers import Handlers, resolve
from tests.support.paths import CODE
from tests.support.servers import ECHO, Start

IMAGE = """
def model_fn(model_dir): return "image model"
def input_fn(body: bytes, content_type: str): return body.decode()
def predict_fn(data, model): return f"{model} saw {data}"
def output_fn(prediction, accept): return prediction
def predict_batch_fn(inputs, model): return [predict_fn(data, model) for data in inputs]
def tokens_fn(data, model): return [len(data)]
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("code", "image"):
        (tmp_path / name).mkdir()
    (tmp_path / "image" / "inference.py").write_text(IMAGE)
    return tmp_path / "code", tmp_path / "image"


def write(folder: Path, text: str, name: str = "inference.py") -> None:
    (folder / name).write_text(textwrap.dedent(text))


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
        ("code/predict.py", "", "predict.py is not run"),
        ("code/model.py", "def handle(inputs): pass", "defines handle, is not run"),
        ("code/mnist.py", "def model_fn(d): pass", "defines model_fn, is not run"),
        ("code/endpoint.py", "class EndpointHandler: pass", "defines EndpointHandler, is not run"),
        ("inference.py", "def predict_fn(d, m): pass", "defines predict_fn, is not run"),
        ("Code/inference.py", "def predict(d): pass", "defines predict, is not run"),
        ("src/serve.py", "def model_fn(d): pass", "defines model_fn, is not run"),
        ("model/code/handler.py", "class EndpointHandler: pass", "EndpointHandler, is not run"),
        ("code/src/inference.py", "def predict_fn(d, m): pass", "defines predict_fn, is not run"),
        ("model.py", "def handle(inputs): pass", "defines handle, is not run"),
        ("pipeline.py", "class PreTrainedPipeline: pass", "PreTrainedPipeline, is not run"),
        ("cog.yaml", "predict: predict.py:Predictor", "cog.yaml is not run"),
        ("MAR-INF/MANIFEST.json", "{}", "MAR-INF is not run"),
        ("bentofile.yaml", "service: service:svc", "bentofile.yaml is not run"),
        ("1/model.py", "class TritonPythonModel: pass", "TritonPythonModel, is not run"),
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
    # SAGEMAKER_PROGRAM names files of code/ only.
    below = name.removeprefix("code/")
    remedy = f"set SAGEMAKER_PROGRAM to '{below}', or remove" if below != name else "or remove"
    with pytest.raises(
        CodeError, match=f"{words}.*Move its code to .*/code/inference.py, {remedy}"
    ):
        resolve(model / "code", None, folders[1], model)


def test_functions_that_a_file_calls_itself_are_not_taken_for_handlers(
    folders: tuple[Path, Path],
) -> None:
    write(
        folders[0],
        "def preprocess(data): return data\ndef predict(data): return preprocess(data) + 1\n"
        "def predict_fn(data, model): return predict(data)",
    )
    predict_fn = resolve(folders[0], None, CODE).functions["predict_fn"]
    assert predict_fn(1, None, context=None) == 2


def test_a_helper_beside_predict_fn_is_not_refused(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    write(folders[0], "def preprocess(data): return data\ndef predict_fn(data, model): return data")
    assert "predict_fn" in resolve(folders[0], None, CODE).functions
    assert "defines preprocess, which is not called: input_fn is" in caplog.text


def test_a_program_that_is_not_there_is_named_with_what_is(folders: tuple[Path, Path]) -> None:
    write(folders[0], "", "serve_me.py")
    with pytest.raises(CodeError, match=r"'serve_mee.py'.*It holds serve_me.py.*Did you mean"):
        resolve(folders[0], "serve_mee.py", folders[1])


def test_no_image_handlers_is_said(folders: tuple[Path, Path], tmp_path: Path) -> None:
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
