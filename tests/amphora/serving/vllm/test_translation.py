"""What vLLM receives for Hugging Face's and TGI's bodies, and what its answers become."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.recording_vllm import install
from tests.support.servers import Running
from tests.support.until import until

CHAT: Any = [{"role": "user", "content": "hello"}]
USUAL = {"route": "/v1/completions", "model": "model", "prompt": ["x"], "max_tokens": 64,
         "temperature": 0.0}  # fmt: skip
SCHEMA = {"type": "object"}
WHOLE = "one two"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The real front, with a recording server in vLLM's place."""
    base = tmp_path_factory.mktemp("vllm")
    for folder in ("model", "model/adapters/fr"):
        (base / folder).mkdir(parents=True)
    (base / "model/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (base / "model/adapters/fr/adapter_config.json").write_text('{"r": 8}')
    (base / "model/tokenizer.json").write_text("{}")
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


def test_a_conversation_is_a_chat_and_its_last_assistant_turn_goes_on(server: Running) -> None:
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
    for path in (route, "/openai" + route, "/invocations"):
        _post(server, body, path)
        assert _recorded(server) == [{"route": route, "model": "model", **body}]
    _post(server, body, **{"x-amzn-sagemaker-custom-attributes": f"route={route}"})
    assert _recorded(server) == [{"route": route, "model": "model", **body}]
    _post(server, body, **{"x-amzn-sagemaker-adapter-identifier": "fr"})
    assert _recorded(server) == [{"route": route, **body, "model": "fr"}]


def test_keys_that_change_nothing_are_left_out(server: Running) -> None:
    idle = {"best_of": 1, "modalities": ["text"], "audio": None, "suffix": None}
    _post(server, {"prompt": "x", **idle}, "/v1/completions")
    expected = {"route": "/v1/completions", "model": "model", "prompt": "x"}
    assert _recorded(server) == [expected]


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


def test_lines_are_answered_in_their_places(server: Running) -> None:
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


def test_lines_have_one_bound_on_their_cost(server: Running) -> None:
    """Those beyond it are refused, one by one."""
    line = json.dumps({"inputs": "x", "max_new_tokens": 400})
    headers = {"content-type": "application/jsonlines", "accept": "application/jsonlines"}
    reply = server.http.post("/invocations", content="\n".join([line] * 3), headers=headers)
    *answers, refused = map(json.loads, reply.text.splitlines())
    assert answers == [[{"generated_text": "x" + WHOLE}]] * 2
    assert "those before it ask for 1,200 tokens" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"inputs": "x", "max_new_tokens": True}, 400, "max_new_tokens is True"),
        ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1001}, 413, "1,001 tokens"),
        ({"prompt": "x", "max_tokens": "501", "n": "2"}, 413, "1,002 tokens"),
        ({"prompt": "x", "best_of": 2}, 400, "'best_of' is not a key"),
        ({"inputs": "refused", "max_new_tokens": 64}, 400, "max_new_tokens is 64"),
        ({"prompt": "refused"}, 400, "max_tokens is 64"),
        ({"inputs": "x", "num_beams": 4}, 400, "'num_beams' is not supported"),
        ({"inputs": "x", "unknown": 1}, 400, "'unknown' is not supported"),
        ({"inputs": "x", "do_sample": "yes"}, 400, "do_sample is 'yes'"),
        ({"inputs": "x", "stop": "a", "stop_sequences": ["a"]}, 400, "mean the same"),
        ({"inputs": "x", "temperature": 0, "do_sample": True}, 400, "temperature is 0"),
        ({"inputs": "x", "grammar": {"type": "ebnf"}}, 400, "grammar is"),
        ({"inputs": ["x"], "stream": True}, 400, "Only one text"),
        ({"inputs": "x", "n": 1, "stream": True}, 400, "'n' is not supported"),
        ({"inputs": [CHAT, CHAT]}, 400, "one in each line"),
        ({"inputs": []}, 400, "inputs must be"),
        ({"inputs": "x", "parameters": 3}, 400, "parameters is not an object"),
        ({"messages": CHAT, "prompt": "x"}, 400, "one of messages, prompt, input"),
        ({"prompt": ["x"] * 3, "n": 20, "max_tokens": 20}, 413, "1,200 tokens"),
        ({"messages": CHAT, "n": 8}, 413, "8 texts x 128 new tokens"),
        ({"prompt": ["x"] * 8, "n": 8}, 413, "8 texts x 16 new tokens"),
        ({"messages": CHAT, "max_completion_tokens": 2000}, 413, "AMPHORA_MAX_TOKENS_WRITTEN"),
        ({"prompt": "x", "guided_json": SCHEMA}, 400, "'guided_json' is not a key of vLLM's"),
        ({"prompt": "x", "max_new_tokens": 3}, 400, "'max_new_tokens' is not a key"),
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


@pytest.mark.parametrize(
    ("kind", "status"), [("text/csv", 415), ("text/plain", 415), ("application/json", 400)]
)
def test_bodies_that_are_not_json_are_refused(server: Running, kind: str, status: int) -> None:
    reply = server.http.post("/invocations", content=b"x,y", headers={"content-type": kind})
    assert reply.status_code == status, reply.text


@pytest.mark.parametrize("name", ["prompt", "inputs"])
def test_a_stream_that_begins_with_an_error_is_one(server: Running, name: str) -> None:
    reply = server.http.post("/invocations", json={name: "broken at once", "stream": True})
    assert reply.status_code == 500
    assert "the engine has failed" in reply.text


def test_a_stream_that_begins_with_an_error_in_halves_is_one(server: Running) -> None:
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


@pytest.mark.parametrize("name", ["prompt", "inputs"])
def test_a_stream_that_breaks_is_not_ended_as_if_it_were_whole(server: Running, name: str) -> None:
    """vLLM writes its error into the stream, and ends it."""
    try:
        reply = server.http.post("/invocations", json={name: "broken", "stream": True})
    except httpx.RemoteProtocolError:
        return
    # The error came together with the first token, so that no status had been sent.
    assert reply.status_code == 500


def test_an_error_that_arrives_in_halves_breaks_the_stream(server: Running) -> None:
    body = {"prompt": "broken halves", "stream": True}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        server.http.stream("POST", "/v1/completions", json=body) as reply,
    ):
        for data in reply.iter_raw():
            if data.endswith(b'data: {"err'):
                (server.log_path.parent / "recorded.read").touch()


def test_a_server_whose_engine_is_dead_is_not_ready(server: Running) -> None:
    """Though it answers for half a minute more. The last test, since it stays so."""
    server.log_path.with_name("recorded.dead").touch()
    until(lambda: server.ping() == 503)
