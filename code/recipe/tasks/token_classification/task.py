"""Token classification: a tag for each word, of entities (IOB2) or of any other kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForTokenClassification, EvalPrediction, PreTrainedModel

from recipe.batching.batches import Layout
from recipe.batching.document_batches import DocumentLayout
from recipe.batching.samples import Samples
from recipe.data.annotations import word_tags
from recipe.data.column_names import TAGS, TOKEN_IDS, TOKENS
from recipe.errors import ModelError
from recipe.models import packed_encoders, pretrained, token_heads
from recipe.models.sources.origin import Origin
from recipe.models.sources.tokenizers import reading_words
from recipe.reports.model_card import About
from recipe.settings import TRUNCATE
from recipe.tasks.base import (
    Batches,
    EncoderObjective,
    Model,
    Task,
    Tokenizer,
    TokenLosses,
    judged_split,
    learned_in,
    longest_in,
    text_layout,
)
from recipe.tasks.token_classification import report, tokens
from recipe.tasks.token_classification.report import Sentence, TaggedAnswers
from recipe.tokenization import encoding, windows

_SHOWN_WORDS = 15


class Tags(EncoderObjective, TokenLosses):
    """The tags of words; the loss is the mean over all learned tokens of a step."""

    def __init__(self, smoothing: float, names: Sequence[str], are_entities: bool) -> None:
        self._smoothing, self._are_entities = smoothing, are_entities
        self.names = names
        """In the order of the model's outputs."""
        self.last: list[Sentence] | None = None
        """The model's answers for each sentence in the last evaluation."""

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        texts = text_layout(model, packed, size, pad_id, batches, in_blocks=True)
        return DocumentLayout(texts, learned_in(batches), longest_in(batches, judged=True))

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        if not packed:
            packed_encoders.patch_forward_for_lengths(model)
        token_heads.patch_forward_for_tags(model, self._smoothing)

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        outputs, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        self.last = report.sentences_of(outputs, labels, self.names)
        return report.scores(self.last, self._are_entities)


class TokenClassification(Task):
    """Learns a tag for each word."""

    objective: Tags
    data: word_tags.Tagged
    sample_kind = "a window"

    def read(self, channels: Mapping[str, Path]) -> None:
        self.data = word_tags.load(channels, self.data_settings)
        are_entities = self.data.are_entities
        self.check_best(report.ENTITY_SCORES if are_entities else report.TAG_SCORES)
        self._names = self.data.names
        self._is_split = self.data_settings.long_texts != TRUNCATE
        smoothing = float(self.data_settings.passed.get("label_smoothing_factor") or 0.0)
        self.objective = Tags(smoothing, self._names, are_entities)

    def load(self, source: Origin) -> Model:
        """Return the model with a head for the tags, in the order of the model's own if it has the
        same."""
        known = pretrained.known_labels(source, self.model_settings)
        if set(known) == set(self._names) or not self.data_settings.trains:
            if not set(self._names) <= set(known):
                raise ModelError(
                    f"The model {source.location} answers with the tags {', '.join(known)}, and "
                    f"the data has {', '.join(self._names)}: do_train=False cannot compare them.",
                    "Give data with the model's tags, or train.",
                )
            self._names = self.objective.names = known
        architecture, what = AutoModelForTokenClassification, "a tagger with these tags"
        model, tokenizer = pretrained.load_head(
            architecture, source, self.model_settings, what, self._names
        )
        trusted = {"trust_remote_code": self.model_settings.trust_remote_code}
        return model, reading_words(tokenizer, source.location, trusted)

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the most tokens of a window, also in serving."""
        encoding.refuse_types(model, tokenizer)
        return super().longest(model, tokenizer)

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        return tokens.tokenize_split(
            name, split, tokenizer, max_length, self._names, self._is_split
        )

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        words_of_rows: Any = self.train.select(rows)[TOKENS][:]
        encoded = tokenizer(words_of_rows, is_split_into_words=True, verbose=False)
        return [len(ids) for ids in encoded[TOKEN_IDS]]

    def pieces(self, length: int, longest: int) -> int:
        """Return about how many windows a sentence becomes."""
        shared = windows.words_shared(longest)
        return windows.count_windows(length, longest, shared) if self._is_split else 1

    def about(self) -> About:
        names = ", ".join(f"`{name}`" for name in self._names)
        means = (
            "Precision, recall and F1 count whole entities (seqeval); accuracy counts words."
            if self.data.are_entities
            else "Accuracy counts words; f1_macro is the mean over tags."
        )
        return About(
            title="Entity tagger" if self.data.are_entities else "Word tagger",
            pipeline="token-classification",
            purpose=f"assign one of {len(self._names)} tags to each word: {names}",
            metrics=means,
            headline=("f1", "precision", "recall", "accuracy", "loss"),
        )

    def shown(self, row: Mapping[str, Any]) -> str:
        pairs = list(zip(row[TOKENS], row[TAGS], strict=True))
        words_shown = (f"{word}/{tag or 'none'}" for word, tag in pairs[:_SHOWN_WORDS])
        return " ".join(words_shown) + " ..." * (len(pairs) > _SHOWN_WORDS)

    def answers(self) -> TaggedAnswers | None:
        last = self.objective.last
        if last is None:
            return None
        name, rows = judged_split(self.data)
        are_entities = self.data.are_entities
        return TaggedAnswers(split=name, sentences=last, rows=rows, are_entities=are_entities)


TASK = TokenClassification
