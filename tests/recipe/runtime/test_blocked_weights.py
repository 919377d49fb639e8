"""Weights as a CPU's kernels read them: the same answers, or the plain ones are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from recipe.runtime import blocked_weights
from tests.support.serving_kit import TEXTS, Handlers, save

SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
IDS = torch.arange(5, 37).view(2, 16)

needs_kernels = pytest.mark.skipif(
    blocked_weights.why_not(nn.Linear(1, 1), torch.bfloat16, {}) is not None,
    reason="no bfloat16 kernels on this CPU",
)


def model_of(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES, **options)).eval().to(torch.bfloat16)


@torch.inference_mode()
def answers_of(model: Any) -> list[Tensor]:
    return list(model(input_ids=IDS).logits.float())


def are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@needs_kernels
def test_products_are_the_same_to_the_bit() -> None:
    # A ReLU is not computed with the product.
    model = model_of(BertForSequenceClassification, hidden_act="relu")
    expected = answers_of(model)
    assert blocked_weights.use(model, lambda: answers_of(model), are_equal) == ""
    assert are_equal(answers_of(model), expected)
    layer = model.bert.encoder.layer[0].intermediate
    assert layer.dense.weight.device.type == "meta", "the plain weights' memory is given back"
    assert isinstance(layer.intermediate_act_fn, nn.ReLU)
    assert model.classifier.weight.device.type == "cpu", "a narrow head is left alone"
    empty = torch.empty(0, 128, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert layer.dense(empty).shape == (0, 256)


@needs_kernels
@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForMaskedLM])
def test_answers_with_gelu_are_nearer_to_those_of_float32(kind: Any) -> None:
    model = model_of(kind)
    expected = answers_of(model)
    exact = answers_of(model_of(kind).float())
    fault = blocked_weights.use(model, lambda: answers_of(model), lambda *_: True)
    assert fault == ""
    assert isinstance(model.bert.encoder.layer[0].intermediate.intermediate_act_fn, nn.Identity)
    answers = answers_of(model)
    assert not are_equal(answers, expected)

    def error(those: list[Tensor]) -> float:
        return float((torch.stack(those) - torch.stack(exact)).abs().mean())

    assert error(answers) < 1.1 * error(expected)
    if kind is BertForMaskedLM:
        shared = model.get_output_embeddings().weight
        assert shared is model.get_input_embeddings().weight
        assert shared.device.type == "cpu"


@needs_kernels
def test_a_model_that_answers_otherwise_keeps_its_weights() -> None:
    model = model_of(BertForSequenceClassification)
    expected = answers_of(model)
    fault = blocked_weights.use(model, lambda: answers_of(model), lambda *_: False)
    assert "others" in fault
    assert are_equal(answers_of(model), expected)
    assert not any(weight.is_meta for weight in model.parameters())

    calls = iter([answers_of(model)])
    assert "StopIteration" in blocked_weights.use(model, lambda: next(calls), are_equal)
    assert are_equal(answers_of(model), expected)


@needs_kernels
def test_the_handlers_use_them_in_bfloat16(tmp_path: Path) -> None:
    folder = save("BertForSequenceClassification", tmp_path / "model", 7)
    config = BertConfig.from_pretrained(folder)
    config.update({**SIZES, "vocab_size": config.vocab_size})
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    body = {"inputs": [*TEXTS, TEXTS[0]], "top_k": None}
    answers = []
    for value in ("1", "0"):
        served = Handlers(folder, AMPHORA_DTYPE="bfloat16", AMPHORA_BLOCKED_WEIGHTS=value)
        weights = served.model.loaded.model.parameters()  # type: ignore[attr-defined]
        assert any(weight.is_meta for weight in weights) == (value == "1")
        answers.append([{each["label"]: each["score"] for each in own} for own in served.ask(body)])
    for one, other in zip(*answers, strict=True):
        assert one == pytest.approx(other, abs=0.02)
    with pytest.raises(ValueError, match="AMPHORA_BLOCKED_WEIGHTS is 'yes'"):
        Handlers(folder, AMPHORA_DTYPE="bfloat16", AMPHORA_BLOCKED_WEIGHTS="yes")
