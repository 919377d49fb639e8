"""Generated texts compared with transformers' pipeline, on random models; refused requests."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from recipe.backend.requests.payloads import BadRequest, Document
from recipe.backend.saved.origin import Origin
from recipe.errors import ModelError
from recipe.inference.apis import request_reader
from recipe.tasks.causal_lm.serve import Generator
from tests.support import causal_kit, chain
from tests.support.serving_kit import save

TEXTS = ["the film was good", "anna said", "paris again . who was bad in the film"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("GPT2LMHeadModel", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def bytes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_kit.make_model("gpt2", tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("chain")
    chain.save(folder)
    return load(folder)


def load(folder: Path) -> Generator:
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setenv("AMPHORA_DTYPE", "float32")
        return Generator.load(Origin(str(folder), {}))


def ask(model: Generator, *bodies: object, path: str = "/invocations") -> list[Any]:
    """What the handlers answer, all bodies in one batch."""
    requests = [
        request_reader.read(json.dumps(body).encode(), "application/json", path) for body in bodies
    ]
    prepared = [model.prepare(request) for request in requests]
    answers = []
    for prediction, request in zip(model.predict(prepared), prepared, strict=True):
        answer = request_reader.format_answer(prediction, request)
        if isinstance(answer, Document):
            answers.append(answer.value)
        elif isinstance(answer, list):
            answers.append(answer[0] if answer.single else list(answer))
        else:
            answers.append(list(answer))
    return answers


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        (TEXTS[0], GREEDY),
        (TEXTS, GREEDY),
        ([TEXTS[1]], GREEDY),
        (TEXTS[0], {**GREEDY, "return_full_text": False}),
        (TEXTS, {**GREEDY, "repetition_penalty": 1.7}),
        (TEXTS, {**GREEDY, "no_repeat_ngram_size": 1}),
        (TEXTS[0], {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9}),
        (TEXTS[0], {**GREEDY, "temperature": 0.5}),
    ],
)
def test_answers_are_those_of_the_pipeline(
    bytes_dir: Path, inputs: Any, parameters: dict[str, Any]
) -> None:
    from transformers import pipeline

    model = load(bytes_dir)
    reference = pipeline("text-generation", model=model.loaded.model, tokenizer=str(bytes_dir))
    assert ask(model, {"inputs": inputs, "parameters": parameters}) == [
        reference(inputs, **parameters)
    ]


def test_a_conversation_is_answered_as_by_the_pipeline(chained: Generator) -> None:
    from transformers import pipeline

    loaded = chained.loaded
    reference = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    begun = [*messages, {"role": "assistant", "content": "01"}]
    options = {"max_new_tokens": 5, "do_sample": False}
    for inputs in (messages, begun, [messages, begun]):
        body = {"inputs": inputs, "parameters": options}
        assert ask(chained, body) == [reference(inputs, **options)]


@pytest.mark.parametrize(
    ("role", "template"),
    [
        ("system", "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}"),
        ("user", "{{ messages[-1].content }}"),
        (None, "{% for one in messages %}{{ one.content | tojson }}{% endfor %}"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    chained: Generator, role: str | None, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chained.loaded.tokenizer, "chat_template", template)
    system, user = {"role": "system", "content": "in\nFrench"}, {"role": "user", "content": "hi"}
    body = {"messages": [system, user, user] if role == "system" else [user, system]}
    if role is None:
        assert ask(chained, {**body, "max_tokens": 2})
        return
    with pytest.raises(BadRequest, match=rf"messages\[0\], of role '{role}'"):
        ask(chained, body)


def test_texts_of_a_batch_are_those_generated_alone(model_dir: Path) -> None:
    """Penalties do not apply to padding."""
    model = load(model_dir)
    for more in ({}, {"repetition_penalty": 3.0}, {"frequency_penalty": 1.5}, {"stop": "film"}):
        bodies = [{"inputs": text, "parameters": {**GREEDY, **more}} for text in TEXTS]
        assert ask(model, *bodies) == [ask(model, body)[0] for body in bodies]


def test_long_prompts_are_cut_on_the_left(chained: Generator, model_dir: Path) -> None:
    prompt = "x" * 500 + "012"
    request = request_reader.read(
        json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": 4}}).encode(),
        "application/json", "/invocations",
    )  # fmt: skip
    prepared = chained.prepare(request)
    assert prepared.sizes == [64]
    assert list(prepared.truncated) == [0]
    (answers,) = chained.predict([prepared])
    assert answers == [[{"generated_text": prompt + "3456"}]]
    (short,) = ask(
        chained, {"inputs": "xx0123", "parameters": {"truncate": 2, "max_new_tokens": 2}}
    )
    assert short == [{"generated_text": "xx012345"}]
    # Megabytes are not read whole, and end as they would.
    text = " ".join(TEXTS * 20_000)
    model = load(model_dir)
    cut, whole = ({"inputs": item, "parameters": {**GREEDY, "return_full_text": False}}
                  for item in (text, " ".join(TEXTS * 40)))  # fmt: skip
    assert ask(model, cut) == ask(model, whole)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_new_tokens": 60}, ["10 tokens", "60 are to follow", "64 positions", "at most 54"]),
        ({"max_length": 5}, ["'max_length'", "max_new_tokens"]),
        ({"num_return_sequences": 2}, ["num_return_sequences is 2", "do_sample"]),
        ({"do_sample": True, "num_return_sequences": 99}, ["99", "1 to 32"]),
        ({"num_beams": 2}, ["num_beams is 2", "encoder-decoders"]),
        ({"top_n_tokens": 2}, ["top_n_tokens is 2", "only the generated token"]),
        ({"decoder_input_details": True}, ["decoder_input_details", "not supported"]),
        ({"stream": True, "do_sample": True, "num_return_sequences": 2}, ["Only one text"]),
        ({"temperature": -1, "top_p": 2}, ["temperature is -1", "top_p is 2"]),
        ({"temperature": 0, "do_sample": True}, ["turns sampling off"]),
        ({"stop": "a", "stop_sequences": ["b"]}, ["mean the same"]),
        ({"stop": [""]}, ["empty"]),
        ({"watermark": True, "grammar": {}}, ["'grammar'"]),
        ({"watermark": True}, ["watermark is true", "not supported"]),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, ["min_new_tokens is 9"]),
        ({"seed": 2**64}, ["seed"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    chained: Generator, body: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        ask(chained, {"inputs": "0123456789", "parameters": body})
    for word in words:
        assert word in str(caught.value)


def test_what_streams_draw_does_not_depend_on_who_is_at_work_beside(model_dir: Path) -> None:
    model = load(model_dir)

    def body(seed: int, stream: bool) -> dict[str, Any]:
        drawn = {"do_sample": True, "seed": seed, "temperature": 2.0}
        drawn |= {"max_new_tokens": 12, "min_new_tokens": 12}
        return {"inputs": TEXTS[0], "parameters": drawn, "stream": stream}

    def read(seed: int) -> Any:
        request = request_reader.read(
            json.dumps(body(seed, True)).encode(), "application/json", "/"
        )
        return model.prepare(request)

    def streamed(seed: int) -> Any:
        return iter(model.predict([read(seed)])[0])

    alone = [list(streamed(seed)) for seed in (1, 2)]
    assert alone[0] != alone[1] and len(alone[0]) == 12
    (whole,) = ask(model, body(3, False))
    together: list[list[Any]] = [[], []]
    streams = [streamed(1), streamed(2)]
    for step in range(12):
        for one, expected_text in zip(streams, together, strict=True):
            expected_text.append(next(one))
        if step == 5:
            assert ask(model, body(3, False)) == [whole]
    assert together == alone
    assert [list(stream) for stream in streams] == [[], []]
    # Nothing is computed ahead of a reader, and one that leaves ends its thread.
    before = threading.enumerate()
    stream = streamed(1)
    next(stream)
    stream.close()
    assert threading.enumerate() == before


def test_what_says_nothing_is_taken(chained: Generator) -> None:
    parameters = {
        "top_k": None, "watermark": False, "decoder_input_details": False, "best_of": 1,
        "temperature": 0, "max_new_tokens": 4, "typical_p": None, "num_beams": 1, "top_n_tokens": 0,
    }  # fmt: skip
    assert ask(chained, {"inputs": "0123", "parameters": parameters, "stream": False}) == [
        [{"generated_text": "01234567"}]
    ]


def test_prompts_may_be_refused_rather_than_cut(tmp_path: Path) -> None:
    chain.save(tmp_path, template=None)
    model = load(tmp_path)
    long = {"inputs": "0" * 70, "parameters": {"max_new_tokens": 4, "truncation": False}}
    with pytest.raises(BadRequest, match=r"70 tokens, 4 are to follow.*Shorten the prompt"):
        ask(model, long)
    long["parameters"]["truncation"] = True  # type: ignore[index]
    assert ask(model, long)[0][0]["generated_text"].endswith("001234")
    with pytest.raises(BadRequest, match="no chat template"):
        ask(model, {"messages": [{"role": "user", "content": "hi"}]})


def test_a_chat_template_that_is_none_ends_the_start(tmp_path: Path) -> None:
    chain.save(tmp_path, template="{% for m in messages %}{{ m['content'] }}")
    with pytest.raises(ModelError, match=r"cannot be read \(line 1\).*chat_template.jinja"):
        load(tmp_path)


def test_a_bad_line_harms_no_other(chained: Generator) -> None:
    lines = [
        {"inputs": "01", "parameters": {"max_new_tokens": 2}},
        {"inputs": [{"role": "user", "content": "hi"}], "parameters": {"max_new_tokens": 2}},
        {"inputs": 7, "parameters": {"max_new_tokens": 2}},
    ]
    body = "\n".join(map(json.dumps, lines)).encode()
    request = chained.prepare(request_reader.read(body, "application/jsonlines", "/invocations"))
    answer = request_reader.format_answer(chained.predict([request])[0], request)
    assert answer[0] == [{"generated_text": "0123"}]
    assert answer[1][0]["generated_text"][-1] == {"role": "assistant", "content": "Ci"}
    assert "7, not a text" in answer[2]["error"]["message"]
