"""The tasks: a row for each value of the hyperparameter `task`.

A row names the module below `recipe/tasks/` that has all there is of the task, the
hyperparameters that it takes and not every task does, and what tells its data apart where nobody
says which task it is (`recipe.tasks.detection`). It imports nothing, so that hyperparameters can
be read without torch. docs/ARCHITECTURE.md says what such a module defines.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TaskRow:
    """Where a task is, and what belongs to it alone."""

    module: str
    """Below `recipe/tasks/`. It defines `TASK`, a `recipe.tasks.base.Task`."""
    hyperparameters: Sequence[str] = ()
    """What this task takes and not every other one does."""
    recognised_by: str | None = None
    """The module below `recipe/` whose function `recognise` (or the one that is named behind a
    colon) tells the data of this task, given a `recipe.data.evidence.Evidence`. It is imported
    where no task is named, whatever the task: so it should import little."""


CLASSIFICATION, CAUSAL_LM = "text-classification", "causal-lm"
PREFERENCE = "preference"
MASKED_LM = "masked-lm"
SUMMARIES, TRANSLATIONS, TEXTS = "summarization", "translation", "text2text-generation"
PICTURES = "image-classification"
_OF_TEXTS = (
    *("label_column", "source_prefix", "max_target_length", "predict_with_generate"),
    *("num_beams", "generated_rows", "label_smoothing_factor", "do_predict"),
    *("source_lang", "target_lang"),
)
EMBEDDING, RERANKING = "sentence-embedding", "reranking"
TOKENS, QUESTIONS = "token-classification", "question-answering"
TASKS: Mapping[str, TaskRow] = {
    CLASSIFICATION: TaskRow(
        "text_classification",
        ("text_pair_column", "label_column", "problem_type", "label_separator", "class_weight",
         "tune_thresholds", "num_labels", "label_smoothing_factor", "do_predict"),
        recognised_by="data.classification",
    ),
    CAUSAL_LM: TaskRow(
        "causal_lm",
        ("prompt_column", "completion_column", "messages_column", "sample_by", "long_texts"),
        recognised_by="data.language_modeling",
    ),
    PREFERENCE: TaskRow(
        "preference",
        ("prompt_column", "chosen_column", "rejected_column", "beta", "loss_type",
         "label_smoothing"),
        recognised_by="data.kinds.preferences",
    ),
    TOKENS: TaskRow(
        "token_classification",
        ("label_column", "label_all_tokens", "label_smoothing_factor", "long_texts", "do_predict"),
        recognised_by="data.kinds.word_tags",
    ),
    QUESTIONS: TaskRow(
        "question_answering", ("doc_stride", "do_predict"), recognised_by="data.kinds.questions"
    ),
    MASKED_LM: TaskRow(
        "masked_lm",
        ("mlm_probability", "whole_word_masking", "sample_by", "long_texts"),
        recognised_by="data.language_modeling:recognise_for_encoders",
    ),
    SUMMARIES: TaskRow(
        "text_to_text", _OF_TEXTS, recognised_by="data.kinds.text_pairs:recognise_summaries"
    ),
    TRANSLATIONS: TaskRow(
        "text_to_text", _OF_TEXTS, recognised_by="data.kinds.text_pairs:recognise_translations"
    ),
    PICTURES: TaskRow(
        "image_classification",
        ("image_column", "augmentation", "label_column", "class_weight", "label_smoothing_factor",
         "do_predict"),
        recognised_by="data.kinds.pictures",
    ),
    TEXTS: TaskRow(
        "text_to_text", _OF_TEXTS, recognised_by="data.kinds.text_pairs:recognise_others"
    ),
    EMBEDDING: TaskRow(
        "sentence_embedding",
        ("text_pair_column", "label_column", "negative_columns", "scale", "mini_batch_size",
         "matryoshka_dims", "query_prompt", "document_prompt"),
        recognised_by="data.relevance",
    ),
    RERANKING: TaskRow(
        "reranking",
        ("text_pair_column", "label_column", "negative_columns", "listwise"),
        recognised_by="data.reranking",
    ),
}  # fmt: skip


def load(name: str | None) -> Any:
    """The class of a task, to be called with the job's channels and hyperparameters.

    Args:
        name: The hyperparameter; None for what trained before tasks were told by their data.
    """
    return importlib.import_module(f"recipe.tasks.{TASKS[name or CLASSIFICATION].module}").TASK
