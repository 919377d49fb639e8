"""`echo` and `logprobs` of /v1/completions, compared with a plain forward of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from amphora.serving.protocol.media_types import Fault
from recipe.backend import bounds, padded_rows
from recipe.backend.requests.payloads import BadRequest
from tests.support.causal_kit import make_model, make_tokenizer
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers

PROMPTS = ["red cat: é", "a", "blue bird and a green dog"]
LM_EVAL = {"prompt": PROMPTS, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}


@pytest.fixture(scope="module", params=["gpt2", "llama", "mamba"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mamba":
        save_mamba(folder)
    else:
        make_model(request.param, folder)
    served: Any = Handlers(folder)
    served.folder = folder
    return served


def save_mamba(folder: Path) -> None:
    """Save a model that has no cache which parts of a row could continue."""
    from transformers import MambaConfig, MambaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, state_size=8,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    MambaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plain_scores(served: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities [tokens - 1, vocabulary] of what follows each token."""
    with torch.inference_mode():
        logits = served.model.loaded.model(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def ids_of(served: Any, text: str) -> list[int]:
    return list(served.model.loaded.tokenizer(text)["input_ids"])


@pytest.mark.parametrize("calls", ["whole", "in parts"])
def test_tokens_have_the_log_probabilities_of_a_plain_forward(
    served: Any, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if calls == "in parts":  # a row is longer than a call, so that its cache is continued
        monkeypatch.setattr(padded_rows, "_CALL_SCORES", 7 * 259)
        served = Handlers(served.folder)
        assert served.model.loaded.padded.call_tokens == 7
    document = served.ask(LM_EVAL)
    continued = served.ask({**LM_EVAL, "logprobs": None, "echo": False})
    assert document["usage"] == continued["usage"]
    for prompt, choice, alone in zip(
        PROMPTS, document["choices"], continued["choices"], strict=True
    ):
        assert choice["text"] == prompt + alone["text"]
        noted = choice["logprobs"]
        ids = ids_of(served, prompt)
        assert noted["token_logprobs"][0] is noted["top_logprobs"][0] is None
        assert len(noted["tokens"]) == len(ids) + 1
        expected = plain_scores(served, ids)
        chosen = expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert noted["token_logprobs"][1:-1] == pytest.approx(chosen, abs=2e-5)
        # lm-eval finds by equality whether a token is the likeliest one.
        for index, row in enumerate(expected, 1):
            top = noted["top_logprobs"][index]
            text = noted["tokens"][index]
            assert max(top.values()) == pytest.approx(float(row.max()), abs=2e-5)
            is_likeliest = int(row.argmax()) == ids[index]
            assert (noted["token_logprobs"][index] == max(top.values())) == is_likeliest
            assert top[text] == noted["token_logprobs"][index] or not text  # half a character
        assert "".join(noted["tokens"][:-1]) == prompt
        for start, token in zip(noted["text_offset"][:-1], noted["tokens"], strict=False):
            assert prompt[start:].startswith(token)


def test_a_prompt_is_scored_alone_or_its_text_is(served: Any) -> None:
    """By max_tokens 0, and without echo."""
    ids = ids_of(served, PROMPTS[2])
    body = {**LM_EVAL, "prompt": ids, "max_tokens": 0}
    scored = served.ask(body)
    (choice,) = scored["choices"]
    assert scored["usage"]["completion_tokens"] == 0
    assert (len(choice["logprobs"]["tokens"]), choice["finish_reason"]) == (len(ids), "length")
    echoed = served.ask({**body, "logprobs": None})["choices"][0]
    assert echoed == {**choice, "logprobs": None}
    body = {"prompt": ids, "max_tokens": 3, "temperature": 0, "logprobs": 4}
    noted = served.ask(body)["choices"][0]["logprobs"]
    assert [len(noted[name]) for name in noted] == [3] * 4
    assert noted["token_logprobs"] == [max(top.values()) for top in noted["top_logprobs"]]
    assert noted["text_offset"][0] == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"logprobs": 21}, ["logprobs is 21", "0 to 20"]),
        ({"logprobs": True}, ["logprobs is true"]),
        ({"echo": 1}, ["echo is 1"]),
        ({"max_tokens": 0}, ["max_tokens is 0: give a whole number from 1"]),
        ({"logprobs": 1, "stream": True}, ["logprobs is 1: only vLLM streams with it"]),
        ({"echo": True, "stream": True}, ["echo is true: only vLLM streams with it"]),
    ],
)
def test_what_is_not_scored_is_refused(served: Any, body: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((BadRequest, Fault)) as error:
        served.ask({"prompt": "red", "max_tokens": 2, **body})
    assert all(word in str(error.value) for word in words), error.value


def test_scores_have_the_bounds_of_other_answers(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds.Bound.ANSWER, "most", 100)
    with refused(bounds.TooCostly, "AMPHORA_MAX_ANSWER_VALUES", "tokens x 5"):
        served.ask({**LM_EVAL, "prompt": ids_of(served, PROMPTS[2]) * 5})
