"""Weights as a CPU's kernels read them: the same answers, or the plain ones are kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from recipe.runtime import blocked_weights
from tests.support.serving_kit import TEXTS, Handlers, save, tokenizer

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
    return kind(transformers.BertConfig(**SIZES, **options)).eval().to(torch.bfloat16)


@torch.inference_mode()
def answers_of(model: Any) -> list[Tensor]:
    return list(model(input_ids=IDS).logits.float())


def are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@needs_kernels
def test_products_are_the_same_to_the_bit() -> None:
    # A ReLU is not computed with the product.
    model = model_of(transformers.BertForSequenceClassification, hidden_act="relu")
    expected = answers_of(model)
    blocked_weights.reorder(model)
    assert are_equal(answers_of(model), expected)
    layer = model.bert.encoder.layer[0].intermediate
    assert layer.dense.weight.device.type == "meta", "the plain weights' memory is given back"
    assert isinstance(layer.intermediate_act_fn, nn.ReLU)
    assert model.classifier.weight.device.type == "cpu", "a narrow head is left alone"
    empty = torch.empty(0, 128, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert layer.dense(empty).shape == (0, 256)


@needs_kernels
def test_a_model_whose_head_comes_first_still_tells_its_device() -> None:
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**SIZES)
    model: Any = transformers.XLMRobertaForSequenceClassification(config).eval().bfloat16()
    assert next(iter(model.state_dict())) == "classifier.dense.weight"
    blocked_weights.reorder(model)
    assert model.device.type == "cpu"
    assert model.roberta.encoder.layer[0].intermediate.dense.weight.device.type == "meta"


@needs_kernels
@pytest.mark.parametrize(
    "kind", [transformers.BertForSequenceClassification, transformers.BertForMaskedLM]
)
def test_answers_with_gelu_are_nearer_to_those_of_float32(kind: Any) -> None:
    model = model_of(kind)
    expected = answers_of(model)
    exact = answers_of(model_of(kind).float())
    blocked_weights.reorder(model)
    assert isinstance(model.bert.encoder.layer[0].intermediate.intermediate_act_fn, nn.Identity)
    answers = answers_of(model)
    assert not are_equal(answers, expected)

    def error(those: list[Tensor]) -> float:
        return float((torch.stack(those) - torch.stack(exact)).abs().mean())

    assert error(answers) < 1.1 * error(expected)
    if kind is transformers.BertForMaskedLM:
        shared = model.get_output_embeddings().weight
        assert shared is model.get_input_embeddings().weight
        assert shared.device.type == "cpu"


@needs_kernels
def test_weights_are_restored_to_the_bit() -> None:
    model = model_of(transformers.BertForSequenceClassification)
    expected = answers_of(model)
    blocked_weights.reorder(model)()
    assert are_equal(answers_of(model), expected)
    assert not any(weight.is_meta for weight in model.parameters())


WRITERS: dict[Any, Any] = {
    transformers.GPT2LMHeadModel: transformers.GPT2Config(
        vocab_size=90, n_embd=64, n_layer=2, n_head=4, n_positions=48, bos_token_id=2,
        eos_token_id=3, pad_token_id=0, initializer_range=0.3,
    ),
    transformers.T5ForConditionalGeneration: transformers.T5Config(
        vocab_size=90, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, eos_token_id=3,
        decoder_start_token_id=0, pad_token_id=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
def test_products_in_float32_differ_by_the_order_of_sums(kind: Any) -> None:
    @torch.inference_mode()
    def scores_of(model: Any) -> list[Tensor]:
        more = {"decoder_input_ids": IDS[:, :5]} if model.config.is_encoder_decoder else {}
        return list(model(input_ids=IDS, **more).logits)

    torch.manual_seed(0)
    model = kind(WRITERS[kind]).eval()
    expected = scores_of(model)
    blocked_weights.reorder(model)()
    assert are_equal(scores_of(model), expected), "weights are laid out and back without a change"
    blocked_weights.reorder(model)
    for one, other in zip(scores_of(model), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    laid_out = [name for name, weight in model.named_parameters() if weight.is_meta]
    # A head that is the embedding, too, stays; GPT-2's layers hold their weights the other way.
    heads = {"lm_head.weight", "shared.weight", "transformer.wte.weight"}
    assert len(laid_out) >= 8 and not heads & set(laid_out)


def test_texts_in_float32_are_those_of_the_plain_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(
        WRITERS[transformers.T5ForConditionalGeneration]
    ).save_pretrained(tmp_path)
    tokenizer(max_length=48).save_pretrained(tmp_path)
    body = {"inputs": TEXTS, "parameters": {"max_new_tokens": 9, "num_beams": 2}}
    answers = []
    for is_faster in (True, False):
        monkeypatch.setattr(blocked_weights, "_is_faster", lambda faster=is_faster: faster)
        served = Handlers(tmp_path)
        weights = served.model.loaded.model.parameters()  # type: ignore[attr-defined]
        assert any(weight.is_meta for weight in weights) == is_faster
        answers.append(served.ask(body))
    assert answers[0] == answers[1]


def test_it_is_left_out_where_it_does_not_go_or_gains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(1, 1)
    monkeypatch.setattr(blocked_weights, "_is_faster", lambda: False)
    assert "as fast" in str(blocked_weights.why_not(model, torch.float32, {}))
    assert "float32" in str(blocked_weights.why_not(model, torch.float16, {}))


@needs_kernels
def test_the_handlers_use_them_in_bfloat16(tmp_path: Path) -> None:
    folder = save("BertForSequenceClassification", tmp_path / "model", 7)
    config = transformers.BertConfig.from_pretrained(folder)
    config.update({**SIZES, "vocab_size": config.vocab_size})
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    body = {"inputs": [*TEXTS, TEXTS[0]], "top_k": None}
    answers = []
    for value in ("1", "0"):
        served = Handlers(folder, AMPHORA_DTYPE="bfloat16", AMPHORA_BLOCKED_WEIGHTS=value)
        weights = served.model.loaded.model.parameters()  # type: ignore[attr-defined]
        assert any(weight.is_meta for weight in weights) == (value == "1")
        answers.append(
            [{entry["label"]: entry["score"] for entry in entries} for entries in served.ask(body)]
        )
    for one, other in zip(*answers, strict=True):
        assert one == pytest.approx(other, abs=0.02)
    with pytest.raises(ValueError, match="AMPHORA_BLOCKED_WEIGHTS is 'yes'"):
        Handlers(folder, AMPHORA_DTYPE="bfloat16", AMPHORA_BLOCKED_WEIGHTS="yes")
