"""The ranking losses of sentence-transformers, for batches with unused slots and for several
processes.

tests/recipe/models compares them with the library's, which take a batch of texts and a
SentenceTransformer and return one number; the engine needs the loss of each sample. Samples are
groups of texts (`batching.groups`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recipe.models import lora
from recipe.runtime.all_gather import gather_rows


def multiple_negatives(
    vectors: Tensor, texts: Tensor, scale: float, sizes: Sequence[int] = (), across: bool = True
) -> Tensor:
    """Return [samples]: the cross-entropy of classifying each query's positive among all texts.

    Its logits are cosines times `scale` (MultipleNegativesRankingLoss with gather_across_devices).
    Samples that share a text are not negatives of each other, as if NO_DUPLICATES had put them into
    different batches.

    Args:
        vectors: [samples, most, width]: a query, its positive, its negatives.
        texts: [samples, most]: identities of the texts, from 1; 0 where there is none.
        sizes: Lengths of prefixes of the vectors, whose losses are summed (MatryoshkaLoss); none
            for the whole vectors.
        across: Whether the texts of all processes are negatives.
    """
    with torch.autocast(vectors.device.type, enabled=False):
        mine = vectors.float()
        everyones, start = gather_rows(mine) if across else (mine, 0)
        others, _ = gather_rows(texts) if across else (texts, 0)
        shares = torch.zeros(len(texts), len(others), dtype=torch.bool, device=texts.device)
        for one in texts.T:
            for other in others.T:
                shares |= (one[:, None] == other[None]) & (one[:, None] > 0)
        rows = torch.arange(len(texts), device=texts.device)
        shares[rows, rows + start] = False
        # [samples, all samples, texts of each]; copies of a query's positive are not negatives.
        unused = shares[:, :, None] | (others[None, :, 1:] == 0)
        unused[rows, rows + start] |= others[rows + start, 1:] == others[rows + start, 1:2]
        unused[rows, rows + start, 0] = False
        losses = torch.zeros(len(texts), device=vectors.device)
        for size in sizes or (vectors.shape[-1],):
            queries = functional.normalize(mine[:, 0, :size], dim=-1)
            documents = functional.normalize(everyones[:, 1:, :size], dim=-1)
            cosines = torch.einsum("qd,spd->qsp", queries, documents) * scale
            right = cosines[rows, rows + start, 0]
            possible = cosines.masked_fill(unused, -torch.inf)
            losses = losses + possible.flatten(1).logsumexp(dim=1) - right
        return losses


def cosent(
    vectors: Tensor, labels: Tensor, scale: float, sizes: Sequence[int] = (), across: bool = True
) -> Tensor:
    """Return [samples]: the loss of the whole batch, for each sample (CoSENTLoss).

    log(1 + sum of exp(scale (cosine of i - cosine of j))) over all i whose score is lower than that
    of j.

    Args:
        vectors: [samples, 2, width].
        labels: [samples, 2]: 1 where there is a sample, and its score.
        sizes: As of `multiple_negatives`.
        across: Whether the batch spans all processes.
    """
    with torch.autocast(vectors.device.type, enabled=False):
        scores = labels.float()
        total = torch.zeros((), device=vectors.device)
        known, _ = gather_rows(scores) if across else (scores, 0)
        is_pair = (known[:, 1, None] < known[None, :, 1]) & (
            known[:, None, 0] * known[None, :, 0] > 0
        )
        for size in sizes or (vectors.shape[-1],):
            first, second = vectors.float()[:, :2, :size].unbind(dim=1)
            cosines_here = functional.cosine_similarity(first, second) * scale
            cosines, _ = gather_rows(cosines_here) if across else (cosines_here, 0)
            wrong = (cosines[:, None] - cosines[None]).masked_fill(~is_pair, -torch.inf)
            total = total + torch.cat([wrong.new_zeros(1), wrong.flatten()]).logsumexp(dim=0)
        return total.expand(len(labels))


def list_net(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [samples]: the cross-entropy between the softmax of a list's labels and that of its
    logits (ListNetLoss).

    Args:
        logits: [samples, most].
        labels: [samples, most, 2]: how relevant each text is, and 1 where there is one.
    """
    is_there = labels[..., 1] > 0
    # An unused slot has a list of one text, whose loss is 0.
    is_there[:, 0] = True
    target = labels[..., 0].float().masked_fill(~is_there, -torch.inf).softmax(dim=-1)
    chances = logits.float().masked_fill(~is_there, -torch.inf).log_softmax(dim=-1)
    return -(target * chances.masked_fill(~is_there, 0.0)).sum(dim=-1)


def patch_forward_for_groups(model: Any) -> None:
    """Let `model` also take batches of groups.

    Its logits are then [samples, most, labels]; unused slots hold the logits of another text.
    """
    inner = lora.bare(model)
    inner.forward = functools.partial(_forward, inner.forward)


def _forward(usual: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    slots = inputs.pop("slots", None)
    outputs = usual(*args, **inputs)
    if slots is not None:
        # Not by indexing, whose gradient CUDA sums in a nondeterministic order.
        outputs.logits = functional.embedding(slots, outputs.logits)
    return outputs
