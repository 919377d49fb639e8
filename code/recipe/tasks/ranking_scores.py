"""Scores of rankings: the ranks of relevant texts in a corpus, or in the list of a query."""

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
"""The scores of an evaluation of queries and a corpus."""
RERANKING = RETRIEVAL[:2]
"""The scores of an evaluation of lists."""
_AT_ONCE = 1 << 24
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Queries, and the documents to search; both are numbers of texts."""

    queries: Array
    documents: Array
    relevant: Sequence[Array]
    """The positions in `documents` of the relevant texts of each query."""
    same: Array
    """The position in `documents` of a text that equals the query and is not relevant, which the
    search leaves out; -1 for none."""


@dataclass(frozen=True, kw_only=True)
class SearchResults:
    """The ranks and scores of the texts of each query."""

    ranks: Sequence[Array]
    """The ranks of the relevant texts of each query, from 1, in ascending order. Of equal scores,
    irrelevant texts come first, so that a model with constant scores gets the lowest result."""
    right: Array
    """The highest score of a relevant text of each query."""
    wrong: Array
    """The highest score of an irrelevant text."""
    wrong_at: Array
    """The position of that document (or text of the list); -1 for none."""


def search(vectors: Array, corpus: Corpus) -> SearchResults:
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
            # Negated, so that texts whose score is NaN rank higher.
            above = [int((~(scores[row] < hit)).sum() - (~(hits < hit)).sum()) for hit in hits]
            ranks.append(np.asarray(above) + np.arange(1, len(hits) + 1))
            best_right[row] = hits[0]
        best = others.max(dim=1)
        highest.append((best_right, best.values, best.indices))
    right, wrong, wrong_at = (torch.cat(parts).numpy() for parts in zip(*highest, strict=True))
    wrong_at = np.where(np.isfinite(wrong), wrong_at, -1)
    return SearchResults(ranks=ranks, right=right, wrong=wrong, wrong_at=wrong_at)


def search_scores(results: SearchResults, corpus: Corpus) -> dict[str, float]:
    """Return the scores RETRIEVAL of sentence-transformers' InformationRetrievalEvaluator."""
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
    """The lists of texts of all queries of a split, concatenated."""

    starts: Array
    """The start of each list, then the number of samples."""
    labels: Array
    """[samples]: how relevant each text is."""

    def judged(self) -> list[int]:
        """Return the lists whose texts are not all equally relevant; only these are scored."""
        spans = zip(self.starts, self.starts[1:], strict=False)
        return [
            index for index, (start, end) in enumerate(spans) if np.ptp(self.labels[start:end]) > 0
        ]


def rank(scores: Array, lists: JudgedLists) -> SearchResults:
    """Rank the texts of each judged list by their scores [samples]."""
    ranks, right, wrong, wrong_at = [], [], [], []
    for index in lists.judged():
        start, end = lists.starts[index], lists.starts[index + 1]
        scores_of_list, labels = scores[start:end], lists.labels[start:end]
        is_relevant = labels > labels.min()
        relevant, others = np.sort(scores_of_list[is_relevant])[::-1], scores_of_list[~is_relevant]
        above = (~(others[None] < relevant[:, None])).sum(axis=1)
        ranks.append(above + np.arange(1, len(relevant) + 1))
        right.append(relevant[0])
        wrong.append(others.max())
        wrong_at.append(int(np.flatnonzero(~is_relevant)[others.argmax()]))
    return SearchResults(
        ranks=ranks,
        right=np.asarray(right),
        wrong=np.asarray(wrong),
        wrong_at=np.asarray(wrong_at, dtype=np.int64),
    )


def list_scores(scores: Array, lists: JudgedLists, hits: SearchResults) -> dict[str, float]:
    """Return the scores RERANKING of sentence-transformers' CrossEncoderRerankingEvaluator; none if
    no list can be scored."""
    judged = lists.judged()
    if not judged:
        return {}
    finite = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf).clip(-1e30, 1e30)
    gains = [
        ndcg_score(lists.labels[None, span], finite[None, span], k=CUT)
        for span in (slice(lists.starts[index], lists.starts[index + 1]) for index in judged)
    ]
    firsts = [1 / ranks[0] if ranks[0] <= CUT else 0.0 for ranks in hits.ranks]
    return dict(zip(RERANKING, (float(np.mean(gains)), float(np.mean(firsts))), strict=True))


def loss_spans(count: int, size: int) -> list[slice]:
    """Return the batches for the loss of an evaluation: as few as possible, of at most `size`
    samples and nearly equal sizes, so that each has samples to contrast."""
    batches = -(-count // size)
    ends = [number * count // batches for number in range(batches + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def mean(losses: Sequence[tuple[float, int]]) -> Mapping[str, float]:
    """Return the loss of an evaluation from (sum, samples) of each batch."""
    return {"loss": sum(loss for loss, _ in losses) / sum(count for _, count in losses)}
