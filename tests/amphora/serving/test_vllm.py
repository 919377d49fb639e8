"""The choice of the engine that generates text, the arguments of vLLM's server, what it receives for Hugging Face's and
TGI's bodies, and what its answers become."""

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from amphora.common import devices
from amphora.common.errors import ConfigError
from amphora.serving import settings as settings_module
from amphora.serving.pool.spawner import ModelLoadError
from amphora.serving.settings import ServerSettings
from amphora.serving.vllm import selection, server_arguments, vllm_source
from amphora.serving.vllm.prompt_proof import PromptProof
from amphora.serving.vllm.selection import EngineChoice
from amphora.serving.vllm.server_process import reason
from tests.support import recording_vllm
from tests.support.recording_vllm import install
from tests.support.servers import Running
from tests.support.until import until


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of vLLM's with a list of one architecture."""
    site = install(tmp_path / "site")
    for module in (selection, vllm_source):
        monkeypatch.setattr(module, "find_package", lambda: site / "vllm")


def _settings(base: Path, environ: dict[str, str]) -> ServerSettings:
    (base / "model").mkdir(exist_ok=True)
    return settings_module.read(base, environ, devices.detect({}))


def _save(base: Path, architecture: str = "LlamaForCausalLM") -> Path:
    (base / "model").mkdir(exist_ok=True)
    (base / "model/config.json").write_text(json.dumps({"architectures": [architecture]}))
    return base / "model"


def _select(base: Path, **environ: str) -> EngineChoice:
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


def test_without_vllm_its_variables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; a model's own handlers may read OPTION_* themselves. Adapters may be an encoder's."""
    monkeypatch.setattr(selection, "find_package", lambda: None)
    model = _save(tmp_path)
    assert _select(tmp_path) == EngineChoice(engine="transformers", reason="")
    with pytest.raises(ConfigError, match=r"SM_VLLM_DTYPE set .*not installed.*vllm image"):
        _select(tmp_path, SM_VLLM_DTYPE="float16")
    assert _select(tmp_path, AMPHORA_ADAPTERS="2").engine == "transformers"
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
    """The base is found in the same folder, and the adapter is served by its own name."""
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
    assert (words["--enable-lora"], words["--max-lora-rank"]) == ([], ["64"])
    # On CPUs, one of which stays empty.
    assert words["--max-loras"] == words["--max-cpu-loras"] == ["10"]
    assert words["--tokenizer"] == words["--generation-config"] == [str(folder)]


def _command(
    base: Path, chosen: EngineChoice | None = None, **environ: str
) -> dict[str, list[str]]:
    """The arguments by their names."""
    chosen = chosen or EngineChoice(engine="vllm", reason="", model="a/b")
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


ARGUMENTS = """
@dataclass
class EngineArgs:
    max_model_len: int | None = None
    chat_template: "str | None" = None
    dtype: Literal["auto", "bool"] = "auto"
    enable_lora: bool = False
    enable_prefix_caching: Optional[bool] = None
    hf_token: bool | str | None = None
    served_model_name: str | list[str] | None = None
    lora_modules: list[LoRAModulePath] | None = None
    speculative_config: dict[str, Any] | None = None

    def add(parser, group, kwargs):
        group.add_argument("--enable-prefix-caching", **kwargs["enable_prefix_caching"])
        group.add_argument("--max-model-len", "-m", **kwargs["max_model_len"])
        parser.add_argument("--disable-log-stats", action="store_true")
        parser.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=None)
        parser.add_argument("--timeout", type=int)
"""


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        *(("ENABLE_LORA", value, ["--enable-lora"]) for value in ("1", "yes", "True", "on", "")),
        *(("ENABLE_LORA", value, ["--no-enable-lora"]) for value in ("0", "no", "False", "off")),
        ("ENABLE_PREFIX_CACHING", "false", ["--no-enable-prefix-caching"]),
        ("NO_ENABLE_PREFIX_CACHING", "true", ["--no-enable-prefix-caching"]),
        ("NO_ENABLE_PREFIX_CACHING", "0", ["--enable-prefix-caching"]),
        ("DISABLE_LOG_STATS", "1", ["--disable-log-stats"]),
        ("DISABLE_LOG_STATS", "0", []),
        ("QUIET", "no", ["--no-quiet"]),
        ("TIMEOUT", "1", ["--timeout", "1"]),
        ("MAX_MODEL_LEN", "1", ["--max-model-len", "1"]),
        ("MAX_MODEL_LEN", "", []),
        ("HF_TOKEN", "true", ["--hf-token"]),
        ("HF_TOKEN", "abc", ["--hf-token", "abc"]),
        ("DTYPE", "true", ["--dtype", "true"]),
        ("LORA_MODULES", "a=/x b=/y", ["--lora-modules", "a=/x", "b=/y"]),
        ("LORA_MODULES", '["a=/x y"]', ["--lora-modules", "a=/x y"]),
        ("LORA_MODULES", '{"name": "a"} {"name": "b"}',
         ["--lora-modules", '{"name": "a"}', '{"name": "b"}']),
        ("SPECULATIVE_CONFIG", '{"a": [1]}', ["--speculative-config", '{"a": [1]}']),
    ],
)  # fmt: skip
def test_variables_are_read_by_the_types_of_vllms_arguments(
    tmp_path: Path, variable: str, value: str, expected: list[str]
) -> None:
    _write_source(tmp_path)
    environ = {f"SM_VLLM_{variable}": value}
    chosen = EngineChoice(engine="vllm", reason="", model="a/b")
    usual, given = (
        server_arguments.command(_settings(tmp_path, some), some, chosen, Path("/socket"))
        for some in ({}, environ)
    )
    assert given == usual + expected


def test_a_flag_with_another_value_is_refused(tmp_path: Path) -> None:
    _write_source(tmp_path)
    with pytest.raises(ConfigError, match="SM_VLLM_ENABLE_LORA is 'maybe': give true or false"):
        _command(tmp_path, SM_VLLM_ENABLE_LORA="maybe")


def _write_source(base: Path) -> None:
    source = base / "site/vllm/engine/arg_utils.py"
    source.parent.mkdir()
    source.write_text(ARGUMENTS)


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
    _write_source(tmp_path)
    for name, text in files.items():
        (folder / name).write_text(text)
    chosen = EngineChoice(engine="vllm", reason="", model=str(folder))
    with pytest.raises(ConfigError, match=why):
        _command(tmp_path, chosen, **environ)


def test_templates_and_settings_that_vllm_knows_pass(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    (folder / "tokenizer.json").touch()
    template = "{% for m in x %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert _command(tmp_path, EngineChoice(engine="vllm", reason="", model=str(folder)))


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


CHAT: Any = [{"role": "user", "content": "hello"}]
USUAL = {"route": "/v1/completions", "model": "model", "prompt": ["x"], "max_tokens": 64,
         "temperature": 0.0}  # fmt: skip
SCHEMA = {"type": "object"}
WHOLE = "one two"


def write_tokenizer(folder: Path) -> None:
    """Write one whose ids nobody has to compare, for which the front would load transformers."""
    (folder / "tokenizer.json").write_text("{}")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The real front, with a recording server in vLLM's place."""
    base = tmp_path_factory.mktemp("vllm")
    for folder in ("model", "model/adapters/fr"):
        (base / folder).mkdir(parents=True)
    (base / "model/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (base / "model/adapters/fr/adapter_config.json").write_text('{"r": 8}')
    write_tokenizer(base / "model")
    environ = {"PYTHONPATH": str(install(base / "site")), "RECORDED": str(base / "recorded")}
    with Running(base, environ | {"AMPHORA_MAX_TOKENS_WRITTEN": "1000"}) as running:
        yield running.ready()


def _recorded(server: Running, count: int = 1) -> list[dict[str, Any]]:
    """The last bodies that vLLM has received."""
    lines = (server.log_path.parent / "recorded").read_text().splitlines()
    return [json.loads(line) for line in lines[-count:]]


def _post(server: Running, body: Any, route: str = "/invocations", **headers: str) -> Any:
    reply = server.http.post(route, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("parameters", "changes"),
    [
        ({}, {}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"min_new_tokens": 5}, {"min_tokens": 5}),
        ({"do_sample": True}, {"temperature": None}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"temperature": 0.5, "do_sample": False}, {}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_p": 0.5}, {"top_p": 0.5, "temperature": None}),
        ({"top_k": 3}, {"top_k": 3, "temperature": None}),
        ({"min_p": 0.5}, {"min_p": 0.5, "temperature": None}),
        ({"seed": 3}, {"seed": 3}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"num_return_sequences": 2, "do_sample": True}, {"n": 2, "temperature": None}),
        ({"stop": ["a"]}, {"stop": ["a"], "include_stop_str_in_output": True}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"], "include_stop_str_in_output": True}),
        ({"stop_sequence": "a"}, {"stop": "a", "include_stop_str_in_output": True}),
        ({"truncate": 4}, {"truncate_prompt_tokens": 4, "truncation_side": "left"}),
        ({"truncation": True}, {"truncate_prompt_tokens": 64, "truncation_side": "left"}),
        (
            {"truncation": True, "max_new_tokens": 100},
            {"truncate_prompt_tokens": 28, "truncation_side": "left", "max_tokens": 100},
        ),
        ({"truncation": False}, {}),
        ({"details": True}, {"logprobs": 0, "return_token_ids": True}),
        ({"return_full_text": False}, {}),
        ({"adapter_id": "fr"}, {"model": "fr"}),
        ({"grammar": {"type": "regex", "value": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        (
            {"grammar": {"type": "json", "value": SCHEMA}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "grammar", "schema": SCHEMA},
                }
            },
        ),
        ({"watermark": False, "num_beams": 1, "best_of": 1, "top_n_tokens": 0, "seed": None}, {}),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_parameter_changes_what_vllm_receives(
    server: Running, parameters: dict[str, Any], changes: dict[str, Any]
) -> None:
    """And nothing else. Both APIs, in `parameters` or beside `inputs`."""
    expected = {name: value for name, value in {**USUAL, **changes}.items() if value is not None}
    _post(server, {"inputs": "x", "parameters": parameters, "options": {"use_cache": False}})
    assert _recorded(server) == [expected]
    _post(server, {"inputs": "x", **parameters})
    assert _recorded(server) == [expected]
    if "num_return_sequences" not in parameters:
        _post(server, {"inputs": "x", "parameters": parameters}, "/generate")
        assert _recorded(server) == [expected]


@pytest.mark.parametrize(
    ("body", "route", "changes"),
    [
        ({"inputs": "x"}, "/generate_stream", {"stream": True, "logprobs": 0}),
        ({"inputs": "x", "stream": True}, "/invocations", {"stream": True, "logprobs": 0}),
        ({"inputs": ["x", "y"]}, "/invocations", {"prompt": ["x", "y"]}),
        ("x", "/invocations", {}),
    ],
)
def test_a_form_of_body_changes_what_vllm_receives(
    server: Running, body: Any, route: str, changes: dict[str, Any]
) -> None:
    server.http.post(route, json=body)
    (got,) = _recorded(server)
    assert {name: got[name] for name in {**USUAL, **changes}} == {**USUAL, **changes}


@pytest.mark.parametrize(
    ("body", "route"),
    [
        ({"messages": CHAT, "logit_bias": {"3": 1}, "store": True}, "/v1/chat/completions"),
        ({"prompt": "x", "echo": True}, "/v1/completions"),
    ],
)
def test_a_body_of_openais_api_passes_unchanged(
    server: Running, body: dict[str, Any], route: str
) -> None:
    """By its own route, SageMaker's, and an attribute; an adapter's header names the model."""
    for path in (route, "/openai" + route, "/invocations" + route, "/invocations"):
        _post(server, body, path)
        assert _recorded(server) == [{"route": route, "model": "model", **body}]
    _post(server, body, **{"x-amzn-sagemaker-custom-attributes": f"route={route}"})
    assert _recorded(server) == [{"route": route, "model": "model", **body}]
    _post(server, body, **{"x-amzn-sagemaker-adapter-identifier": "fr"})
    assert _recorded(server) == [{"route": route, **body, "model": "fr"}]


def test_rows_are_answered_and_a_session_is_passed_on(server: Running) -> None:
    headers = {"content-type": "text/csv; header=absent", "x-amzn-sagemaker-session-id": "s-1"}
    reply = server.http.post("/invocations", content=b"text\nx\n", headers=headers)
    assert reply.json() == [[{"generated_text": word + WHOLE}] for word in ("text", "x")]
    recorded = sorted(_recorded(server, 2), key=lambda body: body["prompt"])
    changes = [{"prompt": [word], "session": "s-1"} for word in ("text", "x")]
    assert recorded == [{**USUAL, **change} for change in changes]


def test_a_conversation_is_a_chat_and_its_last_assistant_turn_goes_on(server: Running) -> None:
    idle = {"best_of": 1, "modalities": ["text"], "audio": None, "suffix": None}
    _post(server, {"prompt": "x", **idle}, "/v1/completions")
    expected = {"route": "/v1/completions", "model": "model", "prompt": "x"}
    assert _recorded(server) == [expected]
    (entry,) = _post(server, {"inputs": CHAT, "parameters": {"details": True}})
    assert entry["generated_text"] == WHOLE
    (got,) = _recorded(server)
    assert (got["route"], got["messages"]) == ("/v1/chat/completions", CHAT)
    assert (got["add_generation_prompt"], got["continue_final_message"]) == (True, False)
    assert got["logprobs"] is True
    begun = [*CHAT, {"role": "assistant", "content": "I say "}]
    (entry,) = _post(server, {"inputs": begun})
    assert entry["generated_text"] == [CHAT[0], {"role": "assistant", "content": "I say one two"}]
    (got,) = _recorded(server)
    assert (got["add_generation_prompt"], got["continue_final_message"]) == (False, True)


def test_answers_have_the_form_of_their_api(server: Running) -> None:
    """One text, several texts of one prompt, several prompts, TGI's object, its details."""
    whole, text = {"generated_text": "x" + WHOLE}, {"generated_text": WHOLE}
    assert _post(server, {"inputs": "x"}) == [whole]
    assert _post(server, {"inputs": "x", "return_full_text": False}) == [text]
    twice = {"inputs": "x", "num_return_sequences": 2, "do_sample": True}
    assert _post(server, twice) == [whole, whole]
    other = {"generated_text": "y" + WHOLE}
    assert _post(server, {"inputs": ["x", "y"]}) == [[whole], [other]]
    assert _post(server, {"inputs": "x"}, "/generate") == text
    details = _post(server, {"inputs": "x", "details": True, "seed": 3}, "/generate")["details"]
    tokens = [(token["id"], token["text"], token["special"]) for token in details.pop("tokens")]
    assert tokens == [(0, "one", False), (1, " two", False), (2, "</s>", True)]
    assert details == {
        "finish_reason": "eos_token", "generated_tokens": 3, "seed": 3, "prefill": [],
    }  # fmt: skip
    stopped = _post(server, {"inputs": "x", "details": True, "stop": ["s"]}, "/generate")
    assert stopped["details"]["finish_reason"] == "stop_sequence"


@pytest.mark.parametrize(
    ("route", "inputs"), [("/generate_stream", "x"), ("/invocations", "x"), ("/invocations", CHAT)]
)
def test_a_stream_is_tgis_events(server: Running, route: str, inputs: Any) -> None:
    """As server-sent events, or lines if the client accepts them."""
    body = {"inputs": inputs, "stream": True}
    for accept, kind, prefix in (
        ("*/*", "text/event-stream", "data: "),
        ("application/jsonlines", "application/jsonlines", ""),
    ):
        reply = server.http.post(route, json=body, headers={"accept": accept})
        assert reply.headers["content-type"] == kind
        lines = [line.removeprefix(prefix) for line in reply.text.splitlines() if line]
        events = [json.loads(line) for line in lines]
        assert [event["index"] for event in events] == [1, 2, 3]
        assert [event["generated_text"] for event in events] == [None, None, WHOLE]
        assert events[-1]["details"]["input_length"] == 2
        assert events[-1]["token"]["special"] is True


def test_lines_are_answered_in_their_places_within_one_bound_on_their_cost(server: Running) -> None:
    """Of each API; one that is wrong harms no other."""
    lines: list[Any] = [
        {"inputs": "x"}, {"messages": CHAT}, {"prompt": "y"}, {"inputs": 3},
        {"inputs": "x", "stream": True}, {"inputs": "x", "max_new_tokens": 2000},
        {"inputs": "refused"}, {"inputs": CHAT},
    ]  # fmt: skip
    reply = server.http.post(
        "/invocations",
        content="\n".join([*map(json.dumps, lines), "{"]),
        headers={"content-type": "application/jsonlines", "accept": "application/jsonlines"},
    )
    answers = [json.loads(line) for line in reply.text.splitlines()]
    assert answers[0] == [{"generated_text": "x" + WHOLE}]
    assert answers[1]["choices"][0]["message"]["content"] == WHOLE
    assert answers[2]["choices"][0]["text"] == WHOLE
    codes = [answer["error"]["code"] for answer in (*answers[3:7], answers[8])]
    assert codes == ["bad_request"] * 2 + ["too_costly", "context_length_exceeded", "bad_request"]
    assert answers[7][0]["generated_text"][-1]["content"] == WHOLE
    # Those beyond it are refused, one by one.
    line = json.dumps({"inputs": "x", "max_new_tokens": 500})
    headers = {"content-type": "application/jsonlines", "accept": "application/jsonlines"}
    reply = server.http.post("/invocations", content="\n".join([line] * 3), headers=headers)
    *answers, refused = map(json.loads, reply.text.splitlines())
    assert answers == [[{"generated_text": "x" + WHOLE}]] * 2
    assert "those before it ask for 1,500 tokens" in refused["error"]["message"]
    assert "://unix:" in server.log, "vLLM's own lines are passed on"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"inputs": "x", "max_new_tokens": True}, 400, "max_new_tokens is True"),
        ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1001}, 413, "TOKENS_WRITTEN"),
        ({"prompt": "x", "max_tokens": "501", "n": "2"}, 413, "1,002 tokens"),
        ({"inputs": "refused", "max_new_tokens": 64}, 400, "max_new_tokens is 64"),
        ({"prompt": "refused"}, 400, "max_tokens is 64"),
        ({"inputs": "x", "num_beams": 4}, 400, "num_beams is 4: give 1"),
        ({"inputs": "x", "do_sample": "yes"}, 400, "do_sample is 'yes'"),
        ({"inputs": "x", "stop": "a", "stop_sequences": ["a"]}, 400, "mean the same"),
        ({"inputs": "x", "temperature": 0, "do_sample": True}, 400, "temperature is 0"),
        ({"inputs": "x", "grammar": {"type": "ebnf"}}, 400, "grammar is"),
        ({"inputs": ["x", "y"], "stream": True}, 400, "Only one text"),
        ({"inputs": [CHAT, CHAT]}, 400, "one in each line"),
        ({"inputs": []}, 400, "no inputs"),
        ({"inputs": "x", "parameters": 3}, 400, "'parameters' is 3: give an object"),
        ({"messages": CHAT, "prompt": "x"}, 400, "messages and prompt, which belong to"),
        ({"messages": CHAT, "n": 8}, 413, "8 texts x 128 new tokens"),
        ({"prompt": ["x"] * 8, "n": 8}, 413, "8 texts x 16 new tokens"),
        ({"prompt": "x", "guided_json": SCHEMA}, 400, "'guided_json' is not a key of vLLM's"),
        ({"prompt": "x", "model": "de"}, 404, "no model 'de'. Loaded: fr, model"),
        ({"inputs": "refused"}, 400, "context_length_exceeded"),
        (3, 400, "Send"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_cannot_be_answered_is_refused(
    server: Running, body: Any, status: int, message: str
) -> None:
    reply = server.http.post("/invocations", json=body)
    assert (reply.status_code, message in reply.text) == (status, True), reply.text


@pytest.mark.parametrize(("kind", "status"), [("image/png", 415), ("application/json", 400)])
def test_bodies_that_are_not_json_are_refused(server: Running, kind: str, status: int) -> None:
    reply = server.http.post("/invocations", content=b"x,y", headers={"content-type": kind})
    assert reply.status_code == status, reply.text
    assert server.http.post("/generate", json={"inputs": ["x"]}).status_code == 400


@pytest.mark.parametrize("name", ["prompt", "inputs"])
def test_a_stream_that_begins_with_an_error_is_one(server: Running, name: str) -> None:
    reply = server.http.post("/invocations", json={name: "broken at once", "stream": True})
    assert reply.status_code == 500
    assert "the engine has failed" in reply.text and "DONE" not in reply.text


def test_an_error_in_halves_is_one_at_the_beginning_and_breaks_the_stream_else(
    server: Running,
) -> None:
    may_end = server.log_path.with_name("recorded.read")
    may_end.unlink(missing_ok=True)
    recorded = server.log_path.with_name("recorded")
    body = {"prompt": "broken at once, in halves", "stream": True}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.http.post, "/v1/completions", json=body)
        until(lambda: recorded.exists() and "in halves" in recorded.read_text())
        may_end.touch()
        assert reply.result().status_code == 500
    may_end.unlink()
    body = {"prompt": "broken halves", "stream": True}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        server.http.stream("POST", "/v1/completions", json=body) as reply,
    ):
        for data in reply.iter_raw():
            if data.endswith(b'data: {"err'):
                (server.log_path.parent / "recorded.read").touch()


@pytest.mark.parametrize("name", ["prompt", "inputs"])
def test_a_stream_that_breaks_is_not_ended_as_if_it_were_whole(server: Running, name: str) -> None:
    """vLLM writes its error into the stream, and ends it."""
    try:
        reply = server.http.post("/invocations", json={name: "broken", "stream": True})
    except httpx.RemoteProtocolError:
        return
    # The error came together with the first token, so that no status had been sent.
    assert reply.status_code == 500


PROOF: Any = {
    "amphora_proof": 1, "reading": "log-probabilities", "versions": {"torch": "2.13.0"},
    "tolerances": {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02},
    "probes": [{
        "name": "probe 1", "prompt": prompt, "margins": [0.5, 0.05, 0.5],
        "rows": [{"ids": [1, 2], "types": None, "keep": None, "tokens": [3, 4, 5]}],
        "values": [{"shape": [4], "columns": None, "numbers": [-1.0, -2.0, -0.5, -0.1]}],
    } for prompt in ("hello", CHAT)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("falsified", "environ", "cause"),
    [
        ({}, {}, ""),
        ({"ids": [1, 7]}, {}, r"probe 1 has the tokens \[1, 7\], not \[1, 2\]. Cause: tokenizer"),
        ({"scores": 0.05}, {}, ""),
        ({"scores": 0.2}, {}, "differ by 0.2, and 0.1 is allowed. Cause: weights, precision"),
        ({"scores": 0.05}, {"AMPHORA_DTYPE": "float32"}, "differ by 0.05, and 0.02 is allowed"),
        ({"scores": 9}, {"SM_VLLM_QUANTIZATION": "fp8"}, ""),
        ({"tokens": [9, 4, 5]}, {}, r"continued by the tokens \[9, 4, 5\], not \[3, 4, 5\]"),
        ({"tokens": [3, 9, 9]}, {}, ""),  # the second best was as good
    ],
)
def test_answers_are_compared_with_the_proof_of_the_model(
    tmp_path: Path, falsified: dict[str, Any], environ: dict[str, str], cause: str
) -> None:
    (tmp_path / "proof.json").write_text(json.dumps(PROOF))
    proof = PromptProof.read(tmp_path, environ)
    assert proof is not None

    async def answer(route: str, body: Any, seconds: float) -> tuple[int, bytes]:
        document = recording_vllm.proved_answer(dict(body), {**PROOF, "falsified": falsified})
        return 200, json.dumps(document).encode()

    def verify() -> None:
        asyncio.run(proof.verify("model", answer, 9))

    if cause:
        with pytest.raises(ModelLoadError, match=cause):
            verify()
    else:
        verify()


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_model_that_answers_otherwise_than_proved_is_not_served(
    tmp_path: Path, setting: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    write_tokenizer(tmp_path / "model")
    proof = {**PROOF, "falsified": {"ids": [1, 7]}}
    (tmp_path / "model/proof.json").write_text(json.dumps(proof))
    environ = {
        "PYTHONPATH": str(install(tmp_path / "vllm-site")), "RECORDED": str(tmp_path / "recorded"),
        "AMPHORA_PROOF": setting,
    }  # fmt: skip
    with Running(tmp_path, environ) as running:
        if setting == "off":
            running.ready()
            assert "AMPHORA_PROOF=off: answers are not compared with proof.json" in running.log
            return
        assert running.process.wait(60) != 0
        last = running.log.splitlines()[-1]
        assert "has the tokens [1, 7], not [1, 2]. Cause: tokenizer" in last
        assert "AMPHORA_PROOF=off serves it anyway" in last


def test_a_server_whose_engine_is_dead_is_not_ready(server: Running) -> None:
    """Though it answers for half a minute more. The last test, since it stays so."""
    server.log_path.with_name("recorded.dead").touch()
    until(lambda: server.ping() == 503)
