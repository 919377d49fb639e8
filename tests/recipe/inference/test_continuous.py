"""Texts that join and leave a running batch, beside `generate` for each prompt alone."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.inference import turns
from recipe.inference.apis import reading
from recipe.inference.generation.batch import Rows
from recipe.inference.generation.continuous import Continuous
from recipe.inference.generation.engine import Engine, Row
from recipe.inference.generation.generator import Generator
from recipe.inference.loaded_model import ALONE, EQUAL, PADDED
from recipe.inference.payloads import BadRequest
from recipe.inference.saved.origin import Origin
from tests.support.serving_kit import save, tokenizer

WORDS = ["the", "film", "was", "good", "bad", "in", "paris", "anna", "said", "again", "who"]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 64, "max_position_embeddings": 128}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "phi": SIZES,
    "gpt_neox": SIZES,
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
            "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "mixtral": {**GROUPED, "num_local_experts": 4, "sliding_window": 8},
    "deepseek_v3": {**SIZES, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1,
                    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    # Positions from the padding on; a state that all texts of a batch share.
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
             "decoder_ffn_dim": 64, "max_position_embeddings": 128},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
             "context_length": 128},
}  # fmt: skip
# What becomes of these models' prompts that differ in length.
BY_GENERATE = {"mamba": PADDED, "bart": EQUAL, "rwkv": ALONE}


def made(kind: str, folder: Path) -> Generator:
    """A random model of a family, which answers with different words."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    reader = tokenizer(max_length=128)
    config = AutoConfig.for_model(
        kind, vocab_size=len(reader), pad_token_id=0, bos_token_id=2, eos_token_id=3,
        initializer_range=0.3, **FAMILIES[kind],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    reader.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPHORA_DTYPE", "float32")
        return Generator.load(Origin(str(folder), {}), {})


def request(inputs: Any, **parameters: Any) -> Any:
    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    return reading.read(body, "application/json", "/invocations")


def alone(model: Generator, asked: Any, new: int) -> str:
    """What `generate` writes after a prompt that has no neighbours."""
    reader: Any = model.loaded.tokenizer
    generating: Any = model.loaded.model
    model.measure(asked)
    inputs = {"input_ids": torch.tensor(asked.token_ids)}
    output = generating.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=3)
    start = inputs["input_ids"].shape[1]
    return str(reader.decode(output[0, start:], skip_special_tokens=True))


def added(model: Generator, asked: Any) -> list[Row]:
    """The texts of a request, which the engine is to write."""
    assert model.continuous is not None
    return model.continuous.add(model.prompts.of(asked))


def engine_of(model: Generator) -> Engine:
    assert model.continuous is not None
    return model.continuous.engine


@pytest.mark.parametrize("kind", BY_GENERATE)
def test_prompts_of_equal_settings_are_padded_only_where_the_model_heeds_it(
    kind: str, tmp_path: Path
) -> None:
    model = made(kind, tmp_path)
    prompts = ["who said paris", "in", "again the film was bad", "good bad paris"]
    whole = [request(text, max_new_tokens=9, return_full_text=False) for text in prompts]
    expected = [alone(model, each, 9) for each in whole]
    seen = [answer[0][0]["generated_text"] for answer in model.predict(whole)]
    assert seen == expected
    assert model.loaded.merging == BY_GENERATE[kind]


def test_padding_weighs_nothing_where_the_models_settings_weigh_the_prompt(tmp_path: Path) -> None:
    """Beams are written in groups: a token that pads a shorter prompt counted as repeated."""
    model = made("llama", tmp_path)
    reader: Any = model.loaded.tokenizer
    generating: Any = model.loaded.model
    generating.generation_config.no_repeat_ngram_size = 1
    prompts = ["in", "who said paris again the film was bad", "good bad", "the film"]
    asked = {"max_new_tokens": 9, "num_beams": 2, "return_full_text": False}

    def expected() -> list[list[int]]:
        written = []
        for text in prompts:
            ids = torch.tensor([reader(text)["input_ids"]])
            mask = torch.ones_like(ids)
            output = generating.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=9, num_beams=2, do_sample=False
            )
            written.append(output[0, ids.shape[1] :].tolist())
        return written

    reader.pad_token = reader.convert_ids_to_tokens(expected()[0][1])
    answers = model.predict([request(text, **asked) for text in prompts])
    texts = [reader.decode(ids, skip_special_tokens=True) for ids in expected()]
    assert [answer[0][0]["generated_text"] for answer in answers] == texts


def texts(drawn: random.Random, count: int) -> list[tuple[str, int]]:
    lengths = [1, 2, 5, 30, 60]
    return [
        (" ".join(drawn.choices(WORDS, k=drawn.choice(lengths))), drawn.randint(1, 24))
        for _ in range(count)
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_that_join_and_leave_at_any_time_are_those_of_generate(
    kind: str, tmp_path: Path
) -> None:
    model = made(kind, tmp_path)
    assert (model.continuous is None) == (kind in BY_GENERATE)
    drawn = random.Random(kind)
    prompts = texts(drawn, 9)
    whole = [request(text, max_new_tokens=new, return_full_text=False) for text, new in prompts]
    expected = [alone(model, each, new) for each, (_, new) in zip(whole, prompts, strict=True)]
    if model.continuous is None:
        seen = [answer[0][0]["generated_text"] for answer in model.predict(whole)]
        assert seen == expected
        return
    engine = model.continuous.engine
    engine._tokens_per_second = 0  # prompts are read in the smallest pieces
    rows = []
    for each in whole:
        rows += added(model, each)
        for _ in range(drawn.randint(0, 4)):
            engine.step()
    for row in rows:
        engine.finish([row])
    assert [row.writer.written.text for row in rows] == expected
    assert len(engine) == 0


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPHORA_DTYPE", "float32")
        return Generator.load(
            Origin(str(save("GPT2LMHeadModel", tmp_path_factory.mktemp("g"))), {}), {}
        )


def test_who_leaves_makes_room_and_changes_no_other(gpt2: Generator) -> None:
    engine = engine_of(gpt2)
    whole = [request(word, max_new_tokens=20, return_full_text=False) for word in WORDS[:4]]
    expected = [answer[0][0]["generated_text"] for answer in gpt2.predict(whole)]
    rows = [added(gpt2, request(word, max_new_tokens=20))[0] for word in WORDS[:4]]
    for _ in range(3):
        engine.step()
    engine.leave(rows[1:3])
    engine.step()
    assert len(engine._running) <= 2
    for place in (0, 3):
        engine.finish([rows[place]])
        assert rows[place].writer.written.text == expected[place]


def test_a_seed_gives_its_text_whoever_is_beside(gpt2: Generator) -> None:
    sampled = {"do_sample": True, "max_new_tokens": 9, "return_full_text": False}

    def draw(*beside: str, seed: int, **more: Any) -> Any:
        own = request("the film", seed=seed, **sampled, **more)
        others = [request(text, max_new_tokens=5) for text in beside]
        return list(gpt2.predict([*others, own])[-1])

    assert draw(seed=7) == draw("anna said", "who was in paris", seed=7)
    assert draw(seed=7) != draw(seed=8)
    several = draw(seed=7, num_return_sequences=3)
    assert len({each["generated_text"] for each in several[0]}) > 1
    assert several == draw("bad", seed=7, num_return_sequences=3)
    # As `generate` draws it with that seed.
    generating, reader = gpt2.loaded.model, gpt2.loaded.tokenizer
    ids = torch.tensor([reader("the film")["input_ids"]])
    torch.manual_seed(7)
    output: Any = generating.generate(input_ids=ids, do_sample=True, max_new_tokens=9)  # type: ignore[operator]
    text = reader.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert draw(seed=7)[0][0]["generated_text"] == text


def test_a_full_device_is_tried_with_fewer_rows_and_one_that_fails_alone_is_told(
    gpt2: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [(word, 12) for word in WORDS[:6]]

    def ask() -> list[Any]:
        return [request(word, max_new_tokens=new, return_full_text=False) for word, new in bodies]

    expected = [answer[0][0]["generated_text"] for answer in gpt2.predict(ask())]
    extend = Rows.extend
    poisoned = request("who said film", max_new_tokens=12)
    gpt2.measure(poisoned)
    poison = poisoned.token_ids[0]
    most = [2]

    def small(self: Rows, batch: Any, tokens: Any) -> Any:
        if len(tokens) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if poison in tokens:
            raise RuntimeError("poison")
        return extend(self, batch, tokens)

    monkeypatch.setattr(Rows, "extend", small)
    assert [answer[0][0]["generated_text"] for answer in gpt2.predict(ask())] == expected
    for most[0] in (2, 99):
        beside = [row for each in ask() for row in added(gpt2, each)]
        (bad,) = added(gpt2, poisoned)
        more = [row for each in ask()[:2] for row in added(gpt2, each)]
        with pytest.raises(RuntimeError, match="poison"):
            engine_of(gpt2).finish([bad])
        engine_of(gpt2).finish([*beside, *more])
        written = [row.writer.written.text for row in (*beside, *more)]
        assert written == [*expected, *expected[:2]]
    most[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        gpt2.predict(ask())
    assert len(engine_of(gpt2)) == 0


@pytest.mark.parametrize("asked", [{}, {"seed": 3, "do_sample": True}, {"num_beams": 2}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_an_error_of_their_own_text(
    gpt2: Generator, value: float, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first token of the vocabulary would be chosen, as the likeliest one."""
    model: Any = gpt2.loaded.model
    good = request("film", max_new_tokens=6, **asked)
    expected = gpt2.predict([request("film", max_new_tokens=6, **asked)])
    longest = gpt2.measure(good)[0]
    forward = model.forward

    def exceed(**inputs: Any) -> Any:
        output = forward(**inputs)
        if output.past_key_values.get_seq_length() > longest:
            output.logits[:] = value
        return output

    monkeypatch.setattr(model, "forward", exceed)
    longer = request("who said film", max_new_tokens=12, **asked)
    with pytest.raises(ArithmeticError, match="AMPHORA_DTYPE=float32"):
        gpt2.predict([longer])
    assert gpt2.predict([good]) == expected
    assert len(engine_of(gpt2)) == 0


def test_what_has_no_room_waits_and_nobody_overtakes_it(gpt2: Generator) -> None:
    engine = Engine(Rows(gpt2.loaded.model, 0), most_tokens=64, most_rows=3)
    model = replace(gpt2, continuous=Continuous(gpt2.loaded, engine))
    bodies = [("the film was good", 20), ("who", 14), ("anna said", 30), ("bad", 3), ("in", 3)]

    def ask() -> list[Any]:
        return [request(text, max_new_tokens=new, return_full_text=False) for text, new in bodies]

    expected = [answer[0][0]["generated_text"] for answer in gpt2.predict(ask())]
    rows = [row for each in ask() for row in added(model, each)]
    began: list[Row] = []
    while len(engine):
        engine.step()
        held = [row for row in engine._running if not row.is_over]
        assert len(held) * max((row.longest for row in held), default=0) <= 64
        began += [row for row in rows if row.writer.written.tokens and row not in began]
    assert began == rows
    assert [row.writer.written.text for row in rows] == expected


def test_engines_of_one_process_share_its_room(gpt2: Generator) -> None:
    """As those of a base and of its adapters: none fills memory that another one has."""
    models = []
    for _ in range(2):
        engine = Engine(Rows(gpt2.loaded.model, 0), most_tokens=64)
        models.append(replace(gpt2, continuous=Continuous(gpt2.loaded, engine)))
    first, second = (engine_of(model) for model in models)
    asked = [request("anna said", max_new_tokens=24, return_full_text=False) for _ in range(5)]
    expected = gpt2.predict(asked[:1])[0][0][0]["generated_text"]
    rows = added(models[0], asked[1]) + added(models[0], asked[2])
    first.step()
    assert first.held > 40
    rows += added(models[1], asked[3]) + added(models[1], asked[4])
    second.step()
    second.step()
    # One goes on without room, since nothing of its own would make room; the other one waits.
    assert sum(bool(row.writer.written.tokens) for row in rows) == 3
    while len(first) or len(second):
        first.step()
        second.step()
    assert [row.writer.written.text for row in rows] == [expected] * 4


def test_streams_that_are_read_in_turns_are_whole(gpt2: Generator) -> None:
    bodies = [{"max_new_tokens": 7 + place, "stream": True} for place in range(3)]
    expected = [
        gpt2.predict([request("the film", max_new_tokens=7 + place, return_full_text=False)])[0]
        for place in range(3)
    ]
    streams = deque(gpt2.predict([request("the film", **body) for body in bodies]))
    last: list[Any] = []
    while streams:
        stream = streams.popleft()
        event = next(stream)
        if event["generated_text"] is None:
            streams.append(stream)
        else:
            last.append(event["generated_text"])
    assert last == [answer[0][0]["generated_text"] for answer in expected]
    left = gpt2.predict([request("anna", stream=True)])[0]
    next(left)
    left.close()
    assert len(engine_of(gpt2)) == 0


def test_beams_and_wrong_requests_are_as_ever(gpt2: Generator) -> None:
    bodies = [request("the film", num_beams=2, max_new_tokens=5), request("who", max_new_tokens=3)]
    assert all(answer[0][0]["generated_text"] for answer in gpt2.predict(bodies))
    with pytest.raises(BadRequest):
        gpt2.measure(request("a", temperature=-1))


def test_where_turns_are_taken_texts_come_later(
    gpt2: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(gpt2.predict([request("who", max_new_tokens=5)])[0])
    paused: list[object] = []
    monkeypatch.setattr(turns, "_pause", paused.append)
    (later,) = gpt2.predict([request("who", max_new_tokens=5)])
    assert callable(later)
    assert list(later()) == expected
    assert len(paused) >= 5


def test_an_engine_of_a_model_that_heeds_no_mask_is_not_made(gpt2: Generator) -> None:
    rows = Rows(gpt2.loaded.model, 0)
    tokens = list(range(5, 19))
    assert rows.is_faithful(tokens)
    rows.has_positions = False
    assert not rows.is_faithful(tokens)
