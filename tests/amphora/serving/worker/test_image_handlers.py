"""The image's own handlers over HTTP; tests/recipe/inference compares their answers with pipelines."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import IN_FLOAT32, Running
from tests.support.serving_kit import save

LABELS = {0: "neg", 1: "pos", 2: "mixed"}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[Running]:
    """The image's handlers over a tiny random classifier."""
    base = tmp_path_factory.mktemp("classifier")
    save("BertForSequenceClassification", base / "model", id2label=LABELS)
    with Running(base, {**preloaded, **IN_FLOAT32}) as running:
        yield running.ready()


def test_a_classifier_answers_and_cuts_long_texts(server: Running) -> None:
    (answer,) = server.invoke({"inputs": "the film was good"}).json()
    assert answer["label"] in LABELS.values()
    assert 1 / 3 < answer["score"] < 1
    long = server.invoke({"inputs": ["bad", "the film " * 40, "good"]})
    assert len(long.json()) == 3
    assert long.headers["x-amphora-truncated"] == "1"
    assert "x-amphora-truncated" not in server.invoke("good").headers
    ranked = server.invoke({"inputs": "good", "parameters": {"top_k": 2}}).json()
    assert len(ranked) == 2
    assert server.invoke({"inputs": ["good"], "top_k": 2}).json() == [ranked]
    line = 'amphora_model{engine="PyTorch",task="text-classification"} 1.0'
    assert line in server.http.get("/metrics").text.splitlines()


def test_a_bad_record_has_an_error_in_its_place(server: Running) -> None:

    def ask(body: str) -> Any:
        headers = {"content-type": "application/jsonlines", "accept": "application/jsonlines"}
        return server.http.post("/invocations", content=body, headers=headers)

    long = json.dumps("the film " * 40)
    answer = ask(f'"good"\n{{"input\n{long}\n7\n')
    assert answer.status_code == 200
    entries = [json.loads(line) for line in answer.text.splitlines()]
    assert [list(entry) for entry in entries] == [
        ["label", "score"], ["error"], ["label", "score"], ["error"],
    ]  # fmt: skip
    assert "Line 2" in entries[1]["error"]["message"]
    assert answer.headers["x-amphora-failed"] == "1,3"
    assert answer.headers["x-amphora-truncated"] == "2"
    (alone,) = server.invoke("good").json()
    assert entries[0] == {**alone, "score": pytest.approx(alone["score"], abs=1e-5)}
    assert ask('{"input\n').status_code == 400


def test_a_model_of_transformers_refuses_adapters_by_name(server: Running, tmp_path: Path) -> None:
    """tests/vllm has those that vLLM serves."""
    answer = server.http.post("/adapters", json={"name": "x", "src": str(tmp_path)})
    assert (answer.status_code, "vLLM alone" in answer.text) == (404, True)
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "x"}
    named = server.invoke({"inputs": "good"}, **header)
    assert (named.status_code, "no adapters" in named.text) == (404, True)
    assert named.json()["error"]["code"] == "model_not_found"
