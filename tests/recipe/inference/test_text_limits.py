"""How much of a text is read: the model's positions are the limit, the tokenizer's a usual one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.inference.payloads import BadRequest
from tests.support.serving_kit import Handlers, save, tokenizer

WORDS = ["anna", "film", "good", "paris", "who", "bad", "said", "again"]
LONG = " ".join(WORDS[place * place % 8] for place in range(34))


def shortened(kind: str, folder: Path, **config: Any) -> Path:
    """A model of 48 positions, or of none (T5), whose tokenizer says 16."""
    save(kind, folder, **config)
    tokenizer(16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertModel"])
def test_an_encoder_reads_as_much_as_is_asked_and_fits(kind: str, tmp_path: Path) -> None:
    served = Handlers(shortened(kind, tmp_path / "m"))
    whole = Handlers(save(kind, tmp_path / "whole"))

    def numbers(handlers: Handlers, **parameters: Any) -> Any:
        (answer,) = handlers.ask({"inputs": [LONG], "parameters": parameters})
        return np.array(answer["score"] if isinstance(answer, dict) else answer)

    usual = numbers(served)
    assert np.allclose(usual, numbers(whole, max_length=16), atol=1e-5)
    for asked in ({"truncation": False}, {"max_length": 40}):
        assert np.allclose(numbers(served, **asked), numbers(whole), atol=1e-5)
    assert not np.allclose(usual, numbers(whole), atol=1e-5)
    with pytest.raises(BadRequest, match="longer than the 48 tokens"):
        served.ask({"inputs": [LONG + " " + LONG], "truncation": False})


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_an_encoder_decoder_reads_a_long_text_whole_if_asked(kind: str, tmp_path: Path) -> None:
    environ = {"HF_TASK": "text2text-generation"}
    served = Handlers(shortened(kind, tmp_path / "m", seed=3), **environ)
    loaded: Any = served.model
    body = {"inputs": LONG, "parameters": {"max_new_tokens": 8, "num_beams": 1}}

    def read(truncation: bool | None) -> tuple[int, list[int]]:
        import inference

        request = inference.reading.read(
            json.dumps({**body, "truncation": truncation}).encode(),
            "application/json",
            "/invocations",
        )
        loaded.measure(request)
        return len(request.token_ids[0]), list(request.truncated)

    assert read(None) == (16, [0])
    assert read(False) == (36, [])
    assert len(served.ask_all([body, {**body, "truncation": False}])) == 2


def test_a_decoders_limit_is_its_positions(tmp_path: Path) -> None:
    served = Handlers(shortened("LlamaForCausalLM", tmp_path / "m"))
    whole = Handlers(save("LlamaForCausalLM", tmp_path / "whole"))
    body = {"inputs": LONG, "parameters": {"max_new_tokens": 6, "truncation": False}}
    assert served.ask(body) == whole.ask(body)
