"""Training with bfloat16 copies of the weights."""

from pathlib import Path

import pytest
import torch

from recipe.models.bf16_weights import Bf16Weights
from tests.recipe.training.test_resume import stop
from tests.support.jobs import Job, write
from tests.support.packed_batches import DECODERS, KINDS, gradients_of, loss_of, prepared
from tests.support.tasks import JOBS
from tests.support.tasks import write as write_rows
from tests.support.words import reviews


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses an old name of transformers
@pytest.mark.parametrize(
    ("kind", "head"),
    [*((kind, "ForSequenceClassification") for kind in KINDS), *((kind, "") for kind in DECODERS)],
)
def test_gradients_are_those_of_autocast_within_rounding(kind: str, head: str) -> None:
    model, batch = prepared(kind, head)
    exact, by_autocast = (gradients_of(model, batch, autocast=on) for on in (False, True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copies = Bf16Weights(model)
    # Two batches of a step, within the trainer's autocast, which must have no effect.
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), copies.used(0):
            assert {weight.dtype for weight in model.parameters()} == {torch.float32}
            loss_of(model, batch).backward()
    rounded = {name: w.grad / 2 for name, w in model.named_parameters() if w.grad is not None}
    assert set(rounded) == set(exact)
    assert {one.dtype for one in rounded.values()} == {torch.float32}

    def error(values: dict[str, torch.Tensor]) -> float:
        apart = sum(float((values[name] - one).square().sum()) for name, one in exact.items())
        return float((apart / sum(float(one.square().sum()) for one in exact.values())) ** 0.5)

    assert 0 < error(rounded) < 2 * error(by_autocast)
    # The weights are as before, and so is what is computed without copies.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.zero_grad()
    again = gradients_of(model, batch)
    assert all(torch.equal(value, exact[name]) for name, value in again.items())


def test_copies_follow_the_optimizer() -> None:
    model, batch = prepared("bert", "ForSequenceClassification")
    copies = Bf16Weights(model)
    losses = []
    for step in (0, 0, 1):
        with copies.used(step):
            losses.append(float(loss_of(model, batch).detach()))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(1 if "embeddings" in name else 0.5)
    assert losses[0] == losses[1] != losses[2]


ARGV = ("--epochs", "2", "--lr", "1e-3", "--batch_size", "4", "--gradient_accumulation_steps", "2",
        "--save_strategy", "steps", "--save_steps", "3", "--bf16", "True")  # fmt: skip
COPIES = ("--bf16_weights", "True")


@pytest.mark.heavy
@pytest.mark.parametrize("more", [(), ("--lora_r", "4"), ("--activation_checkpointing", "True")])
def test_a_training_resumes_bitwise_and_saves_float32(
    more: tuple[str, ...], tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": text, "label": label} for text, label in reviews(54)]
    channels = {"train": write(tmp_path / "in", rows)}
    argv = ("--model_id", str(tiny_model), *ARGV, *more)
    whole, stopped, by_autocast = (
        Job(tmp_path / name, channels, (*argv, *extra))
        for name, extra in {"whole": COPIES, "stopped": COPIES, "autocast": ()}.items()
    )
    whole.run_here()
    assert "bfloat16 copies of the float32 weights" in capsys.readouterr().out
    stop(stopped, step=5)
    stopped.run_here()
    assert "resuming from" in capsys.readouterr().out
    assert stopped.files == whole.files
    by_autocast.run_here()
    assert {weight.dtype for weight in whole.weights.values()} == {torch.float32}
    assert by_autocast.files != whole.files
    for name, weight in by_autocast.weights.items():
        torch.testing.assert_close(whole.weights[name], weight, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--bf16", "False"), "the training does not compute in bfloat16"),
        (("--task", "image-classification"), "it is not tested with models of type vit"),
    ],
)
def test_the_table_says_why_a_training_has_no_copies(
    more: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = JOBS["image-classification" if "vit" in reason else "text-classification"]
    channels = {"train": write_rows(tmp_path / "in", case.rows(16))}
    argv = ("--model_id", str(case.model(tmp_path / "start", 0.0)), "--max_steps", "1")
    Job(tmp_path, channels, (*argv, "--bf16", "True", *COPIES, *more)).run_here()
    assert f"float32, by autocast ({reason})" in capsys.readouterr().out
