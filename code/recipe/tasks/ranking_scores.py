"""Scores of rankings: how high right texts stand among a whole corpus, or in a query's list."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import ndcg_score
from torch import Tensor
from torch.nn import functional

CUT = 10
RECALLS = (1, 10, 100)
RETRIEVAL = (f"ndcg_at_{CUT}", f"mrr_at_{CUT}", *(f"recall_at_{cut}" for cut in RECALLS))
"""What an evaluation gives of queries and a corpus."""
RERANKING = RETRIEVAL[:2]
"""What it gives of lists."""
_AT_ONCE = 1 << 24
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Queries, and the texts among which theirs are to be found; all by numbers of texts."""

    queries: Array
    documents: Array
    relevant: Sequence[Array]
    """Of each query, which of `documents` belong to it (positions)."""
    same: Array
    """Of each query, which of `documents` is the same text and does not belong to it; -1: none.
    It is not looked for."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where the texts of each query were found."""

    ranks: Sequence[Array]
    """Of each query, the ranks of what belongs to it, best first, from 1. Among equal scores what
    does not belong comes first: a model that cannot tell texts apart is to score nothing."""
    right: Array
    """The highest score of what belongs to each query."""
    wrong: Array
    """That of what does not."""
    wrong_at: Array
    """Which document (or text of the list) that is; -1 where there is none."""


def search(vectors: Array, corpus: Corpus) -> Found:
    """Rank all documents for each query by the cosine of their vectors [texts, width]."""
    known = functional.normalize(torch.from_numpy(vectors).float(), dim=-1)
    documents = known[torch.from_numpy(corpus.documents)]
    step = max(1, _AT_ONCE // len(documents))
    ranks: list[Array] = []
    highest: list[tuple[Tensor, ...]] = []
    for start in range(0, len(corpus.queries), step):
        queries = corpus.queries[start : start + step]
        scores = known[torch.from_numpy(queries)] @ documents.T
        same = torch.from_numpy(corpus.same[start : start + step])
        has_same = (same >= 0).nonzero().squeeze(1)
        scores[has_same, same[has_same]] = -torch.inf
        relevant = corpus.relevant[start : start + step]
        others = scores.clone()
        best_right = torch.empty(len(queries))
        for row, positions in enumerate(relevant):
            hits = scores[row, torch.from_numpy(positions)].sort(descending=True).values
            others[row, torch.from_numpy(positions)] = -torch.inf
            # What is no number is below nothing.
            above = [int((~(scores[row] < hit)).sum() - (~(hits < hit)).sum()) for hit in hits]
            ranks.append(np.asarray(above) + np.arange(1, len(hits) + 1))
            best_right[row] = hits[0]
        best = others.max(dim=1)
        highest.append((best_right, best.values, best.indices))
    right, wrong, wrong_at = (torch.cat(parts).numpy() for parts in zip(*highest, strict=True))
    wrong_at = np.where(np.isfinite(wrong), wrong_at, -1)
    return Found(ranks=ranks, right=right, wrong=wrong, wrong_at=wrong_at)


def of_search(results: Found, corpus: Corpus) -> dict[str, float]:
    """Return the scores RETRIEVAL, as sentence-transformers' InformationRetrievalEvaluator gives
    them."""
    gains, firsts = [], []
    recalled: dict[int, list[float]] = {cut: [] for cut in RECALLS}
    for ranks in results.ranks:
        hits = ranks[ranks <= CUT]
        ideal = 1 / np.log2(np.arange(2, min(len(ranks), CUT) + 2))
        gains.append((1 / np.log2(hits + 1)).sum() / ideal.sum())
        firsts.append(1 / ranks[0] if ranks[0] <= CUT else 0.0)
        for cut, values in recalled.items():
            values.append(float((ranks <= cut).mean()))
    means = [np.mean(gains), np.mean(firsts), *(np.mean(recall) for recall in recalled.values())]
    return {name: float(mean) for name, mean in zip(RETRIEVAL, means, strict=True)}


@dataclass(frozen=True, kw_only=True)
class JudgedLists:
    """Queries, each with texts of its own; all samples of a split, one list after the other."""

    starts: Array
    """Where each list starts, and at last where the samples end."""
    labels: Array
    """[samples]: how relevant each text is."""

    def judged(self) -> list[int]:
        """Return the lists that tell rankings apart: in which not all texts are as relevant."""
        spans = zip(self.starts, self.starts[1:], strict=False)
        return [at for at, (start, end) in enumerate(spans) if np.ptp(self.labels[start:end]) > 0]


def rank(scores: Array, lists: JudgedLists) -> Found:
    """Rank the texts of each judged list by their scores [samples]."""
    ranks, right, wrong, wrong_at = [], [], [], []
    for at in lists.judged():
        start, end = lists.starts[at], lists.starts[at + 1]
        scores_of_list, labels = scores[start:end], lists.labels[start:end]
        is_relevant = labels > labels.min()
        relevant, others = np.sort(scores_of_list[is_relevant])[::-1], scores_of_list[~is_relevant]
        above = (~(others[None] < relevant[:, None])).sum(axis=1)
        ranks.append(above + np.arange(1, len(relevant) + 1))
        right.append(relevant[0])
        wrong.append(others.max())
        wrong_at.append(int(np.flatnonzero(~is_relevant)[others.argmax()]))
    return Found(
        ranks=ranks,
        right=np.asarray(right),
        wrong=np.asarray(wrong),
        wrong_at=np.asarray(wrong_at, dtype=np.int64),
    )


def of_lists(scores: Array, lists: JudgedLists, hits: Found) -> dict[str, float]:
    """Return the scores RERANKING, as sentence-transformers' CrossEncoderRerankingEvaluator gives
    them; none where no list can be judged."""
    judged = lists.judged()
    if not judged:
        return {}
    finite = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf).clip(-1e30, 1e30)
    gains = [
        ndcg_score(lists.labels[None, span], finite[None, span], k=CUT)
        for span in (slice(lists.starts[at], lists.starts[at + 1]) for at in judged)
    ]
    firsts = [1 / ranks[0] if ranks[0] <= CUT else 0.0 for ranks in hits.ranks]
    return dict(zip(RERANKING, (float(np.mean(gains)), float(np.mean(firsts))), strict=True))


def in_batches(count: int, size: int) -> list[slice]:
    """Return the samples of an evaluation in the batches that its loss is a mean over: as few as
    there can be of at most `size`, all of nearly one size, so that none has nothing to be
    contrasted with."""
    batches = -(-count // size)
    ends = [number * count // batches for number in range(batches + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def mean(losses: Sequence[tuple[float, int]]) -> Mapping[str, float]:
    """Return the loss of an evaluation, of (sum, samples) of each batch."""
    return {"loss": sum(loss for loss, _ in losses) / sum(count for _, count in losses)}
