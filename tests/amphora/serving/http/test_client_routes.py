"""The routes of other servers' APIs: which are there is the handlers' to say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from amphora.serving.http.multi_model import TARGET_MODEL
from tests.support.servers import ECHO, NAMED, Running, Start, fault, write_model
from tests.support.worker_front import load_runner, write_code

ROUTED = (
    ECHO
    + """
    def describe_fn(model_dir, model):
        return {"task": "echo", "model": "mine", "routes": ["/v1/completions"], **model}

    def predict_fn(data, model, context):
        if data == "refused":
            error = ValueError("as asked")
            error.status_code, error.code = 422, "context_length_exceeded"
            error.param = "prompt"
            raise error
        return {"echo": data, "path": context.path}
"""
)


def test_only_the_described_routes_are_answered(shared: Start) -> None:
    server = shared(ROUTED).ready()
    answer = server.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.json() == {"echo": {"prompt": "x"}, "path": "/v1/completions"}
    assert server.http.post("/", json="x").json() == {"echo": "x", "path": "/"}
    assert server.invoke("x").json()["path"] == "/invocations"
    absent = server.http.post("/v1/embeddings", json={"input": "x"})
    assert absent.status_code == 404
    error = absent.json()["error"]
    assert (error["type"], error["param"]) == ("not_found_error", None)
    assert "Routes: /invocations, /v1/completions" in error["message"]
    unknown = server.http.post("/v1/complete", json={}).json()["error"]["message"]
    assert "Routes: /ping, /invocations, /v1/completions" in unknown
    assert "/v1/embeddings" not in unknown
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/embed", json={"inputs": "x"}).json()["error_type"] == "Validation"
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "mine"
    assert server.http.get("/v1/models/mine").json() == model
    assert server.http.get("/v1/models/other").status_code == 404
    info = server.http.get("/info").json()
    assert (info["model_id"], info["task"], info["answer"]) == ("mine", "echo", 42)


def test_sagemakers_openai_path_and_the_custom_attribute_name_the_route(shared: Start) -> None:
    server = shared(ROUTED).ready()
    answer = server.http.post("/openai/v1/completions", json={"model": "", "prompt": "x"})
    assert answer.json()["path"] == "/v1/completions"
    assert server.http.get("/openai/v1/models").json() == server.http.get("/v1/models").json()
    named = {"X-Amzn-SageMaker-Custom-Attributes": "trace=1, route=/v1/completions"}
    answer = server.http.post("/invocations", json="x", headers=named)
    assert answer.json() == {"echo": "x", "path": "/v1/completions"}
    refused = server.http.post("/invocations", json="refused", headers=named).json()["error"]
    assert refused["type"] == "invalid_request_error"
    absent = {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/embeddings"}
    answer = server.http.post("/invocations", json="x", headers=absent)
    assert fault(answer) == (404, "not_found")
    assert "Routes: /invocations, /v1/completions" in answer.text
    # What an attribute means to a user's own handlers is theirs to say.
    local = shared().ready()
    assert local.http.post("/invocations", json="x", headers=absent).status_code == 200


def test_an_error_has_the_form_of_its_routes_api_and_the_code_of_its_exception(
    shared: Start,
) -> None:
    server = shared(ROUTED).ready()
    answer = server.http.post("/v1/completions", json="refused")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert (error["param"], error["message"]) == ("prompt", "as asked")
    assert server.invoke("refused").json()["error"].keys() == {"code", "message", "request_id"}


def test_handlers_of_a_users_own_answer_no_clients_routes(shared: Start) -> None:
    server = shared().ready()
    answer = server.http.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 404
    assert "does not answer /v1/chat/completions. Routes: /invocations." in answer.text


SEVERAL = """
import json
def model_fn(model_dir): return model_dir.rsplit("/", 1)[1]
def describe_fn(model_dir, model):
    return {"model": "hidden", "task": "echo", "routes": ["/v1/completions", "/embed"]}
def transform_fn(model, body, content_type, accept, context):
    order = json.loads(body)
    if context.path == "/v1/completions":
        choice = {"text": model, "index": 0, "finish_reason": "stop"}
        answer = {"id": "x", "object": "text_completion", "created": 0, "model": order["model"]}
        return json.dumps({**answer, "choices": [choice]})
    return json.dumps([model, order])
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of two models that answer clients' routes, and of one that does not."""
    folder = tmp_path_factory.mktemp("several")
    with Running(folder, {"SAGEMAKER_MULTI_MODEL": "true"}) as server:
        server.ready()
        for name, code in (("first", SEVERAL), ("b/second", SEVERAL), ("plain", NAMED)):
            url = write_model(folder / "models" / name.rpartition("/")[2], code)
            order = {"model_name": name, "url": url}
            server.http.post("/models", json=order).raise_for_status()
        yield server


def test_openais_model_chooses_one_of_several(several: Running) -> None:
    url = f"http://127.0.0.1:{several.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["b/second", "first", "plain"]
        assert client.models.retrieve("first").id == "first"
        for name, text in (("first", "first"), ("b/second", "second")):
            answer = client.completions.create(model=name, prompt="x")
            assert (answer.choices[0].text, answer.model) == (text, name)
        for name in ("other", "hidden", "First"):
            with pytest.raises(openai.NotFoundError) as caught:
                client.completions.create(model=name, prompt="x")
            error: Any = caught.value.body
            assert error["code"] == "model_not_found"
            assert (error["type"], error["param"]) == ("not_found_error", None)
            assert f"Model {name!r} is not loaded" in error["message"]
        with pytest.raises(openai.NotFoundError, match="does not answer /v1/completions"):
            client.completions.create(model="plain", prompt="x")
        with pytest.raises(openai.NotFoundError, match="There is no model 'x'"):
            client.models.retrieve("x")
        chosen = client.with_options(default_headers={TARGET_MODEL: "first"})
        answer = chosen.completions.create(model="any", prompt="x")
        assert answer.choices[0].text == "first"


@pytest.mark.parametrize("body", [b"{}", b'{"model": ""}', b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_request_that_names_no_model_is_never_answered_by_any_of_several(
    several: Running, body: bytes
) -> None:
    for path in ("/v1/completions", "/embed"):
        refused = several.http.post(path, content=body)
        assert refused.status_code == 400
        assert "Several models are loaded" in refused.text
        assert "b/second, first, plain" in refused.text


def test_teis_routes_and_info_of_several_models(several: Running) -> None:
    to_first = {TARGET_MODEL: "first"}
    answer = several.http.post("/embed", json={"inputs": "x"}, headers=to_first)
    assert answer.json() == ["first", {"inputs": "x"}]
    lost = several.http.post("/embed", json={"inputs": "x"}, headers={TARGET_MODEL: "other"})
    assert (lost.status_code, lost.json()["error_type"]) == (404, "Validation")
    assert several.http.get("/info").status_code == 400
    assert several.http.get("/info?model=other").status_code == 404
    reply = several.http.get("/info", params={"model": "b/second"})
    assert reply.status_code == 200 and (info := reply.json())["max_input_length"] is None
    assert (info["model_id"], info["task"]) == ("b/second", "echo")
    assert several.http.post(info["invocations"], json=5).json() == ["second", 5]
    assert several.http.get("/info", headers=to_first).json()["model_id"] == "first"


def test_the_header_names_the_model_on_every_route(several: Running) -> None:
    for name, expected in (("first", "first"), ("b/second", "second")):
        headers = {TARGET_MODEL: name}
        for path in ("/invocations", "/", "/embed"):
            assert several.http.post(path, json=5, headers=headers).json() == [expected, 5], path
    for path in ("/invocations", "/", "/embed"):
        assert several.http.post(path, json=5).status_code == 400
        assert several.http.post(path, json=5, headers={TARGET_MODEL: "x"}).status_code == 404


@pytest.mark.parametrize(
    "order",
    [
        {"model_name": "", "url": "/tmp"},
        {"model_name": " ", "url": "/tmp"},
        {"model_name": 5, "url": "/tmp"},
        {"model_name": "a", "url": ""},
        {"model_name": "a", "url": "."},
        {"model_name": "a", "url": None},
        {"model_name": "a"},
    ],
)
def test_a_model_without_a_name_or_an_absolute_folder_is_refused(
    several: Running, order: dict[str, Any]
) -> None:
    answer = several.http.post("/models", json=order)
    assert fault(answer) == (400, "bad_request")
    assert len(several.http.get("/models").json()["models"]) == 3


def test_the_only_loaded_model_answers_without_a_name(tmp_path: Path) -> None:
    with Running(tmp_path, {"SAGEMAKER_MULTI_MODEL": "true"}) as server:
        server.ready()
        nothing = server.http.post("/embed", json={"inputs": "x"})
        assert (nothing.status_code, nothing.json()["error_type"]) == (503, "Overloaded")
        assert server.http.get("/v1/models").json()["data"] == []
        url = write_model(tmp_path / "models" / "one", SEVERAL)
        server.http.post("/models", json={"model_name": "one", "url": url}).raise_for_status()
        assert server.http.post("/embed", json=1).json() == ["one", 1]
        assert server.http.get("/info").json()["model_id"] == "one"
        lost = server.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert lost.status_code == 404


@pytest.mark.parametrize("value", ["'text'", "{'tensor': object()}"])
def test_a_description_that_json_does_not_hold_is_refused_at_start(
    tmp_path: Path, value: str
) -> None:
    code = ECHO + f"\n    def describe_fn(model_dir, model):\n        return {value}\n"
    with pytest.raises(TypeError, match=r"describe_fn|JSON serializable"):
        load_runner(write_code(tmp_path, {"code/inference.py": code}))
