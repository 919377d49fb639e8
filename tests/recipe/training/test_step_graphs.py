"""Forward and backward passes by graphs, on a CPU by a recorder that replays operations."""

from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

from recipe.models import cpu_kernels, flat_attention
from recipe.runtime import step_graphs
from recipe.training import engine
from tests.recipe.training.test_resume import stop
from tests.support.jobs import Job, write
from tests.support.replays import Replays
from tests.support.words import reviews

ARGV = ("--epochs", "2", "--lr", "1e-3", "--batch_size", "4", "--gradient_accumulation_steps", "2",
        "--save_strategy", "steps", "--save_steps", "3", "--weight_decay", "0.1")  # fmt: skip


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as on a GPU, by the CPU's operator; graphs by a recorder that is tested in their place."""
    why_not = step_graphs.why_not

    def allow_cpu(model: Any, args: Any, is_flat: bool, compiles_layers: bool) -> str | None:
        reason = why_not(model, args, is_flat, compiles_layers)
        assert reason == "graphs are for CUDA devices"
        return None if is_flat else "its batches are not rows"

    monkeypatch.setattr(flat_attention, "why_not", lambda *arguments: None)
    monkeypatch.setattr(step_graphs, "why_not", allow_cpu)
    monkeypatch.setattr(engine.Engine, "make_recorder", Replays)
    # Trainings on a CPU leave its own dropout in their process, which Dynamo does not trace.
    monkeypatch.setattr(functional, "dropout", cpu_kernels._dropout)
    Replays.made.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks each tensor for it
@pytest.mark.heavy
@pytest.mark.parametrize(
    "more",
    [
        ("--bf16", "False"),
        ("--bf16", "True", "--bf16_weights", "True"),
        ("--bf16", "False", "--compile", "True", "--torch_compile_backend", "aot_eager"),
    ],
)
def test_graphs_train_and_resume_to_the_same_weights(
    more: tuple[str, ...], as_on_a_gpu: None, tmp_path: Path, tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With dropout, accumulation, clipping, and evaluations between the steps."""
    rows = [{"text": text, "label": label} for text, label in reviews(54)]
    channels = {"train": write(tmp_path / "in", rows)}
    argv = (
        "--model_id",
        str(tiny_model),
        *ARGV,
        *more,
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
    )
    graphs = ("--cuda_graphs", "True")
    usual, whole, stopped = (
        Job(tmp_path / name, channels, (*argv, *extra))
        for name, extra in {"usual": (), "whole": graphs, "stopped": graphs}.items()
    )
    usual.run_here()
    assert not Replays.made
    whole.run_here()
    (recorder,) = Replays.made
    assert "a CUDA graph of each shape" in capsys.readouterr().out
    assert 1 <= len(recorder.recordings) <= 3
    assert recorder.replayed >= 20
    assert whole.files == usual.files
    stop(stopped, step=5)
    stopped.run_here()
    assert "resuming from" in capsys.readouterr().out
    assert stopped.files == whole.files
