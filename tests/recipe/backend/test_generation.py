"""Generated texts compared with transformers' pipeline, on random models; refused requests."""

import json
import random
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipe.backend.generation import prompt_groups
from recipe.backend.generation.decoding import END, LENGTH, Completion, Token, Writer
from recipe.backend.requests.payloads import BadRequest
from recipe.errors import ModelError
from recipe.tasks.causal_lm.serve import Generator, _plain_text
from tests.support import causal_kit, chain, serving_kit
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers, predict, save, tokenizer

request = partial(serving_kit.request, generates=True)
TEXTS = ["the film was good", "anna said", "paris again . who was bad in the film"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Handlers(save("GPT2LMHeadModel", tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chain")
    chain.save(folder)
    return Handlers(folder)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_are_those_of_the_pipeline(tmp_path: Path) -> None:
    served = Handlers(causal_kit.make_model("gpt2", tmp_path))
    loaded = served.model.loaded  # type: ignore[attr-defined]
    make: Any = transformers.pipeline
    reference = make("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (TEXTS, {}), (TEXTS[0], {"return_full_text": False}), (TEXTS, {"repetition_penalty": 1.7}),
        (TEXTS[0], {"max_new_tokens": 9, "min_new_tokens": 9}), (TEXTS[0], {"temperature": 0.5}),
    ]  # fmt: skip
    for inputs, more in cases:
        parameters = {**GREEDY, **more}
        answer = served.ask({"inputs": inputs, "parameters": parameters})
        assert answer == reference(inputs, **parameters), parameters


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
        ({"num_return_sequences": 2}, ["num_return_sequences is 2", "a temperature"]),
        ({"do_sample": True, "num_return_sequences": 99}, ["99", "1 to 32"]),
        ({"num_beams": 2}, ["num_beams is 2", "give 1"]),
        ({"top_n_tokens": 2}, ["top_n_tokens is 2", "give 0"]),
        ({"truncation": True}, ["truncation is true", "give false"]),
        ({"temperature": -1, "top_p": 2}, ["temperature is -1", "top_p is 2"]),
        ({"temperature": 0, "do_sample": True}, ["temperature is 0"]),
        ({"stop": "a", "stop_sequences": ["b"]}, ["mean the same"]),
        ({"stop": [""]}, ["empty"]),
        ({"watermark": True}, ["watermark is true", "give false"]),
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


def test_details_name_the_tokens_of_a_whole_answer(gpt2: Any) -> None:
    body = {"inputs": TEXTS[0], "parameters": {"max_new_tokens": 4, "details": True}}
    ((answer,),) = [gpt2.ask(body)]
    details = answer["details"]
    assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 4)


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
    assert "not 7" in answer[2]["error"]["message"]


PLAIN = ["the film was good", "anna said", "who"]
NEW = 8
BODY = {"inputs": PLAIN, "parameters": {"max_new_tokens": NEW, "return_full_text": False}}


def model_with(base: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(base, folder)
    config = json.loads((base / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, **settings}))
    return folder


def transformers_texts(folder: Path) -> list[str]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for text in PLAIN:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        options = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer}
        with torch.inference_mode():
            output = model.generate(**inputs, **options)
        texts.append(added(tokenizer, inputs["input_ids"][0], output[0]))
    return texts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("LlamaForCausalLM", tmp_path_factory.mktemp("base"))


def texts_of(answer: list[Any]) -> list[str]:
    return [str(entry["generated_text"]) for (entry,) in answer]


@pytest.mark.parametrize(
    "settings",
    [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"token_healing": True}],
    ids=lambda value: next(iter(value)),
)
def test_what_makes_steps_of_several_tokens_loses_none(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    answer = Handlers(model_with(base, tmp_path / "model", **settings)).ask(BODY)
    assert texts_of(answer) == transformers_texts(base)


def test_a_models_own_stop_strings_end_its_texts(base: Path, tmp_path: Path) -> None:
    whole = transformers_texts(base)
    stop = [whole[0][3:6], whole[1][2:5]]
    folder = model_with(base, tmp_path / "model", stop_strings=stop)
    expected = transformers_texts(folder)
    assert expected != whole
    assert texts_of(Handlers(folder).ask(BODY)) == expected


def test_a_model_that_asks_for_more_outputs_still_gives_texts(base: Path, tmp_path: Path) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    answer = Handlers(model_with(base, tmp_path / "model", **more)).ask(BODY)
    assert texts_of(answer) == transformers_texts(base)
    plain = save("T5ForConditionalGeneration", tmp_path / "t5")
    body = {"inputs": PLAIN, "parameters": {"max_new_tokens": 6}}
    answer = Handlers(model_with(plain, tmp_path / "more", **more)).ask(body)
    assert answer == Handlers(plain).ask(body)


WORDS = ["the", "film", "was", "good", "bad", "in", "paris", "anna", "said", "again", "who"]


def added(reader: Any, prompt: list[int], ids: torch.Tensor) -> str:
    """The text that a sequence adds to the prompt that it begins with."""
    before, both = (reader.decode(one, skip_special_tokens=True) for one in (prompt, ids))
    return str(both).removeprefix(before)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "sizes"), [
    ("gpt2", {}),
    *((kind, {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4})
      for kind in ("gemma3_text", "mixtral", "gemma2")),
    ("phi", {}),
    ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("bloom", {}),
    ("mamba", {"state_size": 8}),
    # Positions counted from the padding on.
    ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}),
])  # fmt: skip
def test_texts_of_a_group_are_those_of_generate_for_each_alone(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    def alone(model: Generator, parameters: Any, new: int) -> str:
        """What `generate` writes after a prompt that has no neighbours."""
        reader: Any = model.loaded.tokenizer
        generating: Any = model.loaded.model
        (prompt,) = model.prepare(parameters).work
        inputs = {"input_ids": torch.tensor([prompt.ids])}
        output = generating.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=3)
        return added(reader, prompt.ids, output[0])

    def made(kind: str, folder: Path) -> Generator:
        """A random model of a family, which answers with different words."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        reader = tokenizer(max_length=128)
        config = AutoConfig.for_model(
            kind, vocab_size=len(reader), pad_token_id=0, bos_token_id=2, eos_token_id=3,
            initializer_range=0.3, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=128, **sizes,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        reader.save_pretrained(folder)
        return Handlers(folder).model  # type: ignore[return-value]

    model = made(kind, tmp_path)
    assert model.merges == (kind not in ("bart", "mamba"))
    drawn = random.Random(kind)
    prompts = [" ".join(drawn.choices(WORDS, k=count)) for count in (1, 5, 30, 5)]
    parameters = {"max_new_tokens": 6, "return_full_text": False}
    expected = [alone(model, request(text, **parameters), 6) for text in prompts]
    answers = predict(model, [request(text, **parameters) for text in prompts])
    assert [answer[0][0]["text"] for answer in answers] == expected
    # One request's texts keep its order, whichever share a batch.
    (together,) = predict(model, [request(prompts, **parameters)])
    assert [texts[0]["text"] for texts in together] == expected


def test_prompts_of_equal_settings_share_a_batch(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = prompt_groups.write

    def counted(loaded: Any, prompts: Any, *rest: Any) -> Any:
        sizes.append(len(prompts))
        return write(loaded, prompts, *rest)

    monkeypatch.setattr(prompt_groups, "write", counted)
    predict(
        gpt2.model,
        [request(word, max_new_tokens=3 + index % 2) for index, word in enumerate(WORDS)],
    )
    assert sizes == [6, 5]
    # Padding would be penalised, too.
    predict(gpt2.model, [request(WORDS[:3], max_new_tokens=2, repetition_penalty=1.3)])
    assert sizes[2:] == [1, 1, 1]


def test_a_seed_gives_its_text_whoever_is_beside(gpt2: Any) -> None:
    sampled = {"do_sample": True, "max_new_tokens": 9, "return_full_text": False}

    def draw(*extra: str, seed: int, **more: Any) -> Any:
        seeded = request("the film", seed=seed, **sampled, **more)
        others = [request(text, max_new_tokens=5) for text in extra]
        return list(predict(gpt2.model, [*others, seeded])[-1])

    assert draw(seed=7) == draw("anna said", "who was in paris", seed=7)
    assert draw(seed=7) != draw(seed=8)
    several = draw(seed=7, num_return_sequences=3)
    assert len({entry["text"] for entry in several[0]}) > 1
    assert several == draw("bad", seed=7, num_return_sequences=3)
    # As `generate` draws it with that seed.
    generating, reader = gpt2.model.loaded.model, gpt2.model.loaded.tokenizer
    ids = torch.tensor([reader("the film")["input_ids"]])
    torch.manual_seed(7)
    output: Any = generating.generate(input_ids=ids, do_sample=True, max_new_tokens=9)  # type: ignore[operator]
    assert draw(seed=7)[0][0]["text"] == added(reader, ids[0].tolist(), output[0])
    # Equal prompts of a request draw other texts in another batch.
    (answers,) = predict(
        gpt2.model, [request(["the film"] * 40, seed=7, **{**sampled, "max_new_tokens": 1})]
    )
    written = [entry[0]["text"] for entry in answers]
    assert written[:8] != written[32:]


@pytest.mark.parametrize(
    ("value", "parameters"),
    [(float("nan"), {}), (float("inf"), {"seed": 3, "do_sample": True})],
)
def test_scores_that_are_no_numbers_are_an_error_of_their_own_text(
    gpt2: Any, value: float, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first token of the vocabulary would be chosen, as the likeliest one."""
    model: Any = gpt2.model.loaded.model
    good = request("film", max_new_tokens=6, **parameters)
    expected = predict(gpt2.model, [request("film", max_new_tokens=6, **parameters)])
    longest = gpt2.model.prepare(good).sizes[0]
    forward = model.forward

    def exceed(**inputs: Any) -> Any:
        output = forward(**inputs)
        if output.past_key_values.get_seq_length() > longest:
            output.logits[:] = value
        return output

    monkeypatch.setattr(model, "forward", exceed)
    longer = request("who said film", max_new_tokens=12, **parameters)
    with pytest.raises(ArithmeticError, match="AMPHORA_DTYPE=float32"):
        predict(gpt2.model, [longer])
    assert predict(gpt2.model, [good]) == expected


SENTENCE = "the film was good, said Anna again in Paris, naïve café 北京 is big 🙂🙂 rain in Spain"
SPECIAL = ["<pad>", "<s>", "</s>"]
PROMPT = "the film"


def bytes_tokenizer() -> Tokenizer:
    """As GPT-2's: its tokens are bytes, of which several may be one character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([SENTENCE], trainer)
    return made


def spaces_tokenizer() -> Tokenizer:
    """As Llama 2's: a text, and so a token by itself, loses the space that it begins with."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=SPECIAL, show_progress=False, max_token_length=5
    )
    made.train_from_iterator([SENTENCE.replace(" ", "▁")] * 2, trainer)
    return made


@pytest.fixture(scope="module", params=[bytes_tokenizer, spaces_tokenizer])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    folder = tmp_path_factory.mktemp("model")
    reader = PreTrainedTokenizerFast(
        tokenizer_object=request.param(), pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        model_max_length=256,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(reader), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    # What a request leaves out is OpenAI's value, not the model's own.
    llama.generation_config = GenerationConfig(
        do_sample=True, temperature=0.01, top_p=0.01, eos_token_id=2, pad_token_id=0
    )
    llama.save_pretrained(folder)
    reader.save_pretrained(folder)
    return Handlers(folder)


@pytest.fixture(scope="module")
def model(served: Handlers) -> Any:
    return served.model


def ask(served: Handlers, path: str = "/v1/completions", **body: Any) -> Any:
    return served.post(path, {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, **body})


def test_a_streams_pieces_are_the_text(served: Handlers) -> None:
    for seed in range(3):
        body = {"temperature": 1, "seed": seed, "stop": ["e", "n"]}
        pieces = [chunk["choices"][0] for chunk in ask(served, stream=True, **body)]
        (choice,) = ask(served, **body)["choices"]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("follows", [False, True])
def test_a_text_that_goes_on_keeps_the_space_that_it_begins_with(model: Any, follows: bool) -> None:
    """Llama 2's tokenizer decodes what is written to "good" by itself, and behind the prompt to
    " good"; by itself it would stand as "the filmgood"."""

    def prompt_ids(model: Any) -> list[int]:
        return list(model.loaded.tokenizer(PROMPT)["input_ids"])

    reader: Any = model.loaded.tokenizer
    ids = prompt_ids(model)
    number = reader(f"{PROMPT} good, said")["input_ids"][len(ids)]
    (prompt,) = model.prepare(request(PROMPT, max_new_tokens=1)).work
    # An answer begins with no space: nothing stands before it.
    for continues, expected in (
        (True, reader.decode([*ids, number]).removeprefix(PROMPT)),
        (False, reader.decode([number])),
    ):
        one = replace(prompt, continues=continues)
        writer = Writer(Completion(prompt=0), reader, one, [], follows=follows)
        writer.take(number)
        assert (writer.written.text, writer.written.finish) == (expected, LENGTH)
        assert writer.written.tokens[0].text == (expected if follows else "")
        assert expected.startswith(" ") or not continues


def test_streams_name_special_tokens(model: Any) -> None:
    reader = model.loaded.tokenizer
    end = Token(reader.eos_token_id, special=True)
    written = Completion(prompt=0, text="a", tokens=[Token(9, "a"), end], finish=END)
    plain = _plain_text(
        written, dict(zip(reader.all_special_ids, reader.all_special_tokens, strict=True))
    )
    assert [token["text"] for token in plain["tokens"]] == ["a", "</s>"]
    assert (plain["text"], plain["finish"]) == ("a", "eos_token")


def test_what_a_request_leaves_out_is_the_apis_value(served: Handlers) -> None:
    greedy = ask(served)["choices"][0]["text"]
    assert ask(served, temperature=0.01, top_p=0.01, seed=1)["choices"][0]["text"] == greedy
    choices = ask(served, temperature=None, n=4, seed=1)["choices"]
    assert len({choice["text"] for choice in choices}) > 1
