"""The choice of the engine that generates text, and the arguments of vLLM's server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from amphora.common import devices
from amphora.common.errors import ConfigError
from amphora.serving import settings as settings_module
from amphora.serving.settings import ServerSettings
from amphora.serving.vllm import selection, server_arguments
from amphora.serving.vllm.selection import Selection
from amphora.serving.vllm.server_process import reason
from tests.support.recording_vllm import install


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of vLLM's with a list of one architecture."""
    site = install(tmp_path / "site")
    monkeypatch.setattr(selection, "_package", lambda: site / "vllm")


def _settings(base: Path, environ: dict[str, str]) -> ServerSettings:
    (base / "model").mkdir(exist_ok=True)
    return settings_module.read(base, environ, devices.detect({}))


def _save(base: Path, architecture: str = "LlamaForCausalLM") -> Path:
    (base / "model").mkdir(exist_ok=True)
    (base / "model/config.json").write_text(json.dumps({"architectures": [architecture]}))
    return base / "model"


def _select(base: Path, **environ: str) -> Selection:
    return selection.select(_settings(base, environ), environ)


@pytest.mark.parametrize(
    ("environ", "architecture", "why"),
    [
        ({}, "LlamaForCausalLM", "it lists LlamaForCausalLM"),
        ({}, "BertForSequenceClassification", "does not list BertForSequenceClassification"),
        ({"HF_TASK": "feature-extraction"}, "LlamaForCausalLM", "HF_TASK is feature-extraction"),
        ({"AMPHORA_GENERATION": "transformers"}, "LlamaForCausalLM", "AMPHORA_GENERATION"),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "s3://a/b.tar.gz"}, "LlamaForCausalLM", "handlers"),
    ],
)
def test_a_listed_architecture_alone_is_served_by_vllm(
    tmp_path: Path, environ: dict[str, str], architecture: str, why: str
) -> None:
    """With the reason."""
    _save(tmp_path, architecture)
    chosen = _select(tmp_path, **environ)
    assert chosen.engine == ("vllm" if why.startswith("it lists") else "transformers")
    assert why in chosen.reason


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("modules.json", "[]", "a model of sentence-transformers"),
        ("config_sentence_transformers.json", "{}", "a model of sentence-transformers"),
        (
            "adapter_config.json",
            '{"task_type": "SEQ_CLS", "base_model_name_or_path": "a/b"}',
            "task_type is SEQ_CLS",
        ),
    ],
)
def test_a_decoder_that_generates_no_text_is_not_served_by_vllm(
    tmp_path: Path, file: str, content: str, why: str
) -> None:
    """As Qwen3-Embedding, whose architecture is Qwen3ForCausalLM."""
    (_save(tmp_path) / file).write_text(content)
    chosen = _select(tmp_path)
    assert (chosen.engine, why in chosen.reason) == ("transformers", True)
    if file != "adapter_config.json":
        assert _select(tmp_path, HF_TASK="text-generation").engine == "vllm"


def test_handlers_of_the_model_come_before_vllm(tmp_path: Path) -> None:
    """A wish for vLLM is then refused."""
    code = _save(tmp_path) / "code"
    code.mkdir()
    (code / "inference.py").write_text("def model_fn(model_dir): ...")
    assert _select(tmp_path).engine == "transformers"
    with pytest.raises(ConfigError, match=r"is vllm, but the model has its own handlers"):
        _select(tmp_path, AMPHORA_GENERATION="vllm")


def test_without_vllm_its_variables_and_adapters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; a model's own handlers may read OPTION_* and adapters/ themselves."""
    monkeypatch.setattr(selection, "_package", lambda: None)
    model = _save(tmp_path)
    assert _select(tmp_path) == Selection(engine="transformers", reason="")
    with pytest.raises(ConfigError, match=r"SM_VLLM_DTYPE set .*not installed.*vllm image"):
        _select(tmp_path, SM_VLLM_DTYPE="float16")
    named = r"AMPHORA_ADAPTERS is set.*vLLM alone serves adapters by name, and it is not used: "
    with pytest.raises(ConfigError, match=named):
        _select(tmp_path, AMPHORA_ADAPTERS="2")
    adapter = model / "adapters/fr/adapter_config.json"
    adapter.parent.mkdir(parents=True)
    adapter.write_text("{}")
    with pytest.raises(ConfigError, match=named):
        _select(tmp_path)
    (model / "code").mkdir()
    (model / "code/inference.py").write_text("def model_fn(model_dir): ...")
    assert _select(tmp_path, AMPHORA_ADAPTERS="2", OPTION_DTYPE="x").engine == "transformers"


def test_a_name_on_the_hub_needs_a_task_or_a_variable(tmp_path: Path) -> None:
    """Its architecture is not known before it is fetched."""
    assert _select(tmp_path, HF_MODEL_ID="a/b").engine == "transformers"
    assert _select(tmp_path, HF_MODEL_ID="a/b", HF_TASK="text-generation").model == "a/b"
    assert _select(tmp_path, SM_VLLM_MODEL="a/b").model == "a/b"
    folder = _save(tmp_path)
    assert _select(tmp_path, HF_MODEL_ID=str(folder)).model == str(folder)
    with pytest.raises(ConfigError, match=r"HF_MODEL_ID is 'a/b', but .* holds a model, too"):
        _select(tmp_path, HF_MODEL_ID="a/b")


def test_an_adapter_is_served_on_its_base(tmp_path: Path) -> None:
    """Which is looked for beside it; its own name is the adapter's."""
    folder, base = tmp_path / "model", tmp_path / "model/tiny"
    base.mkdir(parents=True)
    (base / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = {"base_model_name_or_path": "/gone/tiny", "r": 12, "rank_pattern": {"q": 40}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    chosen = _select(tmp_path)
    assert (chosen.model, chosen.adapter) == (str(base), folder)
    words = _command(tmp_path, chosen)
    assert words["--lora-modules"] == [f"model={folder}"]
    assert words["--served-model-name"] == ["base"]
    assert words["--max-lora-rank"] == ["64"]
    # On CPUs, one of which stays empty.
    assert words["--max-loras"] == words["--max-cpu-loras"] == ["10"]
    assert words["--tokenizer"] == words["--generation-config"] == [str(folder)]


def _command(base: Path, chosen: Selection | None = None, **environ: str) -> dict[str, list[str]]:
    """The arguments by their names."""
    chosen = chosen or Selection(engine="vllm", reason="", model="a/b")
    line = server_arguments.command(_settings(base, environ), environ, chosen, Path("/socket"))
    words: dict[str, list[str]] = {}
    for word in line[line.index("a/b" if "a/b" in line else chosen.model) + 1 :]:
        if word.startswith("--"):
            words[word] = []
        else:
            words[[*words][-1]].append(word)
    return words


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SM_VLLM_MAX_MODEL_LEN": "4096"}, {"--max-model-len": ["4096"]}),
        ({"SM_VLLM_ENFORCE_EAGER": "true"}, {"--enforce-eager": []}),
        ({"SM_VLLM_ENFORCE_EAGER": "false"}, {}),
        ({"SM_VLLM_LORA_MODULES": '["a=/a", "b=/b"]'}, {"--lora-modules": ["a=/a", "b=/b"]}),
        ({"SM_VLLM_SPECULATIVE_CONFIG": '{"a": 1}'}, {"--speculative-config": ['{"a": 1}']}),
        ({"AMPHORA_DTYPE": "float32"}, {"--dtype": ["float32"]}),
        ({"AMPHORA_DTYPE": "float32", "SM_VLLM_DTYPE": "half"}, {"--dtype": ["half"]}),
        ({"HF_MODEL_REVISION": "v1"}, {"--revision": ["v1"]}),
        ({"HF_TRUST_REMOTE_CODE": "true"}, {"--trust-remote-code": []}),
        ({"SM_VLLM_SERVED_MODEL_NAME": "mine"}, {"--served-model-name": ["mine"]}),
        ({"SM_VLLM_SERVED_MODEL_NAME": '["a", "b"]'}, {"--served-model-name": ["a", "b"]}),
        (
            {"SM_VLLM_LORA_MODULES": '{"name": "a"} {"name": "b"}'},
            {"--lora-modules": ['{"name": "a"}', '{"name": "b"}']},
        ),
        (
            {"SM_VLLM_LORA_MODULES": '[{"name": "a"}, {"name": "b"}]'},
            {"--lora-modules": ['{"name": "a"}', '{"name": "b"}']},
        ),
        ({"SM_VLLM_LORA_MODULES": "[]"}, {}),
        ({"SM_VLLM_LORA_MODULES": '[{"name": }]'}, {"--lora-modules": ['[{"name": }]']}),
        (
            {"SM_VLLM_SPECULATIVE_CONFIG": "{% if a %}{{ b }}"},
            {"--speculative-config": ["{% if a %}{{ b }}"]},
        ),
    ],
)
def test_variables_become_arguments(
    tmp_path: Path, environ: dict[str, str], expected: dict[str, Any]
) -> None:
    """As in AWS's image."""
    usual = _command(tmp_path)
    assert _command(tmp_path, **environ) == {**usual, **expected}


@pytest.mark.parametrize(
    ("files", "environ", "why"),
    [
        ({}, {}, "has no tokenizer"),
        (
            {"tokenizer.json": "", "chat_template.jinja": "{% if x %}"},
            {},
            "chat template in .*jinja",
        ),
        (
            {"tokenizer_config.json": json.dumps({"chat_template": "{% for %}"})},
            {},
            r"tokenizer_config.json cannot be read \(line 1\)",
        ),
        ({"tokenizer.json": ""}, {"SM_VLLM_CHAT_TEMPLATE": "{{ x"}, "template"),
        ({"tokenizer.json": ""}, {"SM_VLLM_MAX_MODEL_LENN": "9"}, "Did you mean .*max-model-len"),
    ],
)
def test_what_cannot_be_served_is_refused_before_vllm_starts(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], why: str
) -> None:
    folder = _save(tmp_path)
    source = tmp_path / "site/vllm/engine/arg_utils.py"
    source.parent.mkdir()
    source.write_text('add("--max-model-len")\nadd("--chat-template")\n')
    for name, text in files.items():
        (folder / name).write_text(text)
    chosen = Selection(engine="vllm", reason="", model=str(folder))
    with pytest.raises(ConfigError, match=why):
        _command(tmp_path, chosen, **environ)


def test_templates_and_settings_that_vllm_knows_pass(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    (folder / "tokenizer.json").touch()
    template = "{% for m in x %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert _command(tmp_path, Selection(engine="vllm", reason="", model=str(folder)))


@pytest.mark.parametrize(
    ("text", "environ", "why"),
    [
        ("import model_hosting_container_standards.sagemaker as standards", {}, "model.py"),
        ("async def custom_sagemaker_invocation_handler(request): ...", {}, "model.py"),
        ("", {"CUSTOM_FASTAPI_INVOCATION_HANDLER": "model:f"}, "CUSTOM_FASTAPI_INVOCATION_HANDLER"),
    ],
)
def test_handlers_of_awss_image_are_refused(
    tmp_path: Path, text: str, environ: dict[str, str], why: str
) -> None:
    """By name; another model.py is the user's own affair."""
    (_save(tmp_path) / "model.py").write_text(text)
    with pytest.raises(ConfigError, match=why):
        _select(tmp_path, **environ)
    (tmp_path / "model/model.py").write_text("class Net: ...")
    assert _select(tmp_path).engine == "vllm"


def test_what_would_change_the_front_is_refused(tmp_path: Path) -> None:
    """All of it at once, by name, with what is read instead."""
    with pytest.raises(
        ConfigError, match=r"OPTION_TENSOR_PARALLEL_DEGREE: .*SM_VLLM_TENSOR_PARALLEL_SIZE"
    ):
        _select(tmp_path, OPTION_TENSOR_PARALLEL_DEGREE="4")
    with pytest.raises(ConfigError, match=r"SM_VLLM_PORT cannot be set.* SM_VLLM_API_KEY cannot"):
        _command(tmp_path, SM_VLLM_PORT="1", SM_VLLM_API_KEY="k")


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (
            "(EngineCore pid=1) ERROR 11-24 04:32:29 [core.py:7] torch.OutOfMemoryError: CUDA out of"
            " memory. Tried to allocate 2 GiB\n(APIServer pid=2) RuntimeError: Engine core"
            " initialization failed. See root cause above.\n",
            1,
            r"^torch.OutOfMemoryError: CUDA out of memory.* Set SM_VLLM_MAX_MODEL_LEN lower",
        ),
        (
            "(APIServer pid=2) pydantic_core._pydantic_core.ValidationError: 1 validation error\n"
            "(APIServer pid=2)   Value error, no such model type\n",
            1,
            r"1 validation error Value error, no such model type$",
        ),
        ("vllm serve: error: unrecognized arguments: --foo\n", 2, r"--foo The arguments come from"),
        (
            "vllm serve: error: argument --dtype: invalid choice: 'int8'\n",
            2,
            r"choice: 'int8' The arguments come from .*, and --dtype from AMPHORA_DTYPE",
        ),
        ("INFO all is well\n", 3, "^exit code 3$"),
        (
            "(APIServer pid=2) ValueError: an earlier request\n(APIServer pid=2) vllm.v1.engine."
            "exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
            " for the root cause.\n",
            1,
            "^its engine core exited unexpectedly",
        ),
        ("", -9, "killed"),
    ],
)
def test_the_reason_of_an_end_is_the_first_cause(lines: str, code: int, expected: str) -> None:
    """And not what another process says of it."""
    assert re.search(expected, reason(lines.splitlines(), code))
