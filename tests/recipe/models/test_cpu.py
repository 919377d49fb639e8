"""Dropout and attention on a CPU: the same functions as PyTorch's, from the same generator."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipe.models import cpu_kernels


@pytest.mark.parametrize(
    ("dtype", "p"), [(torch.float32, 0.1), (torch.bfloat16, 0.5), (torch.float16, 0.9)]
)
def test_noise_drops_its_share_and_keeps_the_mean(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    actual = cpu_kernels.noise(torch.empty(500, 401, dtype=dtype), p)
    assert (actual.shape, actual.dtype) == ((500, 401), dtype)
    count = actual.numel()
    spread = 4 * (p * (1 - p) / count) ** 0.5
    assert (actual == 0).double().mean().item() == pytest.approx(p, abs=spread)
    kept = actual[actual != 0].double()
    assert (kept == kept[0]).all()
    assert kept[0].item() == pytest.approx(1 / (1 - p), rel=max(torch.finfo(dtype).eps, 1e-4))


def test_noise_is_independent_and_drawn_from_the_generator_that_checkpoints_hold() -> None:
    torch.manual_seed(0)
    dropped = (cpu_kernels.noise(torch.empty(400_000), 0.5) == 0).double() - 0.5
    for distance in (1, 2, 3, 4, 8):
        covariance = (dropped[:-distance] * dropped[distance:]).mean().item()
        assert abs(covariance) < 4 * 0.25 / len(dropped) ** 0.5
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = cpu_kernels.noise(torch.empty(1000), 0.3)
    assert not torch.equal(cpu_kernels.noise(torch.empty(1000), 0.3), first)
    torch.set_rng_state(state)
    assert torch.equal(cpu_kernels.noise(torch.empty(1000), 0.3), first)


def test_dropout_at_its_ends_in_place_and_backward() -> None:
    values = torch.ones(3, 5)
    assert not cpu_kernels.dropout(values, 1.0).any()
    assert torch.equal(cpu_kernels.dropout(values, 1.0, training=False), values)
    assert torch.equal(cpu_kernels.dropout(values, 0.0), values)
    with pytest.raises(ValueError, match="between 0 and 1"):
        cpu_kernels.dropout(values, -0.1)
    values = torch.ones(300)
    assert cpu_kernels.dropout(values, 0.4, inplace=True) is values
    assert set(values.unique().tolist()) == {0.0, values.max().item()}
    torch.manual_seed(0)
    values = torch.ones(64, 33, requires_grad=True)
    dropped = cpu_kernels.dropout(values, 0.4)
    dropped.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, dropped.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [9, 60, 64])
def test_attention_is_pytorchs(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, length, 8, dtype=dtype)
    segments = torch.arange(length).div(5, rounding_mode="floor").expand(2, length)
    same_segment = segments[:, None, :, None] == segments[:, None, None, :]
    added = torch.zeros(same_segment.shape).masked_fill(~same_segment, torch.finfo().min)
    actual, weights = cpu_kernels.attend(nn.Module(), query, key, value, added)
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, same_segment)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert weights is None
    torch.testing.assert_close(actual, wanted.transpose(1, 2), rtol=tolerance, atol=tolerance)


def test_a_token_that_sees_nothing_sees_no_added_key_either() -> None:
    """60 keys are computed as 64: where all are masked alike, the mean is that of the 60."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 60, 8).bfloat16()
    nothing = torch.full((1, 1, 60, 60), torch.finfo(torch.float32).min)
    attended, _ = cpu_kernels.attend(nn.Module(), query, key, value, nothing)
    mean = value.float().mean(dim=2)[:, None].expand(-1, 60, -1, -1)
    torch.testing.assert_close(attended.float(), mean, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "kind",
    ["pictures", "padded", "added", "causal", "by the module", "biased", "biased, causal"],
)
@pytest.mark.parametrize(("length", "groups"), [(17, 2), (64, 1), (300, 1)])
def test_attention_of_padded_rows_is_transformers(kind: str, length: int, groups: int) -> None:
    torch.manual_seed(0)
    padding = (torch.arange(length) < torch.tensor([[length], [length // 2]]))[:, None, None]
    bias = torch.randn(1, 4, length, length, requires_grad=True)
    # What the model of a padded batch hands to its attention.
    masks: dict[str, Any] = {
        "pictures": {"attention_mask": None, "is_causal": False},
        "padded": {"attention_mask": padding},
        "added": {"attention_mask": torch.zeros(padding.shape).masked_fill(~padding, -torch.inf)},
        "causal": {"attention_mask": None, "is_causal": True},
        "by the module": {"attention_mask": None},
        "biased": {"attention_mask": padding, "position_bias": bias},
        "biased, causal": {"attention_mask": None, "position_bias": bias},
    }[kind]
    module = nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]
    heads = (4, 4 // groups, 4 // groups)
    inputs = [torch.randn(2, tensor, length, 8).bfloat16().requires_grad_() for tensor in heads]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    query, key, value = inputs
    actual, weights = cpu_kernels.attend_padded(module, query, key, value, **masks)
    query, key, value = exact
    wanted, _ = sdpa_attention_forward(module, query, key, value, **masks)
    assert weights is None
    torch.testing.assert_close(actual.float(), wanted, rtol=0.03, atol=0.03)
    for output in (actual, wanted):
        loss: Any = output.float().square().sum()
        loss.backward()
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        error = (one.grad.float() - other.grad).norm() / other.grad.norm()
        assert error < 0.02


def test_padded_rows_are_attended_by_products_of_matrices_in_bfloat16_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    usual = cpu_kernels.attend

    def attend(*args: Any, **options: Any) -> Any:
        calls.append(args[1].dtype)
        return usual(*args, **options)

    monkeypatch.setattr(cpu_kernels, "attend", attend)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).train()
    cpu_kernels.lighten(model, packed_attention=False, padded_attention=True)
    pictures = torch.randn(2, 3, 16, 16)
    model(pixel_values=pictures)
    assert not calls
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(pixel_values=pictures)
    assert calls == [torch.bfloat16]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model(pixel_values=pictures)
    assert len(calls) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_dropout_is_replaced_whether_it_is_a_layer_or_a_call(
    monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    drawn = []
    usual = cpu_kernels.noise

    def noise(reference: torch.Tensor, p: float) -> torch.Tensor:
        drawn.append(usual(reference, p))
        return drawn[-1]

    monkeypatch.setattr(cpu_kernels, "noise", noise)
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    feed = {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16}
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, **heads, **feed, dropout=0.5, pad_token_id=1)
    ).train()
    layers = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.2))
    cpu_kernels.lighten(model, packed_attention=False)
    layers(torch.ones(3))
    assert len(drawn) == 2
    ids = torch.arange(4, 12)[None]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    loss = checkpoint(forward, ids, use_reentrant=False) if checkpointing else forward(ids)
    # Embeddings of both sides; attention and what feeds forward in both, and across.
    assert len(drawn) == 2 + 7
    loss.backward()
    # What is computed again is dropped as it was.
    again = drawn[9:]
    assert len(again) == (7 if checkpointing else 0)
    assert all(map(torch.equal, drawn[2:9], again))
