"""What settings of a training do to its loss and its weights, not only that they are taken."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.errors import HyperparameterError
from recipe.models import losses
from tests.support.packed_batches import engine
from tests.support.refusals import refused


def test_smoothing_gives_a_share_of_the_target_to_all_classes() -> None:
    logits, labels = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]), torch.tensor([0, 1])
    target = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    expected = -(target * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(losses.sample_losses(logits, labels, smoothing=0.3), expected)


def test_class_weights_weigh_each_sample_in_the_loss(tmp_path: Path) -> None:
    weights = [1.0, 5.0, 0.0]
    results = {}
    for name, given in (("plain", None), ("weighted", weights)):
        trainer = engine(tmp_path, given)
        trainer.model.eval()
        batch = next(iter(trainer.get_train_dataloader()))
        _, sample_losses, real = trainer._losses(trainer.model, batch)
        results[name] = (
            float(trainer.compute_loss(trainer.model, batch).detach()),
            sample_losses[real],
        )
        labels = batch["labels"][real]
    loss, sample_losses = results["plain"]
    assert loss == pytest.approx(float(sample_losses.detach().mean()))
    weighted = (sample_losses * torch.tensor(weights)[labels]).detach().mean()
    assert results["weighted"][0] == pytest.approx(float(weighted))
    assert loss != pytest.approx(float(weighted))


def test_an_optimizer_of_another_package_is_named(tmp_path: Path) -> None:
    with refused(HyperparameterError, "optim has value 'lomo'", "install"):
        engine(tmp_path, optim="lomo").create_optimizer()


# transformers 5.23 has a new name for it, which transformers 4 does not know.
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_gradient_checkpointing_changes_no_weight(tmp_path: Path) -> None:
    trained = []
    for is_requested in (False, True):
        trainer = engine(tmp_path, gradient_checkpointing=is_requested)
        torch.manual_seed(5)
        trainer.train()
        layers = [
            module
            for module in trainer.model.modules()
            if hasattr(module, "gradient_checkpointing")
        ]
        assert layers
        assert all(layer.gradient_checkpointing is is_requested for layer in layers)
        trained.append(list(trainer.model.parameters()))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.fixture
def handlers() -> Iterator[None]:
    """What a training does on SIGTERM ends with the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.heavy
@pytest.mark.usefixtures("handlers")
def test_the_best_weights_are_those_that_are_kept(tmp_path: Path) -> None:
    trainer = engine(
        tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        save_total_limit=2, load_best_model_at_end=True,
        # The first one, as training lowers it.
        metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trainer.run()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-8"}
    best, last = (
        load_file(tmp_path / name / "model.safetensors")
        for name in ("checkpoint-2", "checkpoint-8")
    )
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, best[name]), name
    assert not torch.equal(best["classifier.weight"], last["classifier.weight"])
