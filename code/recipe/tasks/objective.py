"""What an engine trains for: how its samples are laid out, what their loss is, how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel

from recipe.batching import packing
from recipe.batching.batches import Layout, Packed, Padded, Samples
from recipe.batching.document_batches import PackedDocuments, PaddedDocuments
from recipe.batching.packing import Rows
from recipe.errors import ModelError
from recipe.models import losses, packed_decoders, packed_encoders
from recipe.tasks import evaluation
from recipe.tokenization.encoding import takes_token_types

Batches = Sequence[tuple[Samples, Rows]]
"""The samples of each of some batches."""


class Objective(Protocol):
    """What the engine asks of a task."""

    packable: Collection[str]
    """Types of models that can be packed."""

    def packs(self, model: PreTrainedModel) -> bool:
        """Whether `model` can be packed."""

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        """A layout that each of `batches` fits into, of at most `size` samples."""

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        """Let `model` take such batches."""

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """[samples]: each sample's loss, times its weight."""

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        """What the Trainer takes as its compute_metrics."""


class _Classes:
    packable: Collection[str] = packed_encoders.FAMILIES

    def packs(self, model: PreTrainedModel) -> bool:
        return packed_encoders.family_of(model.config) is not None

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        family = packed_encoders.family_of(model.config)
        typed = _has_types(model, batches)
        if packed and family is not None:
            shape = packing.shape(_lengths(batches))
            return Packed(shape, size, pad_id, family.first_position(model.config), typed=typed)
        return Padded(packing.buckets(_lengths(batches)), size, pad_id, typed=typed)

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        if packed:
            packed_encoders.take_packed(model)

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return losses.of_samples(logits, labels, smoothing)

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        return evaluation.compute_metrics()


class _NextTokens:
    packable: Collection[str] = packed_decoders.DECODERS

    def packs(self, model: PreTrainedModel) -> bool:
        return packed_decoders.can_be_packed(model.config)

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        learned = max((samples.weight(rows) for samples, rows in batches), default=1)
        if packed:
            return PackedDocuments(packing.shape(_lengths(batches)), size, pad_id, 0, learned)
        return PaddedDocuments(packing.buckets(_lengths(batches)), size, pad_id, learned)

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        packed_decoders.take_documents(model)

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return logits[:, 0]  # they were made beside the head

    def metrics(self) -> Callable[[EvalPrediction], dict[str, float]]:
        return evaluation.score_tokens


def _lengths(batches: Batches) -> list[list[int]]:
    return [samples.lengths[rows].tolist() for samples, rows in batches]


def _has_types(model: PreTrainedModel, batches: Batches) -> bool:
    """Whether the tokens of pairs have types that `model` takes.

    Raises:
        ModelError: it knows fewer types than the tokenizer gives.
    """
    typed = {id(samples): samples.types for samples, _ in batches if samples.types is not None}
    if not typed or not takes_token_types(model):
        return False
    most = max(int(types.max(initial=0)) for types in typed.values())
    known = getattr(model.config, "type_vocab_size", None)
    if known is not None and most >= known:
        raise ModelError(
            f"The tokenizer gives tokens types up to {most}, and a model of type "
            f"{model.config.model_type} knows {known}.",
            "Give the tokenizer that belongs to the model.",
        )
    return True


CLASSES: Objective = _Classes()
"""Labels of each sample; its loss is the mean over samples."""
NEXT_TOKENS: Objective = _NextTokens()
"""The learned tokens of documents; the loss is the mean over these tokens."""
