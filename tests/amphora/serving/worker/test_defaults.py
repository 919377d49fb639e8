"""What a user's file may leave out, take for granted and shadow; code that is fetched, and requirements
that are installed before the model is loaded."""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from amphora.common import devices
from amphora.common.errors import CodeError
from amphora.serving import settings as server_settings
from amphora.serving.pool.user_code import UserCode
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings
from amphora.serving.worker import handlers
from amphora.serving.worker.context import Context
from amphora.serving.worker.runner import ModelRunner
from tests.support.package_indexes import AWS, archive, wheel
from tests.support.paths import CODE
from tests.support.servers import ECHO, Start
from tests.support.worker_front import JSON, ask, load_runner, write_code

Load = Callable[..., ModelRunner]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(code, **files): a runner over that code, and other files beside it."""

    def _load(code: str, program: str | None = None, **files: str) -> ModelRunner:
        named = {f"{program or 'inference'}.py": code, **files}
        model = write_code(tmp_path / "model", {f"code/{k}": text for k, text in named.items()})
        return load_runner(model, program)

    return _load


@pytest.mark.parametrize(("code", "family"), [pytest.param(*model, id=name) for name, model in {
    "a pipeline's class": (
        "import transformers\nclass M(transformers.Pipeline):\n  def __init__(self): pass\n"
        "  def _forward(self): pass\n  def _sanitize_parameters(self): pass\n"
        "  def preprocess(self): pass\n  def postprocess(self): pass", "hub"),
    "a pretrained model": ("import transformers\nclass M(transformers.PreTrainedModel):\n  def __init__(self): pass", "hub"),
    "a module": ("import torch\nclass M(torch.nn.Module): pass", "torch"),
    "a module beside transformers": ("import torch, transformers\nclass M(torch.nn.Module): pass", "torch"),
    "a class beside transformers": ("import transformers.utils as u\nclass M: pass", "hub"),
    "a class beside torch": ("def f():\n    import torch\nclass M: pass", "torch"),
    "a class": ("import json\nclass M: pass", "hub"),
    "a model and a tokenizer": (
        "import torch\nfrom transformers import PreTrainedTokenizerFast as T\n"
        "def M(): return {'model': torch.nn.Linear(1, 1), 't': object.__new__(T)}", "hub"),
}.items()])  # fmt: skip
def test_the_model_and_the_file_decide(
    code: str, family: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(
        f"{code}\n"
        "def model_fn(model_dir): return M()\n"
        "def predict_fn(data, model): return type(data).__name__\n"
    )
    output = capsys.readouterr().out
    assert output.count("handlers: input_fn, output_fn as in the ") == 1
    assert ("PyTorch image" if family == "torch" else "Hugging Face image") in output
    assert "AMPHORA_HANDLER_DEFAULTS" in output
    expected = b'"Tensor"' if family == "torch" else b'"list"'
    assert ask(loaded, b"[1, 2]")[0] == expected


@pytest.mark.parametrize(
    ("body", "nested"), [({"inputs": "a"}, True), ({"inputs": ["a", "b"]}, False)]
)
def test_a_requests_return_all_scores_gives_all_as_transformers_4(
    body: dict[str, Any], nested: bool, load: Load, tmp_path: Path
) -> None:
    """transformers 5 drops the parameter: the answer would hold one label."""
    from tests.support.serving_kit import save

    save("BertForSequenceClassification", tmp_path / "model", num_labels=3)
    loaded = load(
        "from transformers import pipeline\n"
        "def model_fn(d): return pipeline('text-classification', model=d, device='cpu')"
    )
    request = json.dumps({**body, "parameters": {"return_all_scores": True}}).encode()
    answered = json.loads(ask(loaded, request)[0])
    assert [len(entry) for entry in answered] == [3] * (1 if nested else 2)


@pytest.mark.parametrize(
    ("predict", "words"),
    [
        ("from transformers import AutoModelWithLMHead", "AutoModelForCausalLM"),
        ("return model[1].encode_plus('a')", "tokenizer(text, ...)"),
        ("return model[0](task='summarization')", "HF_TASK"),
        ("ids = model[2](model[1])\n  return ids.shape", "return_dict=False"),
    ],
)
def test_what_only_a_request_shows_of_transformers_4_has_its_remedy(
    predict: str, words: str, load: Load, tmp_path: Path
) -> None:
    from tests.support.serving_kit import tokenizer

    tokenizer().save_pretrained(tmp_path / "model")
    loaded = load(
        "import functools\nfrom transformers import AutoTokenizer, pipeline\n"
        "def ids(tok): return functools.partial(tok.apply_chat_template, [{'role': 'user',"
        " 'content': 'a'}], chat_template='{{ messages[0].content }}', return_tensors='pt')()\n"
        "def model_fn(d): return (pipeline, AutoTokenizer.from_pretrained(d), ids)\n"
        f"def predict_fn(data, model):\n  {predict}"
    )
    with pytest.raises(Fault) as caught:
        ask(loaded, b"[1]")
    for part in (words, "--transformers 4", "inference.py, line "):
        assert part in str(caught.value)


def test_code_for_transformers_4_ends_the_start_with_each_line(load: Load) -> None:
    with pytest.raises(CodeError) as caught:
        load(
            "from transformers import pipeline\n"
            "def model_fn(d):\n"
            "  return pipeline('text-classification', model=d, return_all_scores=True)\n"
            "def predict_fn(data, model):\n"
            "  return model.tokenizer(data, pad_to_max_length=True)\n"
        )
    for word in ("inference.py, line 3: ", "inference.py, line 5: ", "top_k=None", "padding="):
        assert word in str(caught.value)


@pytest.mark.parametrize(("value", "name"), [("pytorch", "Tensor"), ("HuggingFace", "list")])
def test_a_variable_decides(
    value: str, name: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPHORA_HANDLER_DEFAULTS", value)
    loaded = load(
        "def model_fn(model_dir): return 1\ndef predict_fn(data, m): return type(data).__name__"
    )
    assert ask(loaded, b"[1]")[0] == json.dumps(name).encode()
    monkeypatch.setenv("AMPHORA_HANDLER_DEFAULTS", "tensorflow")
    with pytest.raises(ValueError, match=r"'tensorflow'\. Give huggingface or pytorch"):
        load("def model_fn(model_dir): return 1")


def test_a_csv_of_numbers_has_the_setting_that_reads_it(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files for scikit-learn's container have it: no input_fn, and an array for predict_fn."""
    file = """
        def model_fn(model_dir):
            return {"weight": 2}
        def predict_fn(data, model):
            return [float(sum(row)) * model["weight"] for row in data]
        """
    body = b"1,2\n3,4\n"
    with pytest.raises(Fault, match="AMPHORA_HANDLER_DEFAULTS=pytorch reads a CSV of numbers"):
        ask(load(file), body, content_type="text/csv")
    monkeypatch.setenv("AMPHORA_HANDLER_DEFAULTS", "pytorch")
    assert json.loads(ask(load(file), body, content_type="text/csv")[0]) == [6.0, 14.0]


def test_a_task_whose_pipeline_transformers_has_dropped(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hugging Face's image has that pipeline; a file for it calls it by these names."""
    from tests.support.serving_kit import save

    save("BertForQuestionAnswering", tmp_path / "model")
    loaded = load(
        """
        import torch
        def predict_fn(data, model):
            named = model(question=data["inputs"]["question"], context=data["inputs"]["context"])
            return [named, model(data["inputs"]), model(data["inputs"], top_k=2)]
        """
    )
    assert "Hugging Face image, since the model answers question-answering" in (
        capsys.readouterr().out
    )
    requested = {"question": "said anna", "context": "anna said the film was good in paris"}
    named, given, best = json.loads(ask(loaded, json.dumps({"inputs": requested}).encode())[0])
    assert named == given == best[0]
    assert set(named) == {"score", "start", "end", "answer"}
    assert named["answer"] == requested["context"][named["start"] : named["end"]]


def test_a_users_modules_are_its_own_and_the_images_still_serve(tmp_path: Path) -> None:
    """In a process of its own: modules of these names are loaded here already."""
    shadowing = """
    import check, train, utils
    def model_fn(model_dir):
        return None
    def predict_fn(data, model):
        return [check.MINE, train.MINE, utils.MINE]
    """
    local = {f"code/{name}.py": f"MINE = {name!r}" for name in ("check", "train", "utils")}
    model = write_code(tmp_path / "model", {"code/inference.py": shadowing, **local})
    script = f"""
import importlib.util, pathlib, sys
from tests.support import worker_front
sys.path[:] = [each for each in sys.path if each != {str(CODE)!r}]
print(worker_front.ask(worker_front.load_runner(pathlib.Path({str(model)!r})), b"{{}}")[0].decode())
print(importlib.util.find_spec("defaults"))
"""
    environ = {**os.environ, "PYTHONPATH": f"{CODE.parent}/container:{CODE.parent}"}
    run = functools.partial(
        subprocess.run, [sys.executable, "-c", script], env=environ, capture_output=True, text=True
    )
    done = run()
    assert done.returncode == 0, done.stderr
    *_, answered, last = done.stdout.splitlines()
    assert json.loads(answered) == ["check", "train", "utils"]
    assert last == "None"
    # The image's package of this name is needed, for input_fn and output_fn.
    (model / "code" / "recipe.py").touch()
    assert "has a module 'recipe', which hides the image's package" in run().stderr


def test_context_has_what_the_servers_of_aws_offer(start: Start, tmp_path: Path) -> None:
    context = """
    def model_fn(model_dir, context):
        assert context._system_properties == context.system_properties
        return [context.system_properties["model_dir"] == model_dir, context.model_name]

    def predict_fn(data, model, context):
        (processor,) = context.request_processor
        context.metrics.add_time("a time", 1.5)
        context.metrics.add_counter("seen", 1)
        context.metrics.add_metric("other", 2, "MB", 0, dimensions=[])
        context.set_response_header(0, "X-One", "1\\r\\nX-Two: 2")
        for name in ("Content-Length", "Transfer-Encoding", "Connection"):
            context.set_response_header(0, name, "1")  # only the server sets these
        processor.add_response_property("x-three", "3")
        context.set_response_status(201, "made")
        context.set_response_content_type(0, "application/vnd.mine+json")
        return {
            "model": model,
            "ids": [context.request_id, context.get_request_id(), context.get_request_id(0),
                    context.request_ids[0], processor.get_request_id()],
            "header": [context.get_request_header(0, "X-Mine"),
                       context.get_all_request_header(0)["x-MINE"],
                       processor.get_request_property("x-mine"),
                       context.get_request_header(0, "absent")],
            "types": [processor.get_request_properties().get("Content-Type"),
                      "accept" in processor.get_request_properties()],
            "manifest": context.manifest["model"]["modelName"],
            "properties": [context.system_properties.get("gpu_id"),
                           context.system_properties["batch_size"] > 0],
            "said": [context.get_response_status(0), context.get_response_content_type(0),
                     processor.get_response_header("X-THREE")],
        }
    """
    server = start(context).ready()
    answered = server.invoke({}, **{"X-Mine": "yes"})
    value = answered.json()
    assert value["model"] == [True, "model"]
    assert len(set(value["ids"])) == 1
    assert value["header"] == ["yes", "yes", "yes", None]
    assert value["types"] == [JSON, True]
    assert value["properties"] == [None, True]
    assert value["manifest"] == "model"
    assert value["said"] == [[201, "made"], "application/vnd.mine+json", "3"]
    assert answered.status_code == 201
    assert answered.headers["content-type"] == "application/vnd.mine+json"
    assert answered.headers["x-one"] == "1 X-Two: 2"
    assert "x-two" not in answered.headers
    assert "metric a time: 1.5 ms" in server.log
    assert server.log.count("handlers: input_fn, output_fn as in the Hugging Face image") == 1
    settings = server_settings.read(tmp_path, {}, devices.detect({}))
    with pytest.raises(ValueError, match="status 42"):
        Context("id", {}, settings).set_response_status(42)


@pytest.mark.parametrize(
    ("annotation", "content_type", "kind"),
    [
        ("", "text/csv; charset=utf-8", "str"), ("", "text/plain", "bytearray"),
        (": bytes", JSON, "bytes"), (": 'str'", "text/html", "str"),
        (": str", "application/x-npy", "bytearray"), (": object", "text/plain", "bytearray"),
    ],
)  # fmt: skip
def test_bodies_are_text_for_json_and_csv(
    annotation: str, content_type: str, kind: str, load: Load
) -> None:
    loaded = load(
        f"def model_fn(d): return 1\ndef input_fn(body{annotation}, t): return type(body).__name__\n"
        "def predict_fn(data, model): return data"
    )
    assert json.loads(ask(loaded, b"1", content_type)[0]) == kind


@pytest.mark.parametrize(
    "code",
    ["def handle(data, context): pass",
     "class A:\n  def initialize(self, c): pass\n  def handle(self, d, c): pass",
     "class A:\n  def handle(self, d, c): pass\n_service = A()"],
)  # fmt: skip
def test_a_handler_service_is_refused(code: str, load: Load) -> None:
    with pytest.raises(
        CodeError,
        match=r"mine.py defines (handle|A|A, _service), and no function .* Define model_fn",
    ):
        load(code, program="mine")
    with pytest.raises(CodeError, match=r"handler_service.py is a handler service"):
        load("def predict_fn(data, model): pass", **{"handler_service.py": code})


def test_programs_may_be_dotted_with_relative_imports(tmp_path: Path) -> None:
    package = tmp_path / "code" / "serving_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "values.py").write_text("V = 7")
    (package / "serve.py").write_text(
        "from . import values\n"
        "def model_fn(d): return values.V\n"
        "def transform_fn(m, b, c, a): return str(m)\n"
    )
    resolved = handlers.resolve(tmp_path / "code", "serving_pkg.serve", CODE)
    assert resolved.functions["model_fn"].function("") == 7


def test_a_file_that_hides_an_installed_module_is_named(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "evaluate.py").touch()
    (code / "inference.py").write_text("from evaluate import load")
    with (
        mock.patch.dict(sys.modules),
        pytest.raises(CodeError, match=r"/evaluate.py hides the installed module evaluate: rename"),
    ):
        sys.modules.pop("evaluate", None)
        handlers.resolve(code, "", CODE)


@pytest.mark.parametrize("program", ["train.py", "train", "a.b"])
def test_a_program_that_is_nowhere_is_refused(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's own handlers would answer, as if they were meant."""
    # As in an image, where no server has the recipe's folder on its path.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(CODE)])
    with pytest.raises(CodeError, match=r"has no such file. It holds no Python file.*empty value"):
        handlers.resolve(tmp_path / "code", program, CODE)


def test_pip_ends_where_it_is_not_waited_for() -> None:
    code = UserCode(cast(ServerSettings, None), {})
    with subprocess.Popen(["sleep", "600"], text=True) as code._pip:
        code.cancel()
        assert code._pip.wait(240) == -signal.SIGKILL


def test_where_the_users_code_is(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    local = tmp_path / "model" / "code"

    def provision(
        submitted: str, program: str | None = None, multi: bool = False, code: str = ""
    ) -> Path:
        """Return the folder of the user's code, written to the model's if it is given."""
        local.mkdir(parents=True, exist_ok=True)
        if code:
            (local / (program or "inference.py")).write_text(code)
        given: Any = {
            **dict.fromkeys(ServerSettings.__dataclass_fields__), "model_dir": local.parent,
            "code_dir": local, "submitted": submitted, "program": program, "is_multi_model": multi,
        }  # fmt: skip
        user_code = UserCode(ServerSettings(**given), {})
        request.addfinalizer(user_code.cancel)
        return user_code.prepare()

    # A prefix of models: whether the program is there is found when it is loaded.
    for url in ("s3://bucket/models/", "s3://bucket/models"):
        assert provision(url) == provision(url, program="mine.py") == local
        assert provision(url, multi=True, program="mine.py") == local
    # A model's own code comes before what all models share.
    shared = str(archive(tmp_path / "shared.tar.gz", ("inference.py", "")))
    assert local not in (provision(shared, multi=True), provision(shared))
    assert provision(shared, multi=True, code="X = 2") == local
    # The model's archive, which SageMaker has unpacked: nothing is fetched (there is no S3 here).
    assert provision("s3://bucket/job/model.tar.gz") == local
    path = str(archive(tmp_path / "other.tar.gz", ("config.json", ""), ("code/mine.py", "")))
    actual = provision(path, program="mine.py")
    assert (actual / "mine.py").is_file() and actual.name == "code" and actual != local
    path = str(archive(tmp_path / "sourcedir.tar.gz", ("mine.py", ""), ("code/mine.py", "")))
    assert (provision(path, program="mine.py") / "code").is_dir()


def test_requirements_are_installed_before_the_model_is_loaded(
    start: Start, tmp_path: Path, target: dict[str, str]
) -> None:
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    wheel(code, "amphora_probe")
    server = start(
        "import amphora_probe\n"
        + ECHO.replace("42", "amphora_probe.VALUE").replace("\n    ", "\n"),
        files={"requirements.txt": "--no-index\n--find-links .\namphora-probe==1.0\n"},
        **target,
    ).ready()
    assert server.invoke(1).json()["answer"] == "installed"


@pytest.mark.parametrize(
    ("requirements", "words"),
    [
        ("not-there-at-all==9", ["cannot be installed (pip's exit code 1)", "not-there-at-all==9"]),
        (
            "transformers==1.0",
            ["replaced transformers 5.", "by 1.0", "Leave transformers out, or build the image"],
        ),
    ],
)
def test_requirements_that_cannot_be_end_the_server_with_the_reason(
    start: Start, tmp_path: Path, target: dict[str, str], requirements: str, words: list[str]
) -> None:
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    wheel(code, "transformers")
    files = {"requirements.txt": f"--no-index\n--find-links .\n{requirements}\n"}
    server = start(files=files, **target)
    assert server.process.wait(240) == 2
    last = server.log.splitlines()[-1]
    for word in words:
        assert word in last


@pytest.mark.heavy
def test_code_is_fetched_from_s3(
    start: Start, tmp_path: Path, bucket: Callable[[Path], str]
) -> None:
    code = ECHO.replace("\n    ", "\n").replace("42", "'from S3'")
    url = bucket(archive(tmp_path / "sourcedir.tar.gz", ("mine.py", code)))
    server = start(
        SAGEMAKER_SUBMIT_DIRECTORY="s3://code/job/sourcedir.tar.gz",
        SAGEMAKER_PROGRAM="mine.py",
        S3_ENDPOINT_URL=url,
        **AWS,
    ).ready()
    assert server.invoke(1).json()["answer"] == "from S3"
