"""Sentence embedding: similar vectors for texts that belong together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional
from transformers import EvalPrediction, PreTrainedModel, Trainer

from recipe.batching import groups
from recipe.batching.batches import Layout, Packed
from recipe.batching.groups import Groups
from recipe.batching.samples import Samples
from recipe.data import relevance
from recipe.data.column_names import TEXT
from recipe.data.files.spool import spooled_rows
from recipe.data.relevance import LISTS, PAIRS, QUERY, SCORED, SCORES, TEXTS
from recipe.errors import DataError, HyperparameterError
from recipe.models import pretrained, ranking_losses
from recipe.models.pretrained import Source
from recipe.reports import figures
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.runtime import xla
from recipe.task_table import TASKS
from recipe.tasks import evaluation, numbered_texts, ranking_scores
from recipe.tasks.base import (
    SHOWN_CHARS,
    Batches,
    EncoderObjective,
    Model,
    Task,
    Tokenizer,
    text_layout,
)
from recipe.tasks.ranking_scores import Corpus, SearchResults
from recipe.tasks.sentence_embedding import model as sentence_encoder
from recipe.tasks.sentence_embedding.spec import Options
from recipe.tokenization import encoding
from recipe.tokenization import texts as text_tokens

SIMILARITY = ("spearman", "pearson")
"""The scores of an evaluation of scored pairs."""
_AT_ONCE = 10_000
_CONTRASTED = 64
"""The most rows that an evaluation's loss contrasts with each other. It is fixed, so that the loss
does not depend on the batches and processes of training."""
_SPLITS = ("evaluation", "test")
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """The relations between the texts of one split; texts are numbers in its samples."""

    members: Array
    """[rows, most]: the texts of each row; -1 for none."""
    labels: Array
    """[rows, ...]: the inputs of the losses in addition to the vectors."""
    corpus: Corpus | None
    """The corpus to search, for pairs; None for scored pairs."""
    texts: Dataset


class EmbeddingObjective(EncoderObjective):
    """The objective: texts that belong together have similar vectors."""

    couples_samples = True
    """The samples of a batch are each other's negatives, so the split of a step into batches
    matters."""

    def __init__(self, kind: str, scale: float, at_once: int | None) -> None:
        self._kind, self._scale, self._at_once = kind, scale, at_once
        self._parts = 1
        self.sizes: tuple[int, ...] = ()
        """The prefix lengths of vectors that are learned; none for whole vectors only."""
        self.judged: dict[str, _Judged] = {}
        self.last: tuple[str, Array, SearchResults | None] | None = None
        """The last evaluation: its split, its vectors, and the search results."""

    def packs(self, model: PreTrainedModel) -> bool:
        return sentence_encoder.packs(model)

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        texts = groups.text_batches(batches)
        # Batches are divided into parts between blocks.
        in_blocks = self._at_once is not None
        inner = text_layout(model, packed, size, pad_id, texts, in_blocks)
        if not any(isinstance(samples, Groups) for samples, _ in batches):
            return inner
        laid_out = groups.layout(inner, size, batches)
        texts_laid = laid_out.texts
        rows = texts_laid.shape.rows if isinstance(texts_laid, Packed) else texts_laid.size
        self._parts = min(-(-size // (self._at_once or size)), rows)
        return laid_out

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        if self._at_once is not None and xla.is_used():
            raise HyperparameterError(
                f"Hyperparameter mini_batch_size has value {self._at_once}, which is not computed "
                "by torch-xla.",
                "Leave it out, and lower per_device_train_batch_size.",
            )
        sentence_encoder.patch_forward_for_texts(model, self._parts)
        ranking_losses.patch_forward_for_groups(model)

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        if logits.dim() == 2:  # of an evaluation, whose loss needs all vectors
            return logits.new_zeros(len(logits), dtype=torch.float32)
        return self._row_losses(logits, labels, across=True)

    def _row_losses(self, vectors: Tensor, labels: Tensor, across: bool) -> Tensor:
        if self._kind == SCORED:
            return ranking_losses.cosent(vectors, labels, self._scale, self.sizes, across)
        return ranking_losses.multiple_negatives(vectors, labels, self._scale, self.sizes, across)

    @torch.no_grad()
    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        vectors = np.asarray(prediction.predictions)
        split = _SPLITS[int(np.asarray(prediction.label_ids)[0])]
        judged, known = self.judged[split], torch.from_numpy(vectors)
        losses = []
        for span in ranking_scores.loss_spans(len(judged.members), _CONTRASTED):
            members = torch.from_numpy(judged.members[span])
            labels = torch.from_numpy(judged.labels[span])
            of_rows = self._row_losses(known[members.clamp(min=0)], labels, across=False)
            losses.append((float(of_rows.sum()), len(of_rows)))
        hits = None
        if judged.corpus is not None:
            hits = ranking_scores.search(vectors, judged.corpus)
            scores = ranking_scores.search_scores(hits, judged.corpus)
        else:
            numbers = evaluation.score_numbers(_cosines(vectors, judged), judged.labels[:, 1])
            scores = {name: numbers[name] for name in SIMILARITY}
        self.last = split, vectors, hits
        return {**ranking_scores.mean(losses), **scores}


def _cosines(vectors: Array, judged: _Judged) -> Array:
    first, second = (torch.from_numpy(vectors[judged.members[:, side]]) for side in (0, 1))
    return functional.cosine_similarity(first, second).numpy()


class SentenceEmbedding(Task):
    """Vectors of texts, of pairs, triplets, queries with negatives, or pairs with scores."""

    options: Options
    objective: EmbeddingObjective
    data: relevance.Relevance

    def read(self, channels: Mapping[str, Path]) -> None:
        settings = self.data_settings
        if self.model_settings.lora_r is not None and self.model_settings.lora_save == "adapter":
            raise HyperparameterError(
                "Hyperparameter lora_save has value 'adapter', but a sentence embedding model "
                "is saved whole, with its pooling.",
                "Leave it out: adapters are merged.",
            )
        self.data = relevance.load(channels, settings, TASKS["sentence-embedding"], arrange)
        self.train, self.notes = self.data.train, [*self.data.notes]
        size = settings.per_device_train_batch_size
        if size == 1 and numbered_texts.counts(self.train).max(initial=1) == 1:
            raise HyperparameterError(
                "Hyperparameter per_device_train_batch_size has value 1, and a row without "
                "negatives is contrasted with the others of its batch: nothing would be learned.",
                "Give 2 or more.",
            )
        self.check_best(SIMILARITY if self.data.kind == SCORED else ranking_scores.RETRIEVAL)
        loss = "CoSENT, over all pairs of the batch, of all processes"
        if self.data.kind == PAIRS:
            loss = (
                "multiple negatives ranking; a row's negatives are all texts of the batch, of all "
                "processes, but those of rows with a text in common (as NO_DUPLICATES)"
            )
        self.notes.append(f"loss: {loss}")
        self.objective = EmbeddingObjective(
            self.data.kind, self.options.scale, self.options.mini_batch_size
        )
        self._prompts = ("", "")
        self._sentences: Any = None
        self._max_length = 0

    def load(self, source: Source) -> Model:
        """Return the encoder with its pooling and further modules."""
        model, tokenizer, self._sentences = sentence_encoder.load(source, self.model_settings)
        self._prompts = sentence_encoder.prompts(
            self._sentences,
            self.options.query_prompt,
            self.options.document_prompt,
        )
        width = int(self._sentences.get_embedding_dimension())
        requested = self.options.matryoshka_dims
        if requested is not None:
            try:
                sizes = {int(size) for size in requested.strip("[]() ").split(",")}
            except ValueError:
                sizes = {0}
            if min(sizes) < 1 or max(sizes) > width:
                raise HyperparameterError(
                    f"Hyperparameter matryoshka_dims has value {requested!r}, and the model's "
                    f"vectors have {width} numbers.",
                    f"Give whole numbers from 1 to {width} with commas: "
                    f"{width},{max(1, width // 2)}.",
                )
            self.objective.sizes = tuple(sorted({*sizes, width}, reverse=True))
        return model, tokenizer

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which texts are cut: the model's own, unless max_length is given."""
        known = self._sentences.max_seq_length
        requested = self.data_settings.max_length or known
        self._max_length = pretrained.longest_input(model, tokenizer, requested)
        return self._max_length

    def tokenise(self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int) -> Samples:
        """Return the rows of training data, or each text of evaluation data once, for which the
        objective gets the rows, and the corpus of pairs."""
        number = 0 if name == "train" else _SPLITS.index(name)
        texts = numbered_texts.numbered(split, self._prompts, number)
        if self.data.kind == SCORED:
            scores = numbered_texts.scores(split)
            labels = np.stack([np.ones_like(scores), scores], axis=1)
        else:  # which texts are the same; the last one for -1
            labels = np.append(texts.identities, 0)[texts.members]
        tokens = text_tokens.samples(texts.texts, tokenizer, max_length)
        if name == "train":
            return Groups.from_texts(tokens, texts.members, labels)
        corpus = None
        if self.data.kind == PAIRS:
            belongs: dict[int, dict[int, None]] = {}
            for query, text in texts.members[:, :2].tolist():
                belongs.setdefault(query, {}).setdefault(text)
            documents = np.unique(texts.members[:, 1:][texts.members[:, 1:] >= 0])
            known = texts.identities
            position_of_text = {int(known[number]): row for row, number in enumerate(documents)}
            same = []
            for query, of_query in belongs.items():
                position = position_of_text.get(int(known[query]), -1)
                is_relevant = position >= 0 and int(documents[position]) in of_query
                same.append(-1 if is_relevant else position)
            corpus = Corpus(
                queries=np.asarray(list(belongs)),
                documents=documents,
                relevant=[np.searchsorted(documents, [*some]) for some in belongs.values()],
                same=np.asarray(same),
            )
        self.objective.judged[name] = _Judged(
            members=texts.members, labels=labels, corpus=corpus, texts=texts.texts
        )
        return tokens

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        chosen_rows, (query, document) = self.train.select(rows), self._prompts
        texts = [query + text for text in chosen_rows[QUERY]]
        texts += [document + text for texts_of_row in chosen_rows[TEXTS] for text in texts_of_row]
        return [len(ids) for ids in encoding.encode(tokenizer, texts, encoding.UNCUT)]

    def shown(self, row: Mapping[str, Any]) -> str:
        texts = " + ".join(repr(text[:SHOWN_CHARS]) for text in [row[QUERY], *row[TEXTS]][:4])
        return f"{row[SCORES][0]:g}: {texts}" if self.data.kind == SCORED else texts

    def about(self) -> About:
        is_scored = self.data.kind == SCORED
        scores = "For each query, its texts are searched among all texts of the evaluation data."
        if is_scored:
            scores = "Correlations are those of the cosines with the data's scores."
        sizes = self.objective.sizes
        cut = f" Vectors may be cut to {', '.join(map(str, sizes[1:]))} numbers." * bool(sizes[1:])
        return About(
            title="Sentence embedding model",
            pipeline="sentence-similarity",
            purpose="embed texts in vectors whose cosines measure similarity. Load it by "
            "`SentenceTransformer(folder)`",
            metrics=scores + cut,
            headline=(*(SIMILARITY if is_scored else ranking_scores.RETRIEVAL[:3]), "loss"),
            library="sentence-transformers",
        )

    def save(
        self,
        model: Any,
        weights: Mapping[str, Any] | None,
        tokenizer: Tokenizer,
        folder: Path,
    ) -> None:
        """Write a folder of sentence-transformers, which AutoModel also reads."""
        sentence_encoder.save(
            self._sentences, model, weights, self._max_length, folder, self.model_settings
        )

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """Return the ranks of relevant texts, or a plot of cosines by score."""
        if self.objective.last is None:
            return ()
        split, vectors, hits = self.objective.last
        judged = self.objective.judged[split]
        corpus = judged.corpus
        if hits is None or corpus is None:
            draw = functools.partial(
                figures.scatter, judged.labels[:, 1], _cosines(vectors, judged)
            )
            return [Section(title=f"Cosines by score, {split} data", figure=("cosines", draw))]

        def show(query: int) -> tuple[str, str, str]:
            relevant = corpus.documents[corpus.relevant[query]]
            near = vectors[relevant] @ vectors[corpus.queries[query]]
            other = corpus.documents[hits.wrong_at[query]]
            numbers = corpus.queries[query], relevant[int(near.argmax())], other
            query_text, right, wrong = (judged.texts[int(number)][TEXT] for number in numbers)
            return query_text, right, wrong

        return figures.ranking_sections(split, hits.ranks, hits.right, hits.wrong, show)


def arrange(kind: str, rows: pa.Table, notes: list[str]) -> tuple[str, pa.Table]:
    """Return pairs for lists: texts with a label above 0 belong to the query, texts with 0 do not.

    Raises:
        DataError: no text has a label above 0.
    """
    if kind != LISTS:
        return kind, rows
    lost = 0

    def pairs() -> Iterator[dict[str, Any]]:
        nonlocal lost
        for batch in rows.to_batches(_AT_ONCE):
            for row in batch.to_pylist():
                labelled = list(zip(row[TEXTS], row[SCORES], strict=True))
                wrong = [text for text, score in labelled if score <= 0]
                right = [text for text, score in labelled if score > 0]
                lost += not right
                scores = [1.0, *[0.0] * len(wrong)]
                for text in right:
                    yield {QUERY: row[QUERY], TEXTS: [text, *wrong], SCORES: scores}

    table = spooled_rows(relevance.SCHEMA, pairs())
    if not table.num_rows:
        raise DataError("No text of the lists has a label above 0.", "Give labels above 0.")
    notes.append("lists: texts with a label above 0 belong to the query, the others do not")
    if lost:
        notes.append(f"{lost} lists have no text that belongs to their query and are not used.")
    return PAIRS, table


TASK = SentenceEmbedding
