"""The routes of other servers' APIs: which are there is the handlers' to say."""

from pathlib import Path

import pytest

from tests.support.servers import ECHO, Start, fault
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


@pytest.mark.parametrize("value", ["'text'", "{'tensor': object()}"])
def test_a_description_that_json_does_not_hold_is_refused_at_start(
    tmp_path: Path, value: str
) -> None:
    code = ECHO + f"\n    def describe_fn(model_dir, model):\n        return {value}\n"
    with pytest.raises(TypeError, match=r"describe_fn|JSON serializable"):
        load_runner(write_code(tmp_path, {"code/inference.py": code}))
