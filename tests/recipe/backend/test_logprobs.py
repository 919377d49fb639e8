"""Log-probabilities, penalties and biases, compared with the model's own scores."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipe.backend.generation.decoding import END, Completion, Token
from recipe.backend.requests.payloads import Answers
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


def scores_after(model: Any, ids: list[int]) -> torch.Tensor:
    """What the model says comes next, shape (vocabulary,)."""
    network: Any = model.loaded.model
    with torch.inference_mode():
        return torch.as_tensor(network(input_ids=torch.tensor([ids])).logits[0, -1]).float()


def prompt_ids(model: Any) -> list[int]:
    return list(model.loaded.tokenizer(PROMPT)["input_ids"])


@pytest.mark.parametrize("options", [{"stop": ["e", "n"]}, {"n": 2}])
def test_a_streams_pieces_are_the_text(served: Handlers, options: dict[str, Any]) -> None:
    for seed in range(2):
        body = {"temperature": 1, "seed": seed, **options}
        chunks = [chunk["choices"][0] for chunk in ask(served, stream=True, **body)]
        for choice in ask(served, **body)["choices"]:
            pieces = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_a_text_that_goes_on_keeps_the_space_that_it_begins_with(
    served: Handlers, model: Any
) -> None:
    """Llama 2's tokenizer decodes what is written to "good" by itself, and behind the prompt to
    " good"; by itself it would stand as "the filmgood"."""
    reader: Any = model.loaded.tokenizer
    ids = reader(f"{PROMPT} good, said")["input_ids"]
    (number,) = ids[len(prompt_ids(model)) :][:1]
    whole = reader.decode([*prompt_ids(model), number])
    continuation = whole.removeprefix(PROMPT)
    assert continuation.startswith(" ")
    only = {"logit_bias": {str(number): 100}, "max_tokens": 1}
    assert ask(served, **only)["choices"][0]["text"] == continuation
    pieces = ask(served, stream=True, **only)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == continuation
    # An answer begins with no space: nothing stands before it.
    reader.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    body = {"prompt": None, "messages": [{"role": "user", "content": PROMPT}], **only}
    (choice,) = ask(served, "/v1/chat/completions", **body)["choices"]
    assert choice["message"]["content"] == reader.decode([number])


def test_log_probabilities_are_the_models(served: Handlers, model: Any) -> None:
    ids = prompt_ids(model)
    drawn = {"max_new_tokens": 20, "seed": 5, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    (entry,) = served.ask({"inputs": PROMPT, "parameters": {"details": True, **drawn}})
    tokens = entry["details"]["tokens"]
    for token in tokens:
        expected = scores_after(model, ids).log_softmax(-1)
        assert token["logprob"] == pytest.approx(float(expected[token["id"]]), abs=1e-4)
        ids.append(token["id"])
    assert len(tokens) > 10


def test_details_and_streams_name_special_tokens(model: Any) -> None:
    reader = model.loaded.tokenizer
    end = Token(reader.eos_token_id, special=True)
    written = Completion(prompt=0, index=0, text="a", tokens=[Token(9, "a"), end], finish=END)
    prepared = model.prepare(request(PROMPT, details=True))
    ((entry,),) = shaped(Answers([[written]]), prepared, reader)
    assert [token["text"] for token in entry["details"]["tokens"]] == ["a", "</s>"]
    (event,) = shaped(iter([written]), prepared, reader)
    assert (event["token"]["text"], event["generated_text"]) == ("</s>", "a")


def test_penalties_and_biases_are_those_of_their_definition(served: Handlers, model: Any) -> None:
    ids, counts = prompt_ids(model), torch.zeros(len(model.loaded.tokenizer))
    first = int(scores_after(model, ids).argmax())
    bias = {first: -3.0, 7: 1.5}
    answer = ask(served, frequency_penalty=1.25, presence_penalty=-0.75, logit_bias=bias)
    new = []
    for _ in range(answer["usage"]["completion_tokens"]):
        scores = scores_after(model, [*ids, *new]) - 1.25 * counts + 0.75 * (counts > 0)
        for token, more in bias.items():
            scores[token] += more
        new.append(int(scores.argmax()))
        counts[new[-1]] += 1
    assert len(new) > 10
    assert new[0] != first
    reader: Any = model.loaded.tokenizer
    whole = reader.decode([*ids, *new], skip_special_tokens=True)
    assert whole.removeprefix(PROMPT) == answer["choices"][0]["text"]


def test_what_a_request_leaves_out_is_the_apis_value(served: Handlers) -> None:
    greedy = ask(served)["choices"][0]["text"]
    assert ask(served, temperature=0.01, top_p=0.01, seed=1)["choices"][0]["text"] == greedy
    choices = ask(served, temperature=None, n=4, seed=1)["choices"]
    assert len({choice["text"] for choice in choices}) > 1
