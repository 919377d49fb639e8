"""Bodies of clients' APIs: answered as by the same models in Hugging Face's form and as by the
servers that they are written for, or refused with the reason."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient

from amphora.serving.api import exchange
from amphora.serving.api.canonical import ModelTraits
from amphora.serving.protocol import routes
from amphora.serving.protocol.media_types import Fault
from recipe.backend import bounds
from recipe.backend.requests.payloads import BadRequest
from recipe.task_table import SERVED, resolve
from recipe.tasks.sentence_embedding import serve as embedder
from tests.support.serving_kit import TEXTS, Handlers, assert_close, save

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message.role == 'user' %}"
    "{{ message.get('name', '') }} {% endif %}: {{ message['content'] }} . {% endfor %}"
)
TEXT = "the film was good"


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    folder = save("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m", seed=9)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Handlers(folder)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    return Handlers(save("BertModel", tmp_path_factory.mktemp("bert") / "m", seed=4))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    folder = tmp_path_factory.mktemp("ranker") / "m"
    return Handlers(save("BertForSequenceClassification", folder, seed=4, num_labels=1))


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    folder = tmp_path_factory.mktemp("labels") / "m"
    names = {0: "sad", 1: "glad", 2: "neither"}
    return Handlers(save("BertForSequenceClassification", folder, seed=4, id2label=names))


def text_of(writer: Handlers, **parameters: Any) -> str:
    body = {"max_new_tokens": 5, "return_full_text": False, **parameters}
    return str(writer.ask({"inputs": TEXT, "parameters": body})[0]["generated_text"])


@pytest.mark.parametrize("temperature", [0, 1e-38])
def test_temperatures_near_zero_are_greedy(writer: Handlers, temperature: float) -> None:
    greedy = text_of(writer)
    assert text_of(writer, temperature=temperature) == greedy
    body = {"prompt": TEXT, "max_tokens": 5, "temperature": temperature}
    assert writer.post("/v1/completions", body)["choices"][0]["text"] == greedy
    for name in ("/generate", "/invocations"):
        parameters = {"temperature": temperature, "max_new_tokens": 5, "return_full_text": False}
        answer = writer.post(name, {"inputs": TEXT, "parameters": parameters})
        (answer,) = answer if isinstance(answer, list) else [answer]
        assert answer["generated_text"] == greedy


def test_tgis_routes(writer: Handlers) -> None:
    parameters = {
        "max_new_tokens": 5, "details": False, "decoder_input_details": False, "top_n_tokens": 0,
        "grammar": None, "adapter_id": None, "best_of": 1, "watermark": False, "do_sample": False,
        "typical_p": None, "num_beams": 1, "top_k": None,
    }  # fmt: skip
    text = text_of(writer)
    answer = writer.post("/generate", {"inputs": TEXT, "parameters": parameters})
    assert answer["generated_text"] == text
    events = writer.post("/generate_stream", {"inputs": TEXT, "parameters": {"max_new_tokens": 5}})
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5]
    assert events[-1]["generated_text"] == text
    assert events[-1]["details"]["generated_tokens"] == 5


def test_do_sample_of_huggingface_js_is_a_temperature(writer: Handlers) -> None:
    body = {"prompt": TEXT, "max_tokens": 5}
    greedy = writer.post("/v1/completions", {**body, "temperature": 0})["choices"]
    for more in ({"do_sample": False}, {"do_sample": False, "temperature": 2}):
        assert writer.post("/v1/completions", {**body, **more})["choices"] == greedy
    drawn = {**body, "seed": 4, "temperature": 2}
    expected = writer.post("/v1/completions", drawn)["choices"]
    assert writer.post("/v1/completions", {**drawn, "do_sample": True})["choices"] == expected


def test_prompts_may_be_token_ids(writer: Handlers) -> None:
    loaded = writer.model.loaded  # type: ignore[attr-defined]
    ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    body = {"max_tokens": 5, "temperature": 0}
    expected = writer.post("/v1/completions", {**body, "prompt": TEXTS})
    answer = writer.post("/v1/completions", {**body, "prompt": ids})
    assert [entry["text"] for entry in answer["choices"]] == [
        entry["text"] for entry in expected["choices"]
    ]
    assert answer["usage"] == expected["usage"]
    one = writer.post("/v1/completions", {**body, "prompt": ids[0]})
    assert one["choices"][0]["text"] == expected["choices"][0]["text"]


def test_keys_that_ask_for_nothing_change_nothing(writer: Handlers) -> None:
    """Tools that are not to be called, and other servers' keys with their defaults."""
    body: dict[str, Any] = {**CHAT, "max_tokens": 3, "temperature": 0}
    expected = writer.post("/v1/chat/completions", body)["choices"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for idle in (
        {"tools": [tool], "tool_choice": "none"},
        {"best_of": 1, "modalities": ["text"], "use_beam_search": False, "min_p": 0, "seed": None},
    ):
        assert writer.post("/v1/chat/completions", {**body, **idle})["choices"] == expected, idle


def test_what_openais_clients_send_is_taken(writer: Handlers) -> None:
    chat = {"messages": [{"role": "system", "content": "good"}], "max_tokens": 4, "temperature": 0}
    (expected,) = writer.post("/v1/chat/completions", chat)["choices"]
    named = [{**chat["messages"][0], "name": "paris"}]  # type: ignore[index]
    for more in ({"messages": named}, {"reasoning_effort": "low"}, {"min_p": 0.1}):
        assert writer.post("/v1/chat/completions", {**chat, **more})["choices"] == [expected]
    parameters = {"max_new_tokens": 2, "stream": True}
    answer = writer.post("/generate", {"inputs": TEXT, "stream": True, "parameters": parameters})
    assert list(answer) == ["generated_text"]


def test_a_model_of_texts_proposes_texts(labels: Handlers, vectors: Handlers) -> None:
    for body, words in (({"a": 1}, r'\["a text", "another"\]}\.$'), (b"{", r'"another"\]}\.$')):
        with pytest.raises(BadRequest, match=words):
            labels.ask(body)


def test_an_object_is_answered_and_truncated_as_by_the_pipeline(labels: Handlers) -> None:
    body = {"inputs": TEXT, "parameters": {"truncation": "only_first"}}
    assert labels.post("/invocations", body) == labels.post("/invocations", {"inputs": TEXT})
    with pytest.raises(BadRequest, match="of a pair the longer"):
        labels.post("/invocations", {**body, "inputs": [["a", "b"]]})
    (alone,) = labels.post("/invocations", {"inputs": TEXT})
    assert labels.post("/invocations", {"inputs": {"text": TEXT}}) == alone
    best = labels.post("/invocations", {"inputs": {"text": TEXT}, "parameters": {"top_k": 1}})
    assert best == [alone]


@pytest.mark.parametrize(
    ("body", "count"),
    [({}, 1), ({"top_k": 2}, 2), ({"top_k": 1}, 1), ({"top_k": 2, "function_to_apply": "none"}, 2)],
)
def test_huggingface_client_gets_the_labels_of_a_text(
    labels: Handlers, body: dict[str, Any], count: int
) -> None:
    """It returns the first entry of the answer; other clients get what the pipeline returns."""
    client: Any = InferenceClient("http://localhost")

    def post(sent: Any) -> bytes:
        (answer,) = labels.ask_all([sent.json], path="/", headers=sent.headers)
        return json.dumps(answer).encode()

    client._inner_post = post
    scores = client.text_classification(TEXT, **body)
    expected = labels.ask({"inputs": TEXT, "parameters": body})
    assert [{"label": score.label, "score": score.score} for score in scores] == expected
    assert len(expected) == count


def test_lines_of_different_parameters_are_answered_by_their_own(labels: Handlers) -> None:
    lines = [{"inputs": TEXT, "top_k": 2}, {"inputs": 5, "top_k": 2}, {"inputs": TEXT}]

    def ask(*some: Any) -> Any:
        body = "\n".join(map(json.dumps, some)).encode()
        return labels.ask((body, "application/jsonlines"))

    answer, fault, alone, other = ask(*lines, {"inputs": TEXT, "id": 7})
    assert len(answer) == 2 and alone == answer[0]
    assert "not a text" in fault["error"]["message"]
    assert "'id' is not one of" in other["error"]["message"]
    assert "If 'id' is your own, keep it" in other["error"]["message"]
    assert labels.headers["X-Amphora-Failed"] == "1,3"


def test_vectors_of_every_api_are_the_models(vectors: Any) -> None:
    whole = np.array(vectors.ask({"inputs": TEXTS}))
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    body = {"input": TEXTS, "model": "any"}
    answer = vectors.post("/v1/embeddings", body)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    units = np.array([entry["embedding"] for entry in answer["data"]])
    assert np.allclose(units, expected, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 3 * 3
    packed = vectors.ask({**body, "encoding_format": "base64"})["data"][1]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), units[1].astype("<f4"))
    assert np.allclose(vectors.post("/embed", {"inputs": TEXTS}), expected, atol=1e-6)
    plain = vectors.post("/embed", {"inputs": TEXTS, "normalize": False})
    assert np.allclose(plain, whole, atol=1e-6)
    assert len(vectors.ask({**body, "dimensions": 32})["data"]) == 4
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    scores = vectors.ask({"inputs": inputs})
    first, *_ = units = np.array(vectors.post("/embed", {"inputs": TEXTS}))
    assert np.allclose(scores, units @ first, atol=1e-5)


def test_predictions_have_teis_shape(labels: Any) -> None:
    def scores(path: str, inputs: Any, **more: Any) -> Any:
        answer = labels.post(path, {"inputs": inputs, **more})
        answers = answer if isinstance(answer[0], list) else [answer]
        return [{entry["label"]: entry["score"] for entry in entries} for entries in answers]

    (alone,) = scores("/invocations", TEXTS[:1], top_k=None)
    (pair,) = scores("/invocations", [TEXTS[:2]], top_k=None)
    assert pair != pytest.approx(alone, abs=1e-3)
    assert scores("/predict", TEXTS[0])[0] == pytest.approx(alone, abs=1e-5)
    # A list of two texts is a pair; several sequences are lists of their own.
    assert scores("/predict", TEXTS[:2])[0] == pytest.approx(pair, abs=1e-5)
    both = scores("/predict", [TEXTS[:2], TEXTS[:1]])
    assert both == [pytest.approx(pair, abs=1e-5), pytest.approx(alone, abs=1e-5)]
    (raw,) = scores("/predict", TEXTS[0], raw_scores=True)
    odds = {label: np.exp(score) for label, score in raw.items()}
    shares = {label: value / sum(odds.values()) for label, value in odds.items()}
    assert shares == pytest.approx(alone, abs=1e-5)


def test_texts_whose_scores_are_all_1_are_ranked_by_their_logits(
    ranker: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ranker.model.loaded.model.classifier  # type: ignore[attr-defined]
    monkeypatch.setitem(head._parameters, "bias", torch.tensor([40.0]))
    body = {"query": "who", "texts": TEXTS}
    answer, raw = (ranker.post("/rerank", {**body, "raw_scores": raw}) for raw in (False, True))
    assert {entry["score"] for entry in answer} == {1.0}
    order = [entry["index"] for entry in answer]
    assert order == [entry["index"] for entry in raw] != sorted(order)


def test_a_ranking_is_that_of_the_pairs_in_teis_and_jinas_form(ranker: Handlers) -> None:
    body = {"query": "who", "texts": TEXTS}
    pairs = ranker.ask({"inputs": [["who", text] for text in TEXTS]})
    order = sorted(range(4), key=lambda index: -pairs[index]["score"])
    answer = ranker.post("/rerank", {**body, "return_text": True})
    assert [item["index"] for item in answer] == order
    for entry in answer:
        assert entry["text"] == TEXTS[entry["index"]]
        assert entry["score"] == pytest.approx(pairs[entry["index"]]["score"], abs=1e-6)
    raw = ranker.post("/rerank", {**body, "raw_scores": True})
    assert 1 / (1 + np.exp(-raw[0]["score"])) == pytest.approx(answer[0]["score"], abs=1e-5)
    plain = ranker.post("/rerank", {"query": "who", "texts": TEXTS})
    assert_close(ranker.post("/rerank", {**body, "top_n": 2}), plain[:2])  # LiteLLM's, of TEI
    logits = ranker.post("/rerank", {"query": "who", "documents": TEXTS, "raw_scores": True})
    assert logits["results"][0]["relevance_score"] == pytest.approx(raw[0]["score"], abs=1e-5)
    for path in ("/v1/rerank", "/v2/rerank", "/invocations"):
        answer = ranker.post(path, {"model": "m", "query": "who", "documents": TEXTS, "top_n": 2})
        assert [result["index"] for result in answer["results"]] == [
            item["index"] for item in plain[:2]
        ]
        for entry, expected in zip(answer["results"], plain, strict=False):
            assert entry["relevance_score"] == pytest.approx(expected["score"], abs=1e-5)
            assert entry["document"] == {"text": TEXTS[expected["index"]]}
        assert answer["usage"]["total_tokens"] > 0


def test_a_line_may_be_what_the_model_takes_as_json(
    writer: Handlers, ranker: Handlers, vectors: Handlers
) -> None:
    """Each as if it were sent alone."""
    chat = {**CHAT, "max_tokens": 3, "temperature": 0}
    prompt = {"prompt": "who", "max_tokens": 3, "temperature": 0}
    pairs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    rank = {"query": "who", "texts": TEXTS}
    cases: list[tuple[Handlers, list[Any]]] = [
        (writer, [chat, prompt, {"inputs": TEXT, "max_new_tokens": 2}]),
        (ranker, [rank, {**rank, "return_text": True}, {"query": "who", "documents": TEXTS}]),
        (vectors, [pairs, {"inputs": pairs}, {"input": TEXTS, "model": "m"}]),
    ]
    for served, bodies in cases:
        lines = "\n".join(map(json.dumps, [*bodies, {"inputs": 5}])).encode()
        *answers, fault = served.ask((lines, "application/jsonlines"))
        assert "error" in fault
        for answer, body in zip(answers, bodies, strict=True):
            assert_close(strip_ids(answer), strip_ids(served.ask(body)))


def strip_ids(answer: Any) -> Any:
    if not isinstance(answer, dict):
        return answer
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def test_the_costs_of_a_bodys_lines_add_up(
    writer: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds.Bound.WRITTEN, "most", 10)
    counts = (40, 4, 4, 4)
    lines = [{"inputs": TEXT, "max_new_tokens": count, "seed": 1} for count in counts]
    body = "\n".join(map(json.dumps, lines)).encode()
    alone, *answers, refused = writer.ask((body, "application/jsonlines"))
    assert alone["error"]["code"] == "too_costly"
    assert [list(answer[0]) for answer in answers] == [["generated_text"]] * 2
    assert refused["error"]["code"] == "too_costly" and "12 tokens" in refused["error"]["message"]


def test_rankings_have_the_bodies_of_other_servers_at_every_route(ranker: Handlers) -> None:
    expected = ranker.post("/v1/rerank", {"query": "who", "documents": TEXTS})["results"]
    body = {"model": "m", "query": "who", "documents": [{"text": text} for text in TEXTS]}
    for path in ("/rerank", "/v2/rerank", "/invocations"):
        assert_close(ranker.post(path, body)["results"], expected)
    nested = ranker.ask({"inputs": {"query": "who", "documents": TEXTS}})
    assert_close(nested, ranker.ask({"inputs": {"query": "who", "texts": TEXTS}}))


def test_the_body_decides_only_where_it_is_plain() -> None:
    traits = ModelTraits(texts=["inputs", "input"])

    def route(body: dict[str, Any]) -> str:
        return exchange.route_of(body, traits)

    assert route({"input": "a", "model": "m"}) == "/v1/embeddings"
    assert route({"prompt": "a"}) == "/v1/completions"
    assert route({"inputs": "a", "parameters": {"prompt": "b"}}) == ""
    assert route({"input": "a"}) == ""
    with pytest.raises(Fault, match="different APIs"):
        route({"prompt": "a", "messages": []})
    with pytest.raises(Fault, match="text/csv"):
        exchange.read("/embed", b"a", "text/csv", traits)
    with pytest.raises(Fault, match="not valid JSON"):
        exchange.read("/invocations", b'{"messages": NaN}', "application/json", traits)


def test_each_task_shows_the_form_of_its_spec_and_names_routes_that_the_server_has() -> None:
    for name, served in SERVED.items():
        assert {*served.routes} <= {*routes.CLIENTS}, name
        load = resolve(served.load)
        task = getattr(load, "__self__", embedder.TokenFeatures)
        if name != "sentence-similarity":
            assert task.served.form == served.form, name


def test_a_description_says_the_task_the_form_and_the_routes(
    vectors: Any, labels: Any, ranker: Any, tmp_path: Path
) -> None:
    described = labels.model.describe()
    assert (described["form"], described["routes"]) == ("pair", ["/predict"])
    assert described["architecture"] == "BertForSequenceClassification"
    assert (described["max_length"], described["padding"]) == (48, False)
    padded: Any = Handlers(save("GPT2ForSequenceClassification", tmp_path)).model
    assert "padding" not in padded.describe()
    for served, form, route in (
        (ranker, "rank", "/rerank"),
        (vectors, "similarity", "/v1/embeddings"),
    ):
        described = served.model.describe()
        assert described["form"] == form and route in described["routes"]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "who"}]}


@pytest.mark.parametrize(("name", "path", "body", "words", "param"), [
    ("writer", "/generate", {"inputs": [TEXT]}, "Send", "inputs"),
    ("writer", "/generate", {"inputs": TEXT, "parameters": {"grammar": {}}}, "Only vLLM supports grammar", "grammar"),
    ("writer", "/generate", {"inputs": TEXT, "parameters": {"watermark": True}}, "watermark", "watermark"),
    ("writer", "/generate", {"inputs": TEXT, "parameters": {"max_new_tokens": 0}}, "max_new_tokens is 0: give a whole number from 1", "max_new_tokens"),
    ("writer", "/v1/completions", {"prompt": "a", "logit_bias": {"9": 1}}, "logit_bias", "logit_bias"),
    ("writer", "/v1/completions", {"prompt": "a", "n": 2, "stream": True}, "Only one text", None),
    ("writer", "/v1/completions", {"prompt": ["a", "b"], "stream": True}, "Only one text", None),
    ("writer", "/v1/completions", {"prompt": "a", "n": 2, "temperature": 0}, "without sampling", None),
    ("writer", "/v1/completions", {"prompt": "a", "repetition_penalty": 1e-40}, "0.001", "repetition_penalty"),
    ("writer", "/v1/completions", {"prompt": [1, 90000]}, "90000", None),
    ("writer", "/v1/completions", {"prompt": [1, -1]}, "token ids", "prompt"),
    ("writer", "/v1/completions", {"prompt": "a", "echo": True, "stream": True}, "only vLLM streams with it", "echo"),
    ("writer", "/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
    ("writer", "/v1/completions", {"prompt": "a", "best_of": 3}, "best_of", "best_of"),
    ("writer", "/v1/chat/completions", {**CHAT, "min_p": 2}, "min_p is 2", "min_p"),
    ("writer", "/v1/chat/completions", {**CHAT, "temperature": -1}, "temperature is -1: give a number from 0 to 2", "temperature"),
    ("writer", "/v1/chat/completions", {**CHAT, "logprobs": True}, "logprobs is true, which only vLLM supports: leave it out", "logprobs"),
    ("writer", "/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream: true", "stream_options"),
    ("writer", "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}}, "obfuscation", "stream_options"),
    ("writer", "/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tool_choice", "tools"),
    ("writer", "/v1/chat/completions", {"messages": [{"role": "x"}]}, "roles are", "messages[0]"),
    ("writer", "/embed", {"inputs": "a"}, "answers /v1/chat/completions", None),
    ("vectors", "/embed", {"inputs": "a", "dimensions": 64}, "64 dimensions", "dimensions"),
    ("vectors", "/embed", {"inputs": "a", "dimensions": 0}, "dimensions is 0", "dimensions"),
    ("vectors", "/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions is 0", "dimensions"),
    ("vectors", "/embed", {"inputs": "a", "truncation_direction": "up"}, "Left", "truncation_direction"),
    ("vectors", "/embed", {"inputs": [[1, 5, 7]]}, "a list of texts", "inputs"),
    ("vectors", "/v1/embeddings", {"input": [[1, 5]]}, "check_embedding_ctx_length=False", "input"),
    ("vectors", "/v1/embeddings", {"input": ["a", ""]}, "empty", "input"),
    ("vectors", "/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "base64", "encoding_format"),
    ("vectors", "/embed", {"inputs": "a", "pooling": "cls", "normalize": 1}, "'pooling' is not supported", "pooling"),
    ("vectors", "/embed", {"inputs": ["good " * 90], "truncate": False}, "longer than the 48", None),
    ("vectors", "/invocations", CHAT, "/v1/chat/completions", None),
    ("writer", "/v1/completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens is 9", None),
    ("ranker", "/v1/rerank", {"query": "a", "texts": ["b"]}, "documents is missing", "texts"),
    ("ranker", "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n"),
    ("labels", "/predict", {"inputs": "a", "truncate": 1}, "truncate is 1", "truncate"),
])  # fmt: skip
def test_what_is_not_honoured_is_refused_with_its_key(
    request: pytest.FixtureRequest, name: str, path: str, body: Any, words: str, param: str | None
) -> None:
    served: Handlers = request.getfixturevalue(name)
    with pytest.raises(BadRequest, match=words) as caught:
        served.post(path, body)
    assert caught.value.param == param
    assert "_fn" not in str(caught.value)
