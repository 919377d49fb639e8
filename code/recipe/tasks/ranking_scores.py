"""Scores of rankings: the ranks of relevant texts in a corpus, or in the list of a query."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import ndcg_score
from torch.nn import functional

from recipe.reports.section import Section

CUT = 10
RECALLS = (1, 10, 100)
RETRIEVAL = (f"ndcg_at_{CUT}", f"mrr_at_{CUT}", *(f"recall_at_{cut}" for cut in RECALLS))
"""The scores of an evaluation of queries and a corpus."""
RERANKING = RETRIEVAL[:2]
"""The scores of an evaluation of lists."""
_CHUNK_SCORES = 1 << 24
_WORST = 12
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

    @classmethod
    def from_members(cls, members: Array, identities: Array) -> Corpus:
        """Return the corpus of all texts but queries.

        Args:
            members: [rows, most]: a query, a relevant text and others, by numbers; -1 for none.
            identities: [texts]: which texts are equal.
        """
        relevant_texts: dict[int, list[int]] = {}
        for query, text in members[:, :2].tolist():
            relevant_texts.setdefault(query, []).append(text)
        queries, others = np.asarray([*relevant_texts]), members[:, 1:]
        documents = np.unique(others[others >= 0])
        positions = np.full(int(identities.max()) + 1, -1)
        positions[identities[documents]] = np.arange(len(documents))
        relevant = [
            np.searchsorted(documents, [*dict.fromkeys(texts)]) for texts in relevant_texts.values()
        ]
        same = positions[identities[queries]]
        same[[position in some for position, some in zip(same, relevant, strict=True)]] = -1
        return cls(queries=queries, documents=documents, relevant=relevant, same=same)


@dataclass(frozen=True, kw_only=True)
class SearchResults:
    """The ranks of the texts of each query."""

    ranks: Sequence[Array]
    """The ranks of the relevant texts of each query, from 1, in ascending order. Of equal scores,
    irrelevant texts come first, so that a model with constant scores gets the lowest result."""
    right: Array
    """[queries]: the position of the best relevant text, among the documents or in the list."""
    wrong: Array
    """[queries]: the position of the best irrelevant text."""


def _results(queries: Iterable[tuple[Array, Array]]) -> SearchResults:
    """Rank texts for each query, given their scores and the positions of the relevant ones."""
    ranks, right, wrong = [], [], []
    for scores, relevant in queries:
        hits, others = np.sort(scores[relevant])[::-1], scores.copy()
        others[relevant] = -np.inf
        # Negated, so that texts whose score is NaN rank higher.
        above = [int((~(scores < hit)).sum() - (~(hits < hit)).sum()) for hit in hits]
        ranks.append(np.asarray(above) + np.arange(1, len(hits) + 1))
        right.append(relevant[scores[relevant].argmax()])
        wrong.append(others.argmax())
    return SearchResults(ranks=ranks, right=np.asarray(right), wrong=np.asarray(wrong))


def worst_queries(
    split: str, results: SearchResults, show: Callable[[int], tuple[str, str, str]]
) -> list[Section]:
    """Return the report's section on the queries whose best relevant text has the lowest ranks.

    Args:
        show: Returns a query (by its number), and its best relevant and irrelevant texts.
    """
    if not results.ranks:
        return []
    firsts = np.asarray([ranks[0] for ranks in results.ranks])
    worst = [row for row in np.argsort(-firsts, kind="stable")[:_WORST] if firsts[row] > 1]
    return [
        Section(
            title=f"Worst queries, {split} data",
            note=f"{(firsts > 1).sum()} of {len(firsts)} have an irrelevant text ranked first.",
            columns=("rank", "query", "right text", "wrong text"),
            rows=[[int(firsts[row]), *show(int(row))] for row in worst],
        )
    ]


def search(vectors: Array, corpus: Corpus) -> SearchResults:
    """Rank all documents for each query by the cosine of their vectors [texts, width]."""
    known = functional.normalize(torch.from_numpy(vectors).float(), dim=-1)
    documents = known[torch.from_numpy(corpus.documents)]
    step = max(1, _CHUNK_SCORES // len(documents))

    def queries() -> Iterator[tuple[Array, Array]]:
        for start in range(0, len(corpus.queries), step):
            some = torch.from_numpy(corpus.queries[start : start + step])
            for row, scores in enumerate((known[some] @ documents.T).numpy(), start):
                if corpus.same[row] >= 0:
                    scores[corpus.same[row]] = -np.inf
                yield scores, corpus.relevant[row]

    return _results(queries())


def search_scores(results: SearchResults) -> dict[str, float]:
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

    def spans(self) -> list[slice]:
        """Return the samples of each list."""
        return [slice(*ends) for ends in itertools.pairwise(self.starts.tolist())]

    def judged(self) -> list[int]:
        """Return the lists whose texts are not all equally relevant; only these are scored."""
        spans = enumerate(self.spans())
        return [index for index, span in spans if np.ptp(self.labels[span]) > 0]


def rank(scores: Array, lists: JudgedLists) -> SearchResults:
    """Rank the texts of each judged list by their scores [samples]."""
    spans = lists.spans()
    judged_values = ((scores[spans[index]], lists.labels[spans[index]]) for index in lists.judged())
    return _results(
        (values, np.flatnonzero(labels > labels.min())) for values, labels in judged_values
    )


def list_scores(scores: Array, lists: JudgedLists, hits: SearchResults) -> dict[str, float]:
    """Return the scores RERANKING of sentence-transformers' CrossEncoderRerankingEvaluator; none if
    no list can be scored."""
    judged, spans = lists.judged(), lists.spans()
    if not judged:
        return {}
    finite = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf).clip(-1e30, 1e30)
    gains = [
        ndcg_score(lists.labels[None, span], finite[None, span], k=CUT)
        for span in (spans[index] for index in judged)
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
