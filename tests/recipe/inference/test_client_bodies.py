"""Bodies of other servers' clients: answered as by those servers, or refused with the reason."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.backend.requests.payloads import BadRequest
from tests.support.serving_kit import TEXTS, Handlers, save

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message.role == 'user' %}"
    "{{ message.get('name', '') }} {% endif %}: {{ message['content'] }} . {% endfor %}"
)
TEXT = "the film was good"


class Served(Handlers):
    """The image's handlers, by a path."""

    def __call__(self, path: str, body: Any, kind: str = "application/json") -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        context = SimpleNamespace(path=path, headers={}, set_response_header=lambda *_: None)
        request = self._functions.input_fn(data, kind, context)
        self._functions.tokens_fn(request, self.model)
        answer = self._functions.predict_fn(request, self.model)
        written, self.type = self._functions.output_fn(answer, "application/json", context)
        if not isinstance(written, bytes):
            lines = b"".join(written).decode().split("\n\n")[:-1]
            return [json.loads(line.removeprefix("data: ")) for line in lines]
        return json.loads(written)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = save("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m", seed=9)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Served(folder)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(save("BertModel", tmp_path_factory.mktemp("bert") / "m", seed=4))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("ranker") / "m"
    return Served(save("BertForSequenceClassification", folder, seed=4, num_labels=1))


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("labels") / "m"
    names = {0: "sad", 1: "glad", 2: "neither"}
    return Served(save("BertForSequenceClassification", folder, seed=4, id2label=names))


def text_of(writer: Served, **parameters: Any) -> str:
    body = {"max_new_tokens": 5, "return_full_text": False, **parameters}
    written: str = writer("/invocations", {"inputs": TEXT, "parameters": body})[0]["generated_text"]
    return written


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-38, 1e-6])
def test_temperatures_near_zero_are_greedy(writer: Served, temperature: float) -> None:
    greedy = text_of(writer)
    assert text_of(writer, temperature=temperature) == greedy
    body = {"prompt": TEXT, "max_tokens": 5, "temperature": temperature}
    assert writer("/v1/completions", body)["choices"][0]["text"] == greedy
    for name in ("/generate", "/invocations"):
        parameters = {"temperature": temperature, "max_new_tokens": 5, "return_full_text": False}
        answer = writer(name, {"inputs": TEXT, "parameters": parameters})
        (answer,) = answer if isinstance(answer, list) else [answer]
        assert answer["generated_text"] == greedy


def test_tgis_routes(writer: Served) -> None:
    parameters = {
        "max_new_tokens": 5, "details": True, "decoder_input_details": False, "top_n_tokens": 0,
        "grammar": None, "adapter_id": None, "best_of": 1, "watermark": False, "do_sample": False,
    }  # fmt: skip
    text = text_of(writer)
    answer = writer("/generate", {"inputs": TEXT, "parameters": parameters})
    assert answer["generated_text"] == text
    details = answer["details"]
    assert details["generated_tokens"] == len(details["tokens"]) == 5
    events = writer("/generate_stream", {"inputs": TEXT, "parameters": {"max_new_tokens": 5}})
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5]
    assert events[-1]["generated_text"] == text


def test_prompts_may_be_token_ids(writer: Served) -> None:
    loaded = writer.model.loaded  # type: ignore[attr-defined]
    ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    body = {"max_tokens": 5, "temperature": 0}
    expected = writer("/v1/completions", {**body, "prompt": TEXTS})
    answer = writer("/v1/completions", {**body, "prompt": ids})
    assert [entry["text"] for entry in answer["choices"]] == [
        entry["text"] for entry in expected["choices"]
    ]
    assert answer["usage"] == expected["usage"]
    one = writer("/v1/completions", {**body, "prompt": ids[0]})
    assert one["choices"][0]["text"] == expected["choices"][0]["text"]


def test_tools_that_are_not_to_be_called_are_no_error(writer: Served) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "who"}], "max_tokens": 3,
                            "temperature": 0}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    answered = writer("/v1/chat/completions", {**body, "tools": tools, "tool_choice": "none"})
    assert answered["choices"] == writer("/v1/chat/completions", body)["choices"]


def test_a_name_is_read_or_refused(writer: Served) -> None:
    user = {"role": "user", "content": "who", "name": "anna"}
    writer("/v1/chat/completions", {"messages": [user], "max_tokens": 2})
    system = {"role": "system", "content": "good", "name": "paris"}
    with pytest.raises(BadRequest, match=r"ignores the name of messages\[0\]"):
        writer("/v1/chat/completions", {"messages": [system, user], "max_tokens": 2})


def test_rerank_with_documents_is_vllms_and_jinas(ranker: Served) -> None:
    plain = ranker("/rerank", {"query": "who", "texts": TEXTS})
    for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/invocations"):
        documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
        answer = ranker(path, {"model": "m", "query": "who", "documents": documents, "top_n": 2})
        assert [result["index"] for result in answer["results"]] == [
            item["index"] for item in plain[:2]
        ]
        for entry, expected in zip(answer["results"], plain, strict=False):
            assert entry["relevance_score"] == pytest.approx(expected["score"], abs=1e-5)
            assert entry["document"] == {"text": TEXTS[expected["index"]]}
        assert answer["usage"]["total_tokens"] > 0


def test_keys_of_other_servers_with_their_defaults_change_nothing(writer: Served) -> None:
    body: dict[str, Any] = {**CHAT, "max_tokens": 3, "temperature": 0}
    idle = {
        "best_of": 1,
        "modalities": ["text"],
        "use_beam_search": False,
        "min_p": 0,
        "seed": None,
    }
    answer = writer("/v1/chat/completions", {**body, **idle})
    assert answer["choices"] == writer("/v1/chat/completions", body)["choices"]


def test_the_tokens_of_texts_are_listed_as_by_tei(labels: Served) -> None:
    ((first, second, *_, last),) = labels("/tokenize", {"inputs": "good film"})
    assert (first["text"], first["special"], first["start"]) == ("[CLS]", True, None)
    assert (second["text"], second["special"], second["start"], second["stop"]) == (
        "good",
        False,
        0,
        4,
    )
    assert last["special"]
    plain = labels("/tokenize", {"inputs": ["good", "film"], "add_special_tokens": False})
    assert [[entry["text"] for entry in tokens] for tokens in plain] == [["good"], ["film"]]
    assert plain[0][0]["id"] == second["id"]


def test_truncation_of_the_first_text_is_for_single_texts(labels: Served) -> None:
    body = {"inputs": TEXT, "parameters": {"truncation": "only_first"}}
    assert labels("/invocations", body) == labels("/invocations", {"inputs": TEXT})
    with pytest.raises(BadRequest, match="of a pair the longer"):
        labels("/invocations", {**body, "inputs": [["a", "b"]]})


def test_an_object_is_answered_as_the_pipeline_answers_it(labels: Served) -> None:
    (alone,) = labels("/invocations", {"inputs": TEXT})
    assert labels("/invocations", {"inputs": {"text": TEXT}}) == alone
    best = labels("/invocations", {"inputs": {"text": TEXT}, "parameters": {"top_k": 1}})
    assert best == [alone]


def test_a_text_of_predict_is_cut_where_the_request_says(labels: Served) -> None:
    words = ["anna"] * 40 + ["film"] * 40
    right, left = (
        labels("/predict", {"inputs": " ".join(words), "truncate": True, **side})
        for side in ({}, {"truncation_direction": "Left"})
    )
    ends = [labels("/predict", {"inputs": " ".join(part)}) for part in (words[:46], words[-46:])]
    for answer, expected in zip((right, left), ends, strict=True):
        scores = [[entry["score"] for entry in one] for one in (answer, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert right != left


def test_lines_of_different_parameters_are_refused(labels: Served) -> None:
    lines = [{"inputs": TEXT, "top_k": 2}, {"inputs": 5, "top_k": 2}, {"inputs": TEXT}]

    def ask(*some: Any) -> Any:
        body = "\n\n".join(map(json.dumps, some)).encode()
        return labels("/invocations", body, "application/jsonlines")

    with pytest.raises(BadRequest, match=r"Lines 1 and 5 have different parameters.*SingleRecord"):
        ask(*lines)
    answer, fault = ask(*lines[:2])
    assert len(answer) == 2
    assert "not a text" in fault["error"]["message"]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "who"}]}
REFUSED = [
    ("writer", "/generate", {"inputs": [TEXT]}, "Send", "inputs"),
    ("writer", "/generate", {"inputs": TEXT, "parameters": {"stream": True}}, "stream", "stream"),
    ("writer", "/generate", {"inputs": TEXT, "parameters": {"grammar": {}}}, "grammar", None),
    ("writer", "/generate", {"inputs": TEXT, "parameters": {"repetition_penalty": 1e-40}}, "0.001", None),
    ("writer", "/generate", {"inputs": TEXT, "parameters": {"watermark": True}}, "watermark", None),
    ("writer", "/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, "99999", None),
    ("writer", "/v1/completions", {"prompt": "a", "repetition_penalty": 1e-40}, "0.001", "repetition_penalty"),
    ("writer", "/v1/completions", {"prompt": [1, 90000]}, "90000", None),
    ("writer", "/v1/completions", {"prompt": [1, -1]}, "token ids", "prompt"),
    ("writer", "/v1/completions", {"prompt": [[]]}, "token ids", "prompt"),
    ("writer", "/v1/completions", {"prompt": [1, 2], "echo": True}, "echo", "echo"),
    ("writer", "/v1/completions", {"model": "m"}, "prompt is not there", "prompt"),
    ("writer", "/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
    ("writer", "/v1/completions", {"prompt": "a", "best_of": 3}, "best_of", None),
    ("writer", "/v1/chat/completions", {**CHAT, "best_of": 2}, "best_of is 2: give 1", "best_of"),
    ("writer", "/v1/chat/completions", {**CHAT, "min_p": 0.5}, "min_p is 0.5: give 0", "min_p"),
    ("labels", "/tokenize", {"inputs": 1}, "inputs is 1", "inputs"),
    ("writer", "/v1/completions", {"prompt": "a", "logprobs": 1}, "logprobs is 1", "logprobs"),
    ("writer", "/v1/completions", {"prompt": "a", "max_completion_tokens": 3}, "max_completion", "max_completion_tokens"),
    ("writer", "/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream: true", "stream_options"),
    ("writer", "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}}, "obfuscation", "stream_options"),
    ("writer", "/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tool_choice", "tools"),
    ("writer", "/v1/chat/completions", {**CHAT, "temperature": 3}, "temperature", "temperature"),
    ("writer", "/v1/chat/completions", {"messages": [{"role": "x"}]}, "roles are", "messages[0]"),
    ("writer", "/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "not supported", "top_logprobs"),
    ("writer", "/embed", {"inputs": "a"}, "answers /v1/chat/completions", None),
    ("vectors", "/embed_sparse", {"inputs": "a"}, "answers /v1/embeddings", None),
    ("vectors", "/embed", {"inputs": "a", "dimensions": 64}, "64 dimensions", "dimensions"),
    ("vectors", "/embed", {"inputs": "a", "dimensions": 0}, "from 1", "dimensions"),
    ("vectors", "/embed", {"inputs": "a", "truncation_direction": "up"}, "Left", "truncation_direction"),
    ("vectors", "/embed", {"inputs": [[1, 5, 7]]}, "not the output of the model's tokenizer", None),
    ("vectors", "/v1/embeddings", {"input": "a", "dimensions": 99}, "99 dimensions", "dimensions"),
    ("vectors", "/v1/embeddings", {"input": ["a", ""]}, "empty", "input"),
    ("vectors", "/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "base64", "encoding_format"),
    ("vectors", "/v1/embeddings", ["a"], "not an object", None),
    ("vectors", "/embed", {"inputs": "a", "pooling": "cls", "normalize": 1}, "normalize is 1", "pooling"),
    ("vectors", "/embed", {"inputs": ["good " * 90], "truncate": False}, "longer than the 48", None),
    ("vectors", "/similarity", {"inputs": {"sentences": ["a"]}}, "source_sentence", "inputs"),
    ("vectors", "/invocations", CHAT, "/v1/chat/completions", None),
    ("writer", "/v1/completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens is 9", None),
    ("ranker", "/v1/rerank", {"query": "a", "documents": []}, "documents", "documents"),
    ("ranker", "/v1/rerank", {"query": "a", "texts": ["b"]}, "documents is not there", "texts"),
    ("ranker", "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n"),
    ("labels", "/v1/rerank", {"query": "a", "documents": ["b"]}, "answers /predict", None),
    ("labels", "/predict", {"inputs": "a", "truncate": 1}, "truncate is 1", "truncate"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "body", "words", "param"), REFUSED)
def test_what_is_not_honoured_is_refused_with_its_key(
    request: pytest.FixtureRequest, name: str, path: str, body: Any, words: str, param: str | None
) -> None:
    served: Served = request.getfixturevalue(name)
    with pytest.raises(BadRequest, match=words) as caught:
        served(path, body)
    assert caught.value.param == param
    assert "_fn" not in str(caught.value)
