"""float16 in place of float32, as on a GPU without bfloat16; here on the CPU, which has both."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FNetConfig,
    FNetForSequenceClassification,
)

from recipe.backend import loading, precision
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.saved.origin import Origin
from recipe.runtime import device
from tests.support.serving_kit import save


@pytest.fixture(autouse=True)
def gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "DEVICES", frozenset({"cpu"}))
    usual = precision.chosen

    def as_on_a_t4(environ: dict[str, str]) -> tuple[str, str, torch.dtype]:
        return usual({"AMPHORA_DTYPE": "float32", **environ})

    monkeypatch.setattr(precision, "chosen", as_on_a_t4)


def load(folder: Path, architecture: object, **environ: str) -> LoadedModel:
    return loading.load(Origin(str(folder), {}), architecture, environ)


def test_an_encoder_is_served_in_half_the_bits_and_answers_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save("BertForSequenceClassification", tmp_path)
    half = load(folder, AutoModelForSequenceClassification)
    assert half.model.dtype == torch.float16
    assert "on cpu in float16" in capsys.readouterr().out
    whole = load(folder, AutoModelForSequenceClassification, AMPHORA_DTYPE="float32")
    assert whole.model.dtype == torch.float32
    rows = [TokenRow(list(range(2, 2 + length))) for length in (3, 7, 40)]
    answers = [model.forward(rows, Reading.LABELS) for model in (half, whole)]
    for one, other in zip(*answers, strict=True):
        assert torch.allclose(one, other, atol=0.01 * float(other.abs().max()))


def test_what_overflows_stays_in_float32_with_its_own_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save("BertForSequenceClassification", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.bert.encoder.layer[0].intermediate.dense.weight.mul_(1e5)
    model.save_pretrained(folder)
    loaded = load(folder, AutoModelForSequenceClassification)
    assert loaded.model.dtype == torch.float32
    assert "on cpu in float32" in capsys.readouterr().out
    for name, weight in loaded.model.named_parameters():
        assert torch.equal(weight, dict(model.named_parameters())[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_decoder_is_served_so_only_if_it_was_published_so(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = save("LlamaForCausalLM", tmp_path)
    AutoModelForCausalLM.from_pretrained(folder).to(dtype).save_pretrained(folder)
    expected = torch.float16 if dtype == torch.float16 else torch.float32
    assert load(folder, AutoModelForCausalLM).model.dtype == expected
    whole = load(folder, AutoModelForCausalLM, AMPHORA_DTYPE="float32")
    assert whole.model.dtype == torch.float32


def test_what_bfloat16_does_not_compute_is_served_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FNet's Fourier transform knows float32 alone, and the server did not start."""
    monkeypatch.undo()  # as on a CPU with bfloat16, whatever this one has
    monkeypatch.setattr(device, "cpu_flags", lambda: {"amx_bf16"})
    folder = save("BertForSequenceClassification", tmp_path)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    FNetForSequenceClassification(FNetConfig(vocab_size=60, **size)).save_pretrained(folder)
    loaded = load(folder, AutoModelForSequenceClassification)
    assert loaded.model.dtype == torch.float32
    output = capsys.readouterr().out
    assert "precision: float32, since FNetForSequenceClassification" in output
    assert "on cpu in float32" in output
    with pytest.raises(RuntimeError, match="BFloat16"):
        load(folder, AutoModelForSequenceClassification, AMPHORA_DTYPE="bfloat16")
