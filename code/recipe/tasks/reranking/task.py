"""Reranking: a score for a query and a text, by which the texts of a query are ranked."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
)

from recipe.batching import groups
from recipe.batching.groups import Groups
from recipe.batching.samples import Samples
from recipe.data import relevance, values
from recipe.data.files.part import RowGatherer
from recipe.data.files.spool import spool_tables
from recipe.data.relevance import PAIRS, QUERY, SCHEMA, SCORES, TEXTS
from recipe.errors import DataError
from recipe.models import pretrained, ranking_losses
from recipe.models.sources.origin import Origin
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.task_table import TASKS
from recipe.tasks import numbered_texts, ranking_scores
from recipe.tasks.base import (
    SHOWN_CHARS,
    EncoderObjective,
    Model,
    Task,
    Tokenizer,
    named_splits,
)
from recipe.tasks.ranking_scores import Array, JudgedLists, SearchResults
from recipe.tasks.reranking.spec import Options
from recipe.tokenization import texts as text_tokens


class RankingObjective(EncoderObjective):
    """The objective: a score for each pair, alone or compared within its list."""

    def __init__(self, listwise: bool) -> None:
        self._listwise = listwise
        self.lists: dict[str, JudgedLists] = {}
        self.last: tuple[str, Array, SearchResults] | None = None
        """The last evaluation: its split, its scores, and the search results."""

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        super().prepare(model, packed)
        ranking_losses.patch_forward_for_groups(model)

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        if logits.dim() == 3:
            return self.list_losses(logits[..., 0], labels)
        return functional.binary_cross_entropy_with_logits(
            logits[:, 0].float(), labels, reduction="none"
        )

    def list_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [lists] of logits [lists, most]; `labels` [lists, most, 2] are those of
        `ranking_losses.list_net`."""
        return ranking_losses.list_net(logits, labels)

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        scores = np.asarray(prediction.predictions)[:, 0]
        split, lists = next(
            item for item in self.lists.items() if item[1].labels is prediction.label_ids
        )
        hits = ranking_scores.rank(scores, lists)
        self.last = split, scores, hits
        if not self._listwise:
            return self.list_scores(scores, lists, hits)
        losses = []  # instead of the samples of its pairs
        for span in lists.spans():
            labels = lists.labels[span].astype(np.float32)
            labels = np.stack([labels, np.ones_like(labels)], axis=1)
            logits = torch.from_numpy(scores[span])[None]
            losses.append((float(self.list_losses(logits, torch.from_numpy(labels)[None])), 1))
        return {**ranking_scores.mean(losses), **self.list_scores(scores, lists, hits)}

    def list_scores(
        self, scores: Array, lists: JudgedLists, hits: SearchResults
    ) -> dict[str, float]:
        """Return the scores of a whole evaluation without its loss."""
        return ranking_scores.list_scores(scores, lists, hits)


class Reranking(Task):
    """Scores of texts for a query, of rows (query, text, label) or of lists."""

    options: Options
    objective: RankingObjective
    targets = frozenset({SCORES})
    sample_kind = pretrained.PAIR_OF_TEXTS

    @property
    def is_listwise(self) -> bool:
        """Return whether a sample is the list of a query, not a single pair."""
        return bool(self.options.listwise)

    @functools.cached_property
    def train(self) -> Dataset:
        return self.data.train if self.is_listwise else _pairs(self.data.train)

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(ranking_scores.RERANKING)
        self._most: float | None = None
        spec = TASKS["reranking"]
        self.data = data = relevance.load(channels, self.data_settings, spec, self._arrange)
        is_listwise = self.is_listwise
        counts = numbered_texts.counts(self.data.train)
        if is_listwise and self.data_settings.trains and counts.max(initial=1) == 1:
            raise DataError(
                "Each query of the training data has one text, and listwise=True compares the "
                "texts of a query: nothing would be learned.",
                "Leave listwise out, or give several texts for a query.",
            )
        right = int((numbered_texts.scores(self.data.train) > 0).sum())
        loss = (
            "each list as a whole (ListNet)" if is_listwise else "each pair (binary cross-entropy)"
        )
        data.notes.append(
            f"training rows: {len(counts)} queries, {counts.mean():.3g} texts each, "
            f"{right / counts.sum():.1%} of a label above 0; learned: {loss}"
        )
        self.objective = RankingObjective(is_listwise)

    def _arrange(self, kind: str, rows: pa.Table, notes: list[str]) -> pa.Table:
        """Return a row for each query, with all of its texts. Labels are scaled by those of the
        training data, which come first.

        Raises:
            DataError: labels are below 0, or there are no irrelevant texts.
        """
        if kind == PAIRS and pc.max(pc.list_value_length(rows[TEXTS])).as_py() == 1:
            raise DataError(
                "The data has relevant texts for its queries, but no irrelevant ones.",
                "Give negatives (a column called negative or negatives), or a number for each "
                "query and text (a column called label): 0 for irrelevant texts.",
            )
        lists = spool_tables(SCHEMA, _query_groups(rows))
        least, most = pc.min_max(pc.list_flatten(lists[SCORES])).as_py().values()
        if least < 0:
            raise DataError(
                f"A label is {least:g}, but labels are the relevance of texts, from 0.",
                "Give 0 for irrelevant texts.",
            )
        if self._most is None:
            if least == most:
                raise DataError(
                    f"Every label is {least:g}, from which nothing can be learned.",
                    "Give both relevant and irrelevant texts.",
                )
            self._most = 1.0 if self.is_listwise else max(1.0, most)
            if self._most > 1:
                notes.append(f"labels: divided by {self._most:g}, the highest, to lie from 0 to 1")
        if most > self._most and not self.is_listwise:
            raise DataError(
                f"A label of the evaluation data is {most:g}, and the highest of the "
                f"training data {self._most:g}.",
                "Label both in the same way.",
            )
        scaled = [
            pa.LargeListArray.from_arrays(chunk.offsets, pc.divide(chunk.values, self._most))
            for chunk in lists[SCORES].chunks
        ]
        column = pa.chunked_array(scaled, SCHEMA.field(SCORES).type)
        return lists.set_column(SCHEMA.get_field_index(SCORES), SCORES, column)

    def request_columns(self) -> dict[str, str | Sequence[str]]:
        inputs = self.data.inputs  # a pair, as classifiers read it
        return {"text": inputs[QUERY][0], "text_pair": inputs["text"][0]}

    def load(self, source: Origin) -> Model:
        architecture, settings = AutoModelForSequenceClassification, self.model_settings
        model, tokenizer = pretrained.load_head(
            architecture, source, settings, "a reranker", ["LABEL_0"]
        )
        config: Any = model.config
        config.problem_type = None
        # The activation of sentence-transformers' CrossEncoder and of this image. A listwise loss
        # does not fix the level of the logits: the sigmoid could map many of them to one score.
        name = "linear.Identity" if self.is_listwise else "activation.Sigmoid"
        config.sentence_transformers = {"activation_fn": f"torch.nn.modules.{name}"}
        return model, tokenizer

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        """Return the pairs, or the lists of training data if the loss is listwise."""
        pairs = text_tokens.samples(_pairs(split), tokenizer, max_length)
        counts = numbered_texts.counts(split)
        starts = np.concatenate([[0], np.cumsum(counts)])
        if name != "train":
            self.objective.lists[name] = JudgedLists(starts=starts, labels=pairs.labels)
        if name != "train" or not self.is_listwise:
            return pairs
        members = groups.consecutive(counts)
        is_there = members >= 0
        scores = np.where(is_there, pairs.labels[members], 0)
        labels = np.stack([scores, is_there], axis=2).astype(np.float32)
        return Groups.from_texts(pairs, members, labels)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        chosen_rows = self.train.select(rows)
        pairs = _pairs(chosen_rows) if self.is_listwise else chosen_rows
        return text_tokens.lengths(pairs, tokenizer)

    def shown(self, row: Mapping[str, Any]) -> str:
        texts = zip(row[TEXTS][:3], row[SCORES][:3], strict=True)
        scored = ", ".join(f"{score:g} {text[:SHOWN_CHARS]!r}" for text, score in texts)
        return f"{row[QUERY][:SHOWN_CHARS]!r}: {scored}"

    def about(self) -> About:
        query, text = self.request_columns().values()
        return About(
            title="Reranker",
            pipeline="text-ranking",
            purpose=f"score how well a text answers a query (`{query}`, `{text}`). Load it "
            "by sentence-transformers' `CrossEncoder(folder)`",
            metrics="A query's texts are ranked among each other; queries whose texts have all the "
            "same label are left out.",
            headline=(*ranking_scores.RERANKING, "loss"),
            library="sentence-transformers",
        )

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """Return the queries whose relevant texts have the lowest ranks."""
        if self.objective.last is None:
            return ()
        split, _, hits = self.objective.last
        data, judged = named_splits(self.data)[split], self.objective.lists[split].judged()

        def show(number: int) -> tuple[str, str, str]:
            row = data[judged[number]]
            right, wrong = (row[TEXTS][int(best[number])] for best in (hits.right, hits.wrong))
            return row[QUERY], right, wrong

        return ranking_scores.worst_queries(split, hits, show)


def _pairs(split: Dataset) -> Dataset:
    """Return a row for each query and text; its label is how relevant the text is."""

    def columns() -> Iterator[tuple[pa.Array, pa.Array, pa.Array]]:
        for some in values.tables(split):
            texts = some[TEXTS].combine_chunks()
            queries = some[QUERY].combine_chunks().take(pc.list_parent_indices(texts))
            labels = pc.list_flatten(some[SCORES]).cast(pa.float32())
            yield queries, pc.list_flatten(texts), labels

    return text_tokens.labelled_pairs(columns(), pa.float32())


def _query_groups(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of some queries at a time, grouped by query in the order of the queries' first
    rows, each text once."""
    batches = [batch[QUERY] for batch in rows.select([QUERY]).to_batches(values.CHUNK_ROWS)]
    hashes = [pd.util.hash_array(queries.to_numpy(zero_copy_only=False)) for queries in batches]
    numbers, _ = pd.factorize(np.concatenate(hashes))  # in the order of first appearance
    order = np.argsort(numbers, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(numbers[order])) + 1, len(order))
    gathering, start = RowGatherer(rows), 0
    while start < len(order):
        # Chunks hold whole queries. Different queries with the same hash are in one chunk and are
        # separated here.
        end = int(ends[min(int(np.searchsorted(ends, start + values.CHUNK_ROWS)), len(ends) - 1)])
        some = gathering.select(order[start:end]).to_pydict()
        start = end
        lists: dict[str, dict[str, float]] = {}
        firsts: dict[str, int] = {}
        for query, texts, scores, address in zip(*some.values(), strict=True):
            known = lists.setdefault(query, {})
            firsts.setdefault(query, address)
            for text, score in zip(texts, scores, strict=True):
                known[text] = max(score, known.get(text, score))
        yield relevance.table_of(
            [
                (query, list(texts), list(texts.values()), firsts[query])
                for query, texts in lists.items()
            ]
        )


TASK = Reranking
