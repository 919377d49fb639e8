"""The tasks: a row for each value of the hyperparameter `task`.

A row names the folder below `recipe/tasks/`, the hyperparameters that not every task takes, what
recognises the data if no task is named (`recipe.plan.detection`), and what serves the saved model
(`recipe.inference.registry`). This module imports nothing, so that hyperparameters can be read
without torch; what a row names is imported when it is needed. docs/ARCHITECTURE.md says what a
folder holds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Served:
    """How saved models of a task answer requests."""

    load: str
    """What loads a model of a `recipe.backend.saved.origin.Origin`: `module:name`, in `recipe/`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Keyword arguments of `load`."""
    architectures: tuple[str, ...] = ()
    """The Auto classes of transformers whose models have the task's head."""
    adapters: tuple[str, ...] = ()
    """peft's names of the task."""
    form: str = "json"
    """The form of the page at / to try the model with."""


@dataclass(frozen=True)
class TaskRow:
    """Where a task is, and what belongs to it alone."""

    folder: str
    """Below `recipe/tasks/`. Its module `task` defines `TASK`, a `recipe.tasks.base.Task`."""
    hyperparameters: Sequence[str] = ()
    """What this task takes and not every other one does."""
    recognised_by: str | None = None
    """The function that recognises the data of this task in a `recipe.data.evidence.Evidence`:
    `module:name`, in `recipe/`. Its module is imported whenever no task is named, so it should
    import little."""
    learning_rates: tuple[float, float] = (5e-5, 2e-4)
    """The default peak, for all weights and for LoRA. docs/REFERENCE.md lists them."""
    served: Mapping[str, Served] = field(default_factory=dict)
    """What answers requests with the saved model, by the hub's names of the tasks."""


CLASSIFICATION, CAUSAL_LM = "text-classification", "causal-lm"
PREFERENCE = "preference"
MASKED_LM = "masked-lm"
SUMMARIES, TRANSLATIONS, TEXTS = "summarization", "translation", "text2text-generation"
IMAGES = "image-classification"
_OF_TEXTS = (
    *("label_column", "source_prefix", "max_target_length", "predict_with_generate"),
    *("num_beams", "generated_rows", "label_smoothing_factor", "do_predict"),
    *("source_lang", "target_lang"),
)
_RATES_OF_TEXTS = 1e-4, 3e-4
EMBEDDING, RERANKING = "sentence-embedding", "reranking"
TOKENS, QUESTIONS = "token-classification", "question-answering"


def _generates(
    task: str, architectures: tuple[str, ...] = (), adapters: tuple[str, ...] = ()
) -> Served:
    return Served(
        load="tasks.text_to_text.serve:TextGenerator.load",
        options={"task": task},
        architectures=architectures,
        adapters=adapters,
        form="text",
    )


TASKS: Mapping[str, TaskRow] = {
    CLASSIFICATION: TaskRow(
        "text_classification",
        ("text_pair_column", "label_column", "problem_type", "label_separator", "class_names",
         "class_weight",
         "tune_thresholds", "num_labels", "label_smoothing_factor", "do_predict"),
        recognised_by="data.classification:recognise",
        served={
            "text-classification": Served(
                load="tasks.text_classification.serve:Classifier.load",
                architectures=("AutoModelForSequenceClassification",),
                adapters=("SEQ_CLS",),
                form="pair",
            ),
            "zero-shot-classification": Served(
                load="tasks.zero_shot.serve:ZeroShot.load", form="labels"
            ),
        },
    ),
    TOKENS: TaskRow(
        "token_classification",
        ("label_column", "class_names", "label_all_tokens", "label_smoothing_factor", "long_texts",
         "do_predict"),
        recognised_by="tasks.token_classification.data:recognise",
        served={
            "token-classification": Served(
                load="tasks.token_classification.serve:Tagger.load",
                architectures=("AutoModelForTokenClassification",),
                adapters=("TOKEN_CLS",),
                form="text",
            ),
        },
    ),
    QUESTIONS: TaskRow(
        "question_answering",
        ("doc_stride", "do_predict"),
        recognised_by="tasks.question_answering.data:recognise",
        learning_rates=(3e-5, 2e-4),
        served={
            "question-answering": Served(
                load="tasks.question_answering.serve:QuestionAnswerer.load",
                architectures=("AutoModelForQuestionAnswering",),
                adapters=("QUESTION_ANS",),
                form="question",
            ),
        },
    ),
    "multiple-choice": TaskRow(
        "multiple_choice",
        ("label_column", "do_predict"),
        recognised_by="tasks.multiple_choice.data:recognise",
        served={
            "multiple-choice": Served(
                load="tasks.multiple_choice.serve:Chooser.load",
                architectures=("AutoModelForMultipleChoice",),
            ),
        },
    ),
    EMBEDDING: TaskRow(
        "sentence_embedding",
        ("text_pair_column", "label_column", "negative_columns", "scale", "mini_batch_size",
         "matryoshka_dims", "query_prompt", "document_prompt"),
        recognised_by="data.relevance:recognise",
        learning_rates=(2e-5, 1e-4),
        served={
            "feature-extraction": Served(
                load="tasks.sentence_embedding.serve:load_features",
                adapters=("FEATURE_EXTRACTION",),
                form="text",
            ),
            "sentence-similarity": Served(
                load="tasks.sentence_embedding.serve:load_vectors", form="similarity"
            ),
            "sparse-embedding": Served(
                load="tasks.sentence_embedding.library_vectors:LibraryVectors.load",
                options={"kind": "SparseEncoder"},
            ),
            "multi-vector-embedding": Served(
                load="tasks.sentence_embedding.library_vectors:LibraryVectors.load",
                options={"kind": "MultiVectorEncoder"},
            ),
        },
    ),
    RERANKING: TaskRow(
        "reranking",
        ("text_pair_column", "label_column", "negative_columns", "listwise"),
        recognised_by="tasks.reranking.data:recognise",
        learning_rates=(2e-5, 1e-4),
    ),
    SUMMARIES: TaskRow(
        "text_to_text",
        _OF_TEXTS,
        recognised_by="tasks.text_to_text.data:recognise_summaries",
        learning_rates=_RATES_OF_TEXTS,
        served={SUMMARIES: _generates(SUMMARIES)},
    ),
    TRANSLATIONS: TaskRow(
        "text_to_text",
        _OF_TEXTS,
        recognised_by="tasks.text_to_text.data:recognise_translations",
        learning_rates=_RATES_OF_TEXTS,
        served={TRANSLATIONS: _generates(TRANSLATIONS)},
    ),
    TEXTS: TaskRow(
        "text_to_text",
        _OF_TEXTS,
        recognised_by="tasks.text_to_text.data:recognise_others",
        learning_rates=_RATES_OF_TEXTS,
        served={
            TEXTS: _generates(TEXTS, ("AutoModelForSeq2SeqLM",), ("SEQ_2_SEQ_LM",)),
        },
    ),
    MASKED_LM: TaskRow(
        "masked_lm",
        ("mlm_probability", "whole_word_masking", "sample_by", "long_texts"),
        recognised_by="data.language_modeling:recognise_for_encoders",
        served={
            "fill-mask": Served(
                load="tasks.masked_lm.serve:MaskFiller.load",
                architectures=("AutoModelForMaskedLM",),
                form="mask",
            ),
        },
    ),
    CAUSAL_LM: TaskRow(
        "causal_lm",
        ("prompt_column", "completion_column", "messages_column", "sample_by", "long_texts",
         "load_in_4bit"),
        recognised_by="data.language_modeling:recognise",
        learning_rates=(2e-5, 2e-4),
        served={
            "text-generation": Served(
                load="tasks.causal_lm.serve:Generator.load",
                architectures=("AutoModelForCausalLM",),
                adapters=("CAUSAL_LM",),
                form="text",
            ),
        },
    ),
    PREFERENCE: TaskRow(
        "preference",
        ("prompt_column", "chosen_column", "rejected_column", "beta", "loss_type",
         "label_smoothing", "load_in_4bit"),
        recognised_by="tasks.preference.data:recognise",
        learning_rates=(1e-6, 5e-6),
    ),
    IMAGES: TaskRow(
        "image_classification",
        ("image_column", "augmentation", "label_column", "class_weight", "label_smoothing_factor",
         "do_predict"),
        recognised_by="tasks.image_classification.data:recognise",
    ),
}  # fmt: skip
"""Of the tasks that could serve a model, the first one does: BART has the heads of
text2text-generation and of masked-lm."""
SERVED: Mapping[str, Served] = {
    name: served for row in TASKS.values() for name, served in row.served.items()
}
"""The tasks of requests that are merged into batches."""


def resolve(place: str) -> Any:
    """Return what a row names by `module:name`, a module below `recipe/`."""
    module, _, names = place.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(f"recipe.{module}"))


def learning_rate(task: str | None, adapts: bool) -> float:
    """Return the default peak learning rate.

    Args:
        task: As `load` takes it.
        adapts: Whether adapters are trained (lora_r), not all weights.
    """
    return TASKS[task or CLASSIFICATION].learning_rates[adapts]


def load(name: str | None) -> Any:
    """Return the class of a task, to be called with the job's channels and hyperparameters.

    Args:
        name: The hyperparameter; None is text-classification.
    """
    return resolve(f"tasks.{TASKS[name or CLASSIFICATION].folder}.task:TASK")
