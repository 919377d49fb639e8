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

    folder: str
    """Below `recipe/tasks/`. Its module `task` defines `TASK`, a `recipe.tasks.base.Task`."""
    hyperparameters: Sequence[str] = ()
    """What this task takes and not every other one does."""
    recognised_by: str | None = None
    """The module below `recipe/` whose function `recognise` (or the one that is named behind a
    colon) tells the data of this task, given a `recipe.data.evidence.Evidence`. It is imported
    where no task is named, whatever the task: so it should import little."""
    learning_rates: tuple[float, float] = (5e-5, 2e-4)
    """The peak where none is given: where all weights are trained, and where LoRA's adapters are.
    docs/TRAINING.md says where each is from."""


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
_RATES_OF_TEXTS = 1e-4, 3e-4
EMBEDDING, RERANKING = "sentence-embedding", "reranking"
TOKENS, QUESTIONS = "token-classification", "question-answering"
TASKS: Mapping[str, TaskRow] = {
    CLASSIFICATION: TaskRow(
        "text_classification",
        ("text_pair_column", "label_column", "problem_type", "label_separator", "class_names",
         "class_weight",
         "tune_thresholds", "num_labels", "label_smoothing_factor", "long_texts", "do_predict"),
        recognised_by="data.classification",
    ),
    CAUSAL_LM: TaskRow(
        "causal_lm",
        ("prompt_column", "completion_column", "messages_column", "sample_by", "long_texts",
         "load_in_4bit"),
        recognised_by="data.language_modeling",
        learning_rates=(2e-5, 2e-4),
    ),
    PREFERENCE: TaskRow(
        "preference",
        ("prompt_column", "chosen_column", "rejected_column", "beta", "loss_type",
         "label_smoothing", "load_in_4bit"),
        recognised_by="tasks.preference.data",
        learning_rates=(1e-6, 5e-6),
    ),
    TOKENS: TaskRow(
        "token_classification",
        ("label_column", "class_names", "label_all_tokens", "label_smoothing_factor", "long_texts",
         "do_predict"),
        recognised_by="tasks.token_classification.data",
    ),
    QUESTIONS: TaskRow(
        "question_answering",
        ("doc_stride", "do_predict"),
        recognised_by="tasks.question_answering.data",
        learning_rates=(3e-5, 2e-4),
    ),
    MASKED_LM: TaskRow(
        "masked_lm",
        ("mlm_probability", "whole_word_masking", "sample_by", "long_texts"),
        recognised_by="data.language_modeling:recognise_for_encoders",
    ),
    SUMMARIES: TaskRow(
        "text_to_text",
        _OF_TEXTS,
        recognised_by="tasks.text_to_text.data:recognise_summaries",
        learning_rates=_RATES_OF_TEXTS,
    ),
    TRANSLATIONS: TaskRow(
        "text_to_text",
        _OF_TEXTS,
        recognised_by="tasks.text_to_text.data:recognise_translations",
        learning_rates=_RATES_OF_TEXTS,
    ),
    PICTURES: TaskRow(
        "image_classification",
        ("image_column", "augmentation", "label_column", "class_weight", "label_smoothing_factor",
         "do_predict"),
        recognised_by="tasks.image_classification.data",
    ),
    TEXTS: TaskRow(
        "text_to_text",
        _OF_TEXTS,
        recognised_by="tasks.text_to_text.data:recognise_others",
        learning_rates=_RATES_OF_TEXTS,
    ),
    EMBEDDING: TaskRow(
        "sentence_embedding",
        ("text_pair_column", "label_column", "negative_columns", "scale", "mini_batch_size",
         "matryoshka_dims", "query_prompt", "document_prompt"),
        recognised_by="data.relevance",
        learning_rates=(2e-5, 1e-4),
    ),
    RERANKING: TaskRow(
        "reranking",
        ("text_pair_column", "label_column", "negative_columns", "listwise"),
        recognised_by="tasks.reranking.data",
        learning_rates=(2e-5, 1e-4),
    ),
}  # fmt: skip


def learning_rate(task: str | None, adapts: bool) -> float:
    """The peak learning rate where none is given.

    Args:
        task: As `load` takes it.
        adapts: Whether adapters are trained (lora_r), not all weights.
    """
    return TASKS[task or CLASSIFICATION].learning_rates[adapts]


def load(name: str | None) -> Any:
    """The class of a task, to be called with the job's channels and hyperparameters.

    Args:
        name: The hyperparameter; None for what trained before tasks were told by their data.
    """
    return importlib.import_module(f"recipe.tasks.{TASKS[name or CLASSIFICATION].folder}.task").TASK
