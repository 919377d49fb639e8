"""Prompts with equal settings, continued together: compared with `generate` for each alone; tokens
as texts: pieces of streams, spaces, special tokens."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipe.backend.generation import prompt_groups
from recipe.backend.generation.decoding import END, LENGTH, Completion, Token, Writer
from recipe.tasks.causal_lm.serve import Generator, shaped
from tests.support.serving_kit import Handlers, predict, request, save, tokenizer

WORDS = ["the", "film", "was", "good", "bad", "in", "paris", "anna", "said", "again", "who"]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 64, "max_position_embeddings": 128}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "mixtral": {**GROUPED, "num_local_experts": 4, "sliding_window": 8},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "phi": SIZES,
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    # Positions counted from the padding on.
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
             "decoder_ffn_dim": 64, "max_position_embeddings": 128},
}  # fmt: skip


def added(reader: Any, prompt: list[int], ids: torch.Tensor) -> str:
    """The text that a sequence adds to the prompt that it begins with."""
    before, both = (reader.decode(one, skip_special_tokens=True) for one in (prompt, ids))
    return str(both).removeprefix(before)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FAMILIES)
def test_texts_of_a_group_are_those_of_generate_for_each_alone(kind: str, tmp_path: Path) -> None:
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
            initializer_range=0.3, **FAMILIES[kind],
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
    assert [answer[0][0]["generated_text"] for answer in answers] == expected
    # One request's texts keep its order, whichever share a batch.
    (together,) = predict(model, [request(prompts, **parameters)])
    assert [texts[0]["generated_text"] for texts in together] == expected


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return Handlers(save("GPT2LMHeadModel", tmp_path_factory.mktemp("gpt2"))).model  # type: ignore[return-value]


def test_prompts_of_equal_settings_share_a_batch(
    gpt2: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = prompt_groups.write

    def counted(loaded: Any, prompts: Any, *rest: Any) -> Any:
        sizes.append(len(prompts))
        return write(loaded, prompts, *rest)

    monkeypatch.setattr(prompt_groups, "write", counted)
    predict(gpt2, [request(word, max_new_tokens=3 + index % 2) for index, word in enumerate(WORDS)])
    assert sizes == [6, 5]
    # Padding would be penalised, too.
    predict(gpt2, [request(WORDS[:3], max_new_tokens=2, repetition_penalty=1.3)])
    assert sizes[2:] == [1, 1, 1]


def test_a_seed_gives_its_text_whoever_is_beside(gpt2: Generator) -> None:
    sampled = {"do_sample": True, "max_new_tokens": 9, "return_full_text": False}

    def draw(*extra: str, seed: int, **more: Any) -> Any:
        seeded = request("the film", seed=seed, **sampled, **more)
        others = [request(text, max_new_tokens=5) for text in extra]
        return list(predict(gpt2, [*others, seeded])[-1])

    assert draw(seed=7) == draw("anna said", "who was in paris", seed=7)
    assert draw(seed=7) != draw(seed=8)
    several = draw(seed=7, num_return_sequences=3)
    assert len({entry["generated_text"] for entry in several[0]}) > 1
    assert several == draw("bad", seed=7, num_return_sequences=3)
    # As `generate` draws it with that seed.
    generating, reader = gpt2.loaded.model, gpt2.loaded.tokenizer
    ids = torch.tensor([reader("the film")["input_ids"]])
    torch.manual_seed(7)
    output: Any = generating.generate(input_ids=ids, do_sample=True, max_new_tokens=9)  # type: ignore[operator]
    assert draw(seed=7)[0][0]["generated_text"] == added(reader, ids[0].tolist(), output[0])
    # Equal prompts of a request draw other texts in another batch.
    (answers,) = predict(
        gpt2, [request(["the film"] * 40, seed=7, **{**sampled, "max_new_tokens": 1})]
    )
    written = [entry[0]["generated_text"] for entry in answers]
    assert written[:8] != written[32:]


@pytest.mark.parametrize(
    ("value", "parameters"),
    [(float("nan"), {}), (float("inf"), {"seed": 3, "do_sample": True})],
)
def test_scores_that_are_no_numbers_are_an_error_of_their_own_text(
    gpt2: Generator, value: float, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first token of the vocabulary would be chosen, as the likeliest one."""
    model: Any = gpt2.loaded.model
    good = request("film", max_new_tokens=6, **parameters)
    expected = predict(gpt2, [request("film", max_new_tokens=6, **parameters)])
    longest = gpt2.prepare(good).sizes[0]
    forward = model.forward

    def exceed(**inputs: Any) -> Any:
        output = forward(**inputs)
        if output.past_key_values.get_seq_length() > longest:
            output.logits[:] = value
        return output

    monkeypatch.setattr(model, "forward", exceed)
    longer = request("who said film", max_new_tokens=12, **parameters)
    with pytest.raises(ArithmeticError, match="AMPHORA_DTYPE=float32"):
        predict(gpt2, [longer])
    assert predict(gpt2, [good]) == expected


TEXT = "the film was good, said Anna again in Paris, naïve café 北京 is big 🙂🙂 rain in Spain"
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
    made.train_from_iterator([TEXT], trainer)
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
    made.train_from_iterator([TEXT.replace(" ", "▁")] * 2, trainer)
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
    (event,) = shaped(iter([written]), model.prepare(request(PROMPT)), reader)
    assert (event["token"]["text"], event["generated_text"]) == ("</s>", "a")


def test_what_a_request_leaves_out_is_the_apis_value(served: Handlers) -> None:
    greedy = ask(served)["choices"][0]["text"]
    assert ask(served, temperature=0.01, top_p=0.01, seed=1)["choices"][0]["text"] == greedy
    choices = ask(served, temperature=None, n=4, seed=1)["choices"]
    assert len({choice["text"] for choice in choices}) > 1
