"""Routes that load and unload LoRA adapters, before a model whose handlers read the front's list as
vLLM's proxy does, and before models that take no adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import CODE
from tests.support.servers import Running
from tests.support.serving_kit import save

pytestmark = pytest.mark.heavy
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
HANDLERS = """
import json, os
from pathlib import Path

class Refused(ValueError):
    status_code, code = 400, "adapter_not_loaded"

def model_fn(model_dir):
    return None

def describe_fn(model_dir, model):
    return {"model": "base", "adapters": True}

def predict_fn(data, model, context):
    listed = json.loads(Path(os.environ["AMPHORA_ADAPTERS_FILE"]).read_text())
    name = data["name"] if context.path == "/adapters" else context.headers.get(
        "x-amzn-sagemaker-adapter-identifier", "")
    if name and (Path(listed[name]["path"]) / "broken").exists():
        raise Refused("The adapter cannot be served on this model: it is broken")
    return {"by": listed[name]["path"] if name else "base"}
"""


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One adapter lies in the model's folder; two may be loaded at a time."""
    root = tmp_path_factory.mktemp("server")
    adapter(root / "model" / "adapters" / "one")
    (root / "model" / "code").mkdir()
    (root / "model" / "code" / "inference.py").write_text(HANDLERS)
    running = Running(root, {"AMPHORA_ADAPTERS": "2", "AMPHORA_CODE_DIR": str(CODE)})
    try:
        yield running.ready(60)
    finally:
        running.close()


def test_adapters_are_loaded_listed_named_and_unloaded(server: Running, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "two")
    order = {"name": "two", "src": str(folder), "preload": True, "pin": False}
    answer = server.http.post("/adapters", json=order)
    assert (answer.status_code, answer.json()) == (200, {"status": "Adapter two registered"})
    assert server.invoke({}, **{HEADER: "two"}).json() == {"by": str(folder)}
    assert server.invoke({}).json() == {"by": "base"}
    shown = server.http.get("/adapters").json()["adapters"]
    assert [entry["name"] for entry in shown] == ["one", "two"]
    models = server.http.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in models] == ["base", "one", "two"]
    assert server.http.delete("/adapters/two").status_code == 200
    assert server.http.delete("/adapters/two").status_code == 404


def test_what_cannot_be_loaded_is_refused_and_forgotten(server: Running, tmp_path: Path) -> None:
    def post(**order: Any) -> tuple[int, str]:
        answer = server.http.post("/adapters", json=order)
        return answer.status_code, answer.text

    first, second = adapter(tmp_path / "first"), adapter(tmp_path / "second")
    assert post(name="x")[0] == 400
    assert post(name="x", src=str(tmp_path))[0] == 404
    assert post(name="one", src=str(first))[0] == 409
    assert post(name="base", src=str(first))[0] == 409
    (first / "broken").touch()
    status, text = post(name="broken", src=str(first))
    assert status == 400 and "it is broken" in text
    assert [entry["name"] for entry in server.http.get("/adapters").json()["adapters"]] == ["one"]
    assert post(name="two", src=str(second))[0] == 200
    status, text = post(name="three", src=str(second))
    assert status == 507 and "AMPHORA_ADAPTERS" in text
    assert server.http.delete("/adapters/two").status_code == 200


def test_a_model_of_transformers_refuses_adapters_by_name(tmp_path: Path) -> None:
    save("BertForSequenceClassification", tmp_path / "model")
    running = Running(tmp_path, {"AMPHORA_CODE_DIR": str(CODE)}).ready(120)
    try:
        answer = running.http.post("/adapters", json={"name": "x", "src": str(tmp_path)})
        assert (answer.status_code, "vLLM alone" in answer.text) == (404, True)
        named = running.invoke({"inputs": "good"}, **{HEADER: "x"})
        assert (named.status_code, "no adapters" in named.text) == (404, True)
        assert named.json()["error"]["code"] == "model_not_found"
    finally:
        running.close()


def test_a_folder_of_adapters_is_refused_where_vllm_does_not_serve_it(tmp_path: Path) -> None:
    folder = save("LlamaForCausalLM", tmp_path / "model")
    config = adapter(folder / "adapters" / "fr") / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)}))
    running = Running(tmp_path, {"AMPHORA_CODE_DIR": str(CODE)})
    try:
        assert running.process.wait(120) != 0
        assert "vLLM alone serves adapters by name" in running.log
    finally:
        running.close()
