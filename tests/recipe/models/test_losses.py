"""What settings of a training do to its loss and its weights, not only that they are taken."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recipe.models import ranking_losses
from recipe.tasks import classifiers
from tests.support.packed_batches import engine


def test_smoothing_gives_a_share_of_the_target_to_all_classes() -> None:
    logits, labels = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]), torch.tensor([0, 1])
    target = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    expected = -(target * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(classifiers.sample_losses(logits, labels, smoothing=0.3), expected)


def test_the_loss_of_several_numbers_is_that_of_transformers() -> None:
    logits, numbers = (
        torch.tensor([[2.0, 0.0], [0.5, 3.0]]),
        torch.tensor([[1.0, 9.0], [-2.0, 3.5]]),
    )
    losses = classifiers.sample_losses(logits, numbers, are_numbers=True)
    assert losses.shape == (2,)
    torch.testing.assert_close(losses.mean(), torch.nn.MSELoss()(logits, numbers))


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


# transformers 5.23 has a new name for it, which transformers 4 does not know.
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_gradient_checkpointing_changes_no_weight(tmp_path: Path) -> None:
    trained = []
    for is_requested in (False, True):
        trainer = engine(tmp_path, gradient_checkpointing=is_requested)
        torch.manual_seed(5)
        trainer.train()
        name, modules = "gradient_checkpointing", trainer.model.modules()
        assert {getattr(m, name) for m in modules if hasattr(m, name)} == {is_requested}
        trained.append(list(trainer.model.parameters()))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.heavy
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


def vectors_of(samples: int, most: int, width: int = 16) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(samples, most, width, requires_grad=True)


def compare(ours: Tensor, theirs: Tensor, vectors: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(ours, vectors, retain_graph=True)
    (other,) = torch.autograd.grad(theirs, vectors)
    assert other.abs().max() > 1e-3
    torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


def library(name: str, **options: Any) -> Any:
    from sentence_transformers.sentence_transformer import losses

    return getattr(losses, name)(model=None, **options)


@pytest.mark.parametrize(
    ("most", "scale", "sizes"), [(2, 20.0, ()), (5, 50.0, ()), (3, 20.0, (16, 8, 4))]
)
def test_multiple_negatives_are_the_librarys(
    most: int, scale: float, sizes: tuple[int, ...]
) -> None:
    """Of several sizes, MatryoshkaLoss sums the losses."""
    vectors = vectors_of(9, most)
    texts = torch.arange(1, 9 * most + 1).reshape(9, most)
    ours = ranking_losses.multiple_negatives(vectors, texts, scale, sizes).mean()
    loss = library("MultipleNegativesRankingLoss", scale=scale)
    theirs = sum(
        (
            loss.compute_loss_from_embeddings([text[:, :size] for text in vectors.unbind(1)], None)
            for size in sizes or (16,)
        ),
        torch.zeros(()),
    )
    compare(ours, theirs, vectors)


def test_rows_that_share_a_text_are_as_if_in_different_batches() -> None:
    vectors = vectors_of(4, 2)
    # The first two rows have one text in common, the query of one and the text of the other.
    texts = torch.tensor([[1, 2], [2, 3], [4, 5], [6, 7]])
    ours = ranking_losses.multiple_negatives(vectors, texts, 20.0)
    loss = library("MultipleNegativesRankingLoss")
    for left_out, row in ((1, 0), (0, 1)):
        kept = [index for index in range(4) if index != left_out]
        kept_vectors = vectors[kept]
        cosines = torch.nn.functional.cosine_similarity(
            kept_vectors[:, None, 0], kept_vectors[None, :, 1], dim=-1
        )
        theirs = torch.nn.functional.cross_entropy(20 * cosines, torch.arange(3), reduction="none")
        torch.testing.assert_close(ours[row], theirs[kept.index(row)])
        whole = loss.compute_loss_from_embeddings([kept_vectors[:, 0], kept_vectors[:, 1]], None)
        torch.testing.assert_close(theirs.mean(), whole)


def test_what_is_not_there_is_no_negative() -> None:
    vectors = vectors_of(5, 4)
    texts = torch.arange(1, 21).reshape(5, 4)
    some = texts.clone()
    some[0, 3] = 0  # the first row has a negative less
    some[4] = 0  # the last place holds no row
    ours = ranking_losses.multiple_negatives(vectors, some, 20.0)
    known = torch.nn.functional.normalize(vectors, dim=-1)
    documents = torch.cat([known[0, 1:3], *known[1:4, 1:]])
    for row, right in enumerate((0, 2, 5, 8)):
        logits = 20 * known[row, 0] @ documents.T
        torch.testing.assert_close(ours[row], logits.logsumexp(0) - logits[right])
    assert ours.isfinite().all()
    (gradient,) = torch.autograd.grad(ours[:4].sum(), vectors)
    assert gradient[4].abs().max() == gradient[0, 3].abs().max() == 0
    # A negative that is the right text again is none either.
    again = texts.clone()
    again[0, 2] = again[0, 1]
    less = ranking_losses.multiple_negatives(vectors, again, 1.0)[0]
    assert less < ranking_losses.multiple_negatives(vectors, texts, 1.0)[0] - 0.01


@pytest.mark.parametrize(("sizes", "scale"), [((), 50.0), ((16, 4), 20.0)])
def test_cosent_is_the_librarys(sizes: tuple[int, ...], scale: float) -> None:
    vectors = vectors_of(8, 2)
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 1.0, 0.0, 0.3, 0.9])
    labels = torch.stack([torch.ones(8), scores], dim=1)
    padded = torch.cat([labels, torch.zeros(2, 2)])
    more = torch.cat([vectors, torch.randn(2, 2, 16)])
    ours = ranking_losses.cosent(more, padded, scale, sizes)
    assert ours.shape == (10,)
    loss = library("CoSENTLoss", scale=scale)
    theirs = sum(
        (
            loss.compute_loss_from_embeddings(
                [vectors_of_text[:, :size] for vectors_of_text in vectors.unbind(1)], scores
            )
            for size in sizes or (16,)
        ),
        torch.zeros(()),
    )
    compare(ours[0], theirs, vectors)


def test_list_net_is_the_librarys() -> None:
    from sentence_transformers.cross_encoder import losses

    class Scores(torch.nn.Module):
        """A model that gives the logits it has."""

        num_labels, device = 1, torch.device("cpu")

        def preprocess(self, pairs: Any, **options: Any) -> dict[str, Any]:
            return {"texts": torch.tensor([int(text) for _, text in pairs])}

        def forward(self, features: Any) -> dict[str, Tensor]:
            return {"scores": flat[features["texts"]]}

    torch.manual_seed(3)
    flat = torch.randn(9, requires_grad=True)
    counts, labels = [4, 2, 3], torch.tensor([1.0, 0, 0, 0.5, 0, 1, 2, 0, 0])
    texts = [
        [str(n) for n in vectors_of_text.tolist()]
        for vectors_of_text in torch.arange(9).split(counts)
    ]
    loss: Any = losses.ListNetLoss(model=Scores())  # type: ignore[arg-type]
    theirs = loss([["a", "b", "c"], texts], list(labels.split(counts)))
    pad = torch.nn.utils.rnn.pad_sequence
    logits = pad(list(flat.split(counts)), batch_first=True, padding_value=99.0)
    wanted = pad(list(labels.split(counts)), batch_first=True)
    there = pad([torch.ones(n) for n in counts], batch_first=True)
    both = torch.cat([torch.stack([wanted, there], dim=2), torch.zeros(1, 4, 2)])
    ours = ranking_losses.list_net(torch.cat([logits, torch.zeros(1, 4)]), both)
    assert ours[3] == 0
    torch.testing.assert_close(ours[:3].mean(), theirs, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(ours.sum() / 3, flat, retain_graph=True)
    (other,) = torch.autograd.grad(theirs, flat)
    torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6)
