"""Models that take no adapters refuse them; tests/vllm has those that vLLM serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.servers import RECIPE, Running
from tests.support.serving_kit import save

pytestmark = pytest.mark.heavy
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def test_a_model_of_transformers_refuses_adapters_by_name(tmp_path: Path) -> None:
    save("BertForSequenceClassification", tmp_path / "model")
    with Running(tmp_path, RECIPE) as running:
        running.ready()
        answer = running.http.post("/adapters", json={"name": "x", "src": str(tmp_path)})
        assert (answer.status_code, "vLLM alone" in answer.text) == (404, True)
        named = running.invoke({"inputs": "good"}, **{HEADER: "x"})
        assert (named.status_code, "no adapters" in named.text) == (404, True)
        assert named.json()["error"]["code"] == "model_not_found"


def test_a_folder_of_adapters_is_refused_where_vllm_does_not_serve_it(tmp_path: Path) -> None:
    folder = save("LlamaForCausalLM", tmp_path / "model")
    config = folder / "adapters/fr/adapter_config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)}))
    with Running(tmp_path, RECIPE) as running:
        assert running.process.wait(240) != 0
        assert "adapters by name, and it is not used: " in running.log
