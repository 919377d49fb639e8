"""Generated tokens as texts: pieces of streams, spaces, special tokens, and the API's defaults."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipe.backend.generation.decoding import END, LENGTH, Completion, Token, Writer
from recipe.tasks.causal_lm.serve import shaped
from tests.support.serving_kit import Handlers, request

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


def prompt_ids(model: Any) -> list[int]:
    return list(model.loaded.tokenizer(PROMPT)["input_ids"])


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
