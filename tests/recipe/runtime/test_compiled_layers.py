"""Layers that are compiled one at a time."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from recipe.models.bf16_weights import Bf16Weights
from recipe.runtime import compiled_layers
from recipe.runtime.compiled_layers import CompiledLayers
from tests.support.jobs import QUICK, Job, write
from tests.support.packed_batches import DECODERS, KINDS, gradients_of, make, prepared
from tests.support.words import reviews

QUICK_KINDS = ("bert", "modernbert", "llama, LoRA")


def arguments(folder: Path, **changes: Any) -> Any:
    values = {"torch_compile_backend": "eager", "torch_compile_mode": None, "fsdp": [],
              "output_dir": str(folder), "device": torch.device("cpu"), **changes}  # fmt: skip
    return SimpleNamespace(**values)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses an old name of transformers
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks each tensor for it
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.heavy] * (kind not in QUICK_KINDS))
        for kind in (*KINDS, *DECODERS)
    ],
)
def test_layers_are_whole_graphs_that_layers_alike_share(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a backend, which rounds: what Dynamo traces computes the same gradients."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, batch = prepared(kind, "ForSequenceClassification" if kind in KINDS else "")
    exact = gradients_of(model, batch)
    torch._dynamo.reset()
    counters.clear()
    layers = CompiledLayers(model, arguments(tmp_path))
    with layers.used():
        traced = gradients_of(model, batch)
    assert set(traced) == set(exact)
    for name, gradient in exact.items():
        torch.testing.assert_close(traced[name], gradient, msg=name)
    graphs = counters["stats"]["unique_graphs"]
    # The first layer's input has no gradients; ModernBERT's layers differ in norms and windows.
    assert 1 <= graphs <= 3
    again = gradients_of(model, batch)
    assert all(torch.equal(value, exact[name]) for name, value in again.items())
    copies = Bf16Weights(model)
    for _ in range(2):
        with copies.used(0), layers.used():
            gradients_of(model, batch)
    # Copies are other tensors, but of all layers alike.
    assert counters["stats"]["unique_graphs"] <= 2 * graphs
    assert not counters["graph_break"]


def test_why_layers_are_not_compiled(tmp_path: Path) -> None:
    model, other = make("bert"), torch.nn.Linear(2, 2)
    assert compiled_layers.why_not(model, arguments(tmp_path), True) is None
    padded = compiled_layers.why_not(model, arguments(tmp_path), False)
    assert padded == "batches are padded to many lengths"
    neuron = arguments(tmp_path, device=SimpleNamespace(type="neuron"))
    assert "not tested on neuron" in str(compiled_layers.why_not(model, neuron, True))
    sharded = arguments(tmp_path, fsdp=["full_shard"])
    assert compiled_layers.why_not(model, sharded, True) == "weights are sharded"
    assert "no repeated layers" in str(compiled_layers.why_not(other, arguments(tmp_path), True))
    vars(other)["peft_config"] = {"default": SimpleNamespace(use_dora=True)}
    assert "use_dora" in str(compiled_layers.why_not(other, arguments(tmp_path), True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_trains_to_the_same_losses_and_resumes_from_its_cache(
    tmp_path: Path, still_model: Path, preloaded: Mapping[str, str]
) -> None:
    rows = [{"text": text, "label": label} for text, label in reviews(60)]
    channels = {"train": write(tmp_path / "in", rows)}
    argv = ("--model_id", str(still_model), "--max_steps", "8", "--batch_size", "8", "--lr", "1e-2",
            "--bf16", "False", "--logging_steps", "1", "--max_length", "32",
            "--save_strategy", "steps", "--save_steps", "3")  # fmt: skip
    plain, whole, stopped = (
        Job(tmp_path / name, channels, (*argv, *more), {**preloaded, **QUICK})
        for name, more in (("plain", ()), ("whole", ["--compile"]), ("stopped", ["--compile"]))
    )
    plain.finish()
    whole.finish()
    assert "each layer whole, layers alike once" in whole.log
    (made,) = re.findall(r"with 0 breaks, (\d+) programs compiled and 0 found", whole.log)
    assert int(made) >= 2, "nothing was compiled"
    assert len(plain.losses) == 8
    assert whole.losses == pytest.approx(plain.losses, rel=1e-4)
    stopped.interrupt("metric step=4 {'loss'")
    assert list((stopped.checkpoints / compiled_layers.FOLDER).rglob("*.so"))
    last = stopped.finish().log
    assert "resuming from" in last
    assert "with 0 breaks, 0 programs compiled" in last
    assert stopped.files == whole.files
