"""Generated texts compared with transformers' pipeline, on random models; refused requests."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from recipe.backend.requests.payloads import BadRequest
from recipe.errors import ModelError
from tests.support import causal_kit, chain
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers, request, save

TEXTS = ["the film was good", "anna said", "paris again . who was bad in the film"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Handlers(save("GPT2LMHeadModel", tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Handlers(causal_kit.make_model("gpt2", tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chain")
    chain.save(folder)
    return Handlers(folder)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        (TEXTS, GREEDY),
        (TEXTS[0], {**GREEDY, "return_full_text": False}),
        (TEXTS, {**GREEDY, "repetition_penalty": 1.7}),
        (TEXTS[0], {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9}),
        (TEXTS[0], {**GREEDY, "temperature": 0.5}),
    ],
)
def test_answers_are_those_of_the_pipeline(
    bytes_model: Any, inputs: Any, parameters: dict[str, Any]
) -> None:
    from transformers import pipeline

    loaded = bytes_model.model.loaded
    reference = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
    answer = bytes_model.ask({"inputs": inputs, "parameters": parameters})
    assert answer == reference(inputs, **parameters)


def test_a_conversation_is_answered_as_by_the_pipeline(chained: Any) -> None:
    from transformers import pipeline

    loaded = chained.model.loaded
    reference = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    begun = [*messages, {"role": "assistant", "content": "01"}]
    options = {"max_new_tokens": 5, "do_sample": False}
    for inputs in (messages, begun, [messages, begun]):
        body = {"inputs": inputs, "parameters": options}
        assert chained.ask(body) == reference(inputs, **options)


@pytest.mark.parametrize(
    ("role", "template"),
    [
        ("system", "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}"),
        ("user", "{{ messages[-1].content }}"),
        (None, "{% for one in messages %}{{ one.content | tojson }}{% endfor %}"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    chained: Any, role: str | None, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chained.model.loaded.tokenizer, "chat_template", template)
    system, user = {"role": "system", "content": "in\nFrench"}, {"role": "user", "content": "hi"}
    body = {"messages": [system, user, user] if role == "system" else [user, system]}
    if role is None:
        assert chained.ask({**body, "max_tokens": 2})
        return
    with pytest.raises(BadRequest, match=rf"messages\[0\], of role '{role}'"):
        chained.ask(body)


def test_texts_of_a_batch_are_those_generated_alone(gpt2: Any) -> None:
    """Penalties do not apply to padding."""
    for more in ({}, {"repetition_penalty": 3.0}, {"stop": "film"}):
        bodies = [{"inputs": text, "parameters": {**GREEDY, **more}} for text in TEXTS]
        assert gpt2.ask_all(bodies) == [gpt2.ask(body) for body in bodies]


def test_prompts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    chain.save(tmp_path, template=None)
    served = Handlers(tmp_path)
    exact = {"inputs": "0" * 60, "parameters": {"max_new_tokens": 4}}
    assert served.ask(exact)[0]["generated_text"].endswith("01234")
    for count, new, words in (
        (61, 4, r"61 tokens, 4 are to follow.*at most 3 can follow. Shorten the prompt"),
        (64, None, "64 tokens, and the model has 64 positions: none can follow"),
        (10**6, None, r"more than \d+ tokens"),
    ):
        body = {"inputs": "0" * count, "parameters": {"max_new_tokens": new}}
        with pytest.raises(BadRequest, match=words):
            served.ask(body)
    with pytest.raises(BadRequest, match="no chat template"):
        served.ask({"messages": [{"role": "user", "content": "hi"}]})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_new_tokens": 60}, ["10 tokens", "60 are to follow", "64 positions", "at most 54"]),
        ({"max_length": 5}, ["'max_length'", "max_new_tokens"]),
        ({"stream": True, "do_sample": True, "num_return_sequences": 2}, ["Only one text"]),
        ({"num_return_sequences": 2}, ["num_return_sequences (n) is 2", "do_sample"]),
        ({"do_sample": True, "num_return_sequences": 99}, ["99", "1 to 32"]),
        ({"num_beams": 2}, ["num_beams is 2", "encoder-decoders"]),
        ({"top_n_tokens": 2}, ["top_n_tokens is 2", "only the generated token"]),
        ({"truncation": True}, ["truncation is true", "not truncated"]),
        ({"details": True}, ["details is true", "only vLLM"]),
        ({"temperature": -1, "top_p": 2}, ["temperature is -1", "top_p is 2"]),
        ({"temperature": 0, "do_sample": True}, ["turns sampling off"]),
        ({"stop": "a", "stop_sequences": ["b"]}, ["mean the same"]),
        ({"stop": [""]}, ["empty"]),
        ({"watermark": True}, ["watermark is true", "not supported"]),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, ["min_new_tokens is 9"]),
        ({"seed": 2**64}, ["seed"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    chained: Any, body: dict[str, Any], words: list[str]
) -> None:
    with refused(BadRequest, *words):
        chained.ask({"inputs": "0123456789", "parameters": body})


def test_what_streams_draw_does_not_depend_on_who_is_at_work_beside(gpt2: Any) -> None:
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12,
                             "min_new_tokens": 12}  # fmt: skip

    def streamed(seed: int) -> Any:
        prepared = gpt2.model.prepare(request(TEXTS[0], seed=seed, stream=True, **drawn))
        return iter(gpt2.model.predict([prepared])[0])

    body = {"inputs": TEXTS[0], "parameters": {**drawn, "seed": 3}}
    alone = [list(streamed(seed)) for seed in (1, 2)]
    assert alone[0] != alone[1] and len(alone[0]) == 12
    whole = gpt2.ask(body)
    together: list[list[Any]] = [[], []]
    streams = [streamed(1), streamed(2)]
    for step in range(12):
        for one, expected_text in zip(streams, together, strict=True):
            expected_text.append(next(one))
        if step == 5:
            assert gpt2.ask(body) == whole
    assert together == alone
    assert [list(stream) for stream in streams] == [[], []]
    # Nothing is computed ahead of a reader, and one that leaves ends its thread.
    before = threading.enumerate()
    stream = streamed(1)
    next(stream)
    stream.close()
    assert threading.enumerate() == before


def test_a_chat_template_that_is_none_ends_the_start(tmp_path: Path) -> None:
    chain.save(tmp_path, template="{% for m in messages %}{{ m['content'] }}")
    with pytest.raises(ModelError, match=r"cannot be read \(line 1\).*chat_template.jinja"):
        Handlers(tmp_path)


def test_a_bad_line_harms_no_other(chained: Any) -> None:
    lines = [
        {"inputs": "01", "parameters": {"max_new_tokens": 2}},
        {"inputs": [{"role": "user", "content": "hi"}], "parameters": {"max_new_tokens": 2}},
        {"inputs": 7, "parameters": {"max_new_tokens": 2}},
    ]
    body = "\n".join(map(json.dumps, lines)).encode()
    answer = chained.ask((body, "application/jsonlines"))
    assert answer[0] == [{"generated_text": "0123"}]
    assert answer[1][0]["generated_text"][-1] == {"role": "assistant", "content": "Ci"}
    assert "7, not a text" in answer[2]["error"]["message"]
