"""Sentence embedding: similar vectors for texts that belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional
from transformers import EvalPrediction, PreTrainedModel, Trainer

from recipe.backend.saved import weights as saved_weights
from recipe.batching.groups import Groups
from recipe.batching.samples import Samples
from recipe.compat import dtype_argument
from recipe.data import relevance
from recipe.data.column_names import TEXT
from recipe.data.relevance import PAIRS, QUERY, SCORED, SCORES, TEXTS
from recipe.errors import HyperparameterError
from recipe.models import pretrained, ranking_losses, sentence_encoders
from recipe.models.changes import adapters, rope
from recipe.models.sources.origin import Origin
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.settings import ModelSettings
from recipe.storage import checksums
from recipe.task_table import TASKS
from recipe.tasks import evaluation, numbered_texts, ranking_scores
from recipe.tasks.base import (
    SHOWN_CHARS,
    EncoderObjective,
    Model,
    Task,
    Tokenizer,
)
from recipe.tasks.ranking_scores import Corpus, SearchResults
from recipe.tasks.sentence_embedding.spec import Options
from recipe.tokenization import encoding
from recipe.tokenization import texts as text_tokens

SIMILARITY = ("spearman", "pearson")
"""The scores of an evaluation of scored pairs."""
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

    def __init__(self, kind: str, scale: float) -> None:
        self._kind, self._scale = kind, scale
        self.sizes: tuple[int, ...] = ()
        """The prefix lengths of vectors that are learned; none for whole vectors only."""
        self.judged: dict[str, _Judged] = {}
        self.last: tuple[str, SearchResults] | None = None
        """The last evaluation of pairs: its split, and the search results."""

    def packs(self, model: PreTrainedModel) -> bool:
        return sentence_encoders.packs(model)

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        sentence_encoders.patch_forward_for_texts(model)
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
            row_losses = self._row_losses(known[members.clamp(min=0)], labels, across=False)
            losses.append((float(row_losses.sum()), len(row_losses)))
        if judged.corpus is not None:
            hits = ranking_scores.search(vectors, judged.corpus)
            self.last = split, hits
            scores = ranking_scores.search_scores(hits)
        else:
            first, second = (known[judged.members[:, side]] for side in (0, 1))
            cosines = functional.cosine_similarity(first, second).numpy()
            numbers = evaluation.score_numbers(cosines, judged.labels[:, 1])
            scores = {name: numbers[name] for name in SIMILARITY}
        return {**ranking_scores.mean(losses), **scores}


class SentenceEmbedding(Task):
    """Vectors of texts, of pairs, triplets, queries with negatives, or pairs with scores."""

    options: Options
    objective: EmbeddingObjective
    targets = frozenset({SCORES})
    data: relevance.Relevance

    def read(self, channels: Mapping[str, Path]) -> None:
        settings = self.data_settings
        self.data = relevance.load(channels, settings, TASKS["sentence-embedding"])
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
        self.data.notes.append(f"loss: {loss}")
        self.objective = EmbeddingObjective(self.data.kind, self.options.scale)
        self._prompts = ("", "")
        self._sentences: Any = None

    def request_columns(self) -> dict[str, str | Sequence[str]]:
        return {"text": self.data.inputs[QUERY][0]}  # a vector is of one text

    def load(self, source: Origin) -> Model:
        """Return the encoder with its pooling and further modules."""
        model, tokenizer, self._sentences = load(source, self.model_settings)
        query, document = self.options.query_prompt, self.options.document_prompt
        self._prompts = sentence_encoders.prompts(self._sentences, query, document)
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
        requested = self.data_settings.max_length or self._sentences.max_seq_length
        length = pretrained.longest_input(model, tokenizer, requested)
        self._sentences.max_seq_length = length
        return length

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
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
            corpus = Corpus.from_members(texts.members, texts.identities)
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
        saved = self.model_settings.lora_r is not None and self.model_settings.lora_save
        how = "(base)`, then `.load_adapter(folder)" if saved == "adapter" else "(folder)"
        return About(
            title="Sentence embedding model",
            pipeline="sentence-similarity",
            purpose="embed texts in vectors whose cosines measure similarity. Load it by "
            f"`SentenceTransformer{how}`",
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
        sentence_encoders.save(self._sentences, model, weights, folder, self.model_settings)

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """Return the queries whose relevant texts have the lowest ranks."""
        if self.objective.last is None:
            return ()
        split, hits = self.objective.last
        judged = self.objective.judged[split]
        corpus = judged.corpus
        assert corpus is not None

        def show(query: int) -> tuple[str, str, str]:
            best = (corpus.documents[positions[query]] for positions in (hits.right, hits.wrong))
            numbers = corpus.queries[query], *best
            first, right, wrong = (judged.texts[int(number)][TEXT] for number in numbers)
            return first, right, wrong

        return ranking_scores.worst_queries(split, hits, show)


def load(source: Origin, settings: ModelSettings) -> tuple[PreTrainedModel, Tokenizer, Any]:
    """Return the encoder in float32 with the modules that follow it, its tokenizer, and their
    SentenceTransformer. Raise ModelError as `read_sentences`."""
    source = source.with_access(settings)
    scaling = settings.rope_scaling
    base = Origin(source.base or source.location, source.options)
    changed = rope.changes(base.config(), scaling) if scaling else {}
    with checksums.verified(base.location):
        sentences = saved_weights.read_sentences(
            source, "cpu", dtype_argument(torch.float32), changed, merges=False
        )
        is_saved = bool(Origin(source.holder("modules.json"), source.options).sentence_modules)
    if source.base:
        encoder, _ = adapters.start(source, sentences[0].auto_model, (), settings)
        sentence_encoders.set_encoder(sentences[0], encoder)
    why = "from the model" if is_saved else "the default without a modules.json"
    model = sentence_encoders.trained_as_one(sentences, settings, why)
    return model, sentences.tokenizer, sentences


TASK = SentenceEmbedding
