"""OpenAI's log-probabilities, penalties and biases, computed from the model's own scores."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipe.backend.saved.origin import Origin
from recipe.inference.apis import reading
from recipe.tasks.causal_lm.serve import Generator

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
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPHORA_DTYPE", "float32")
        yield Generator.load(Origin(str(folder), {}))


def ask(model: Generator, path: str = "/v1/completions", **body: Any) -> Any:
    what = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, **body}
    request = reading.read(json.dumps(what).encode(), "application/json", path)
    (prediction,) = model.predict([request])
    answer = reading.in_form(prediction, request)
    return list(answer.events) if body.get("stream") else answer.value


def scores_after(model: Generator, ids: list[int]) -> torch.Tensor:
    """What the model says comes next, shape (vocabulary,)."""
    network: Any = model.loaded.model
    with torch.inference_mode():
        return torch.as_tensor(network(input_ids=torch.tensor([ids])).logits[0, -1]).float()


def prompt_ids(model: Generator) -> list[int]:
    return list(model.loaded.tokenizer(PROMPT)["input_ids"])


def joined(tokens: list[str]) -> str:
    """The text of tokens, of which some are written `bytes:\\xe5`."""
    parts = [
        bytes.fromhex(one[6:].replace("\\x", ""))
        if re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", one)
        else one.encode()
        for one in tokens
    ]
    return b"".join(parts).decode(errors="replace")


@pytest.mark.parametrize("options", [{}, {"stop": ["e", "n"]}, {"n": 2}, {"max_tokens": 3}])
def test_tokens_are_those_of_the_text_streamed_or_not(
    model: Generator, options: dict[str, Any]
) -> None:
    for seed in range(4):
        asked = {"temperature": 1, "seed": seed, "logprobs": 2, **options}
        chunks = [chunk for chunk in ask(model, stream=True, **asked) if chunk != "[DONE]"]
        for choice in ask(model, **asked)["choices"]:
            noted = choice["logprobs"]
            text = joined(noted["tokens"])
            if "stop" in options and choice["finish_reason"] == "stop":
                # A token may hold more than what stands before the stop text.
                assert text.startswith(choice["text"])
                assert noted["text_offset"] == [] or noted["text_offset"][-1] < len(choice["text"])
            else:
                assert text == choice["text"]
            for token, place in zip(noted["tokens"], noted["text_offset"], strict=True):
                if not token.startswith("bytes:"):
                    assert text[place:].startswith(token)
            own = [each["choices"][0] for each in chunks]
            own = [each for each in own if each["index"] == choice["index"]]
            assert "".join(each["text"] for each in own) == choice["text"]
            for key, values in noted.items():
                parts = [each["logprobs"][key] for each in own if each["logprobs"]]
                assert [value for part in parts for value in part] == values


def test_a_text_that_goes_on_keeps_the_space_that_it_begins_with(model: Generator) -> None:
    """Llama 2's tokenizer decodes what is written to "good" by itself, and behind the prompt to
    " good"; by itself it would stand as "the filmgood"."""
    reader: Any = model.loaded.tokenizer
    ids = reader(f"{PROMPT} good, said")["input_ids"]
    (number,) = ids[len(prompt_ids(model)) :][:1]
    whole = reader.decode([*prompt_ids(model), number])
    own = whole.removeprefix(PROMPT)
    assert own.startswith(" ")
    only = {"logit_bias": {str(number): 100}, "max_tokens": 1}
    assert ask(model, **only)["choices"][0]["text"] == own
    noted = ask(model, logprobs=1, **only)["choices"][0]
    assert noted["text"] == own == noted["logprobs"]["tokens"][0]
    assert "".join(e["choices"][0]["text"] for e in ask(model, stream=True, **only)[:-1]) == own
    # An answer begins with no space: nothing stands before it.
    reader.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    body = {"prompt": None, "messages": [{"role": "user", "content": PROMPT}], **only}
    (choice,) = ask(model, "/v1/chat/completions", **body)["choices"]
    assert choice["message"]["content"] == reader.decode([number])


def test_log_probabilities_are_the_models_and_name_the_token_itself(model: Generator) -> None:
    (choice,) = ask(model, temperature=1, seed=5, logprobs=3)["choices"]
    noted = choice["logprobs"]
    ids = prompt_ids(model)
    same = {"max_new_tokens": 40, "seed": 5, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    body = {"inputs": PROMPT, "parameters": {"details": True, **same}}
    request = reading.read(json.dumps(body).encode(), "application/json", "/invocations")
    (prediction,) = model.predict([request])
    details = prediction[0][0]["details"]["tokens"]
    # Special tokens are no part of the text.
    place = 0
    for token in details:
        expected = scores_after(model, ids).log_softmax(-1)
        ids.append(token["id"])
        if token["special"]:
            continue
        own, best = noted["token_logprobs"][place], noted["top_logprobs"][place]
        assert own == pytest.approx(float(expected[token["id"]]), abs=1e-4)
        assert noted["tokens"][place] in best
        likeliest = expected.topk(3).values.tolist()
        assert max(best.values()) == pytest.approx(likeliest[0], abs=1e-4)
        assert len(best) == (3 if own >= likeliest[-1] - 1e-4 else 4)
        place += 1
    assert place == len(noted["tokens"]) > 10


def test_penalties_and_biases_are_those_of_their_definition(model: Generator) -> None:
    ids, counts = prompt_ids(model), torch.zeros(len(model.loaded.tokenizer))
    first = int(scores_after(model, ids).argmax())
    bias = {first: -3.0, 7: 1.5}
    answer = ask(model, frequency_penalty=1.25, presence_penalty=-0.75, logit_bias=bias, logprobs=0)
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    seen = []
    for _ in range(answer["usage"]["completion_tokens"]):
        scores = scores_after(model, ids) - 1.25 * counts + 0.75 * (counts > 0)
        for token, more in bias.items():
            scores[token] += more
        number = int(scores.argmax())
        if number not in model.loaded.tokenizer.all_special_ids:
            seen.append(float(scores.log_softmax(-1)[number]))
        counts[number] += 1
        ids.append(number)
    assert values == pytest.approx(seen, abs=1e-4)
    assert len(seen) > 10
    assert first != ids[len(prompt_ids(model))]


def test_what_a_request_leaves_out_is_the_apis_value(model: Generator) -> None:
    greedy = ask(model)["choices"][0]["text"]
    assert ask(model, temperature=0.01, top_p=0.01, seed=1)["choices"][0]["text"] == greedy
    body = {"prompt": PROMPT, "max_tokens": 40, "n": 4, "seed": 1}
    request = reading.read(json.dumps(body).encode(), "application/json", "/v1/completions")
    (texts,) = model.predict([request])
    assert len({text.text for text in texts[0]}) > 1
