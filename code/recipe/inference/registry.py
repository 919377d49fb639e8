"""Which task a model answers, and the model loaded for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import transformers

from recipe.compat import quieten
from recipe.errors import ModelError, near
from recipe.inference.generation import generator
from recipe.inference.origin import Origin
from recipe.inference.payloads import Request
from recipe.inference.tasks import (
    classifier,
    embedder,
    fill_mask,
    pipelines,
    question_answering,
    tagger,
    text_to_text,
    zero_shot,
)
from recipe.inference.tasks.embedder import TOKENS, VECTORS
from recipe.storage import checksums


class Task(Protocol):
    """A loaded model that answers requests."""

    def example(self, text: str) -> Request | None:
        """A request that this task answers, made of a text; None where that is not known."""

    def measure(self, request: Request) -> list[int]:
        """Tokens of each input. Raises BadRequest where the request is none for this task."""

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """The prediction for each request, or an exception in its place."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A task that requests are merged for."""

    load: Callable[[Origin], Task]
    architectures: tuple[str, ...] = ()
    """transformers' Auto classes whose models have the task's head."""
    adapters: tuple[str, ...] = ()
    """What peft calls the task."""


FEATURES, SENTENCES = "feature-extraction", "sentence-similarity"


def _text_to_text(task: str) -> Callable[[Origin], Task]:
    return lambda origin: text_to_text.load(origin, task, os.environ.get("HF_TASK") or task)


TASKS: Mapping[str, Row] = {
    "text-classification": Row(
        load=classifier.load,
        architectures=("AutoModelForSequenceClassification",),
        adapters=("SEQ_CLS",),
    ),
    "token-classification": Row(
        load=tagger.load,
        architectures=("AutoModelForTokenClassification",),
        adapters=("TOKEN_CLS",),
    ),
    "question-answering": Row(
        load=question_answering.load,
        architectures=("AutoModelForQuestionAnswering",),
        adapters=("QUESTION_ANS",),
    ),
    "fill-mask": Row(load=fill_mask.load, architectures=("AutoModelForMaskedLM",)),
    text_to_text.GENERAL: Row(
        load=_text_to_text(text_to_text.GENERAL),
        architectures=("AutoModelForSeq2SeqLM",),
        adapters=("SEQ_2_SEQ_LM",),
    ),
    text_to_text.SUMMARIES: Row(load=_text_to_text(text_to_text.SUMMARIES)),
    text_to_text.TRANSLATIONS: Row(load=_text_to_text(text_to_text.TRANSLATIONS)),
    "text-generation": Row(
        load=generator.load, architectures=("AutoModelForCausalLM",), adapters=("CAUSAL_LM",)
    ),
    "zero-shot-classification": Row(load=zero_shot.load),
    FEATURES: Row(
        load=lambda origin: embedder.load(origin, _answers(origin, os.environ)),
        adapters=("FEATURE_EXTRACTION",),
    ),
    SENTENCES: Row(load=lambda origin: embedder.load(origin, VECTORS)),
}
"""The tasks that requests are merged for, the likelier first for a model that could do several."""
_SYNONYMS = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-ranking": "text-classification",
    "reranking": "text-classification",
    "sentence-embeddings": SENTENCES,
    "image-to-text": "image-text-to-text",
    "text-to-speech": "text-to-audio",
}
# Classes of these are of no one task: a model without a head, or one that does many things.
_VAGUE = {"feature-extraction", "image-feature-extraction", "zero-shot-audio-classification",
          "decision", "any-to-any"}  # fmt: skip


def load(model_dir: str, environ: Mapping[str, str]) -> Task:
    """The model in `model_dir` or of HF_MODEL_ID, for HF_TASK or for what its head is made for.

    Raises:
        ModelError: there is no model, its files have changed since they were written, or nothing
            here answers with its head.
        ValueError: HF_TASK names a task that these handlers cannot do.
    """
    quieten()
    origin = Origin.find(model_dir, environ)
    with checksums.verified(origin.place):
        name = chosen(origin, environ)
        print(f"task: {name}", flush=True)
        return TASKS[name].load(origin) if name in TASKS else pipelines.load(origin, name, environ)


def chosen(origin: Origin, environ: Mapping[str, str]) -> str:
    """The task of HF_TASK, else what the model's head is made for.

    Raises:
        ModelError: nothing here answers with its head.
        ValueError: HF_TASK names a task that these handlers cannot do.
    """
    name = environ.get("HF_TASK") or task_of(origin)
    name = _SYNONYMS.get(name, name)
    if name.startswith(f"{text_to_text.TRANSLATIONS}_"):
        name = text_to_text.TRANSLATIONS
    known = [*TASKS, *(each for each in pipelines.names() if each not in TASKS)]
    if name not in known:
        raise ValueError(f"HF_TASK is {name!r}. Give {', '.join(known)}. {near(name, known)}")
    return name


def task_of(origin: Origin) -> str:
    """The task that a model's class is made for.

    Raises:
        ModelError: no task claims the class. Served without its head, it would answer something
            else than it was trained for.
    """
    if origin.adapter:
        # Beside an adapter lies the configuration of its base, whose class is another.
        kind = origin.adapter.get("task_type") or ""
        # Where peft has no name for the task, it notes the class of what it was trained around.
        around = (origin.adapter.get("auto_mapping") or {}).get("base_model_class") or ""
        if not kind and (claimed := _task_of_class(around.removeprefix("FSDP"))) is not None:
            return claimed
        found = next((name for name, row in TASKS.items() if kind in row.adapters), None)
        if found is None:
            raise _unclaimed(origin, f"is an adapter whose task_type is {kind!r}")
        return found
    if (modules := origin.sentence_modules) and (found := _sentence_task(origin, len(modules))):
        return found
    names = getattr(origin.config(), "architectures", None) or []
    for name in names:
        if (claimed := _task_of_class(name)) is not None:
            return claimed
    raise _unclaimed(origin, f"has {', '.join(names) or 'no architectures in its config.json'}")


def _task_of_class(name: str) -> str | None:
    # What reads images, sounds or tables first: some of these classes answer to texts' names too.
    for task in pipelines.names():
        if task not in TASKS and task not in _VAGUE:
            own = set(pipelines.architectures(task)) - {"AutoModelForCausalLM"}
            if any(name in _classes(architecture) for architecture in own):
                return task
    for task, row in TASKS.items():
        if any(name in _classes(architecture) for architecture in row.architectures):
            return task
    if name not in _classes("AutoModel"):
        return None
    return FEATURES if _reads_texts(name) else "image-feature-extraction"


def _reads_texts(name: str) -> bool:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    mapping: Any = transformers.AutoModel._model_mapping
    names = mapping._model_mapping.items()
    kinds = [kind for kind, each in names if name in ([each] if isinstance(each, str) else each)]
    return any(kind in TOKENIZER_MAPPING_NAMES for kind in kinds)


def _sentence_task(origin: Origin, parts: int) -> str | None:
    kind = origin.sentence_settings.get("model_type") or "SentenceTransformer"
    if kind == "SentenceTransformer":
        return FEATURES
    if kind == "CrossEncoder" and parts == 1:
        return None
    raise ModelError(
        f"{origin.place} is a {kind} of {parts} modules of sentence-transformers, which these "
        "handlers do not serve.",
        "Bring an inference.py that loads it.",
    )


def _unclaimed(origin: Origin, what: str) -> ModelError:
    return ModelError(
        f"The model {origin.place} {what}, which no task here claims.",
        f"Name the task in HF_TASK: {', '.join(TASKS)}; or bring an inference.py.",
    )


def _classes(architecture: str) -> set[str]:
    """The names of the models that one of transformers' Auto classes loads."""
    mapping: Any = getattr(transformers, architecture)._model_mapping
    names: set[str] = set()
    for each in mapping._model_mapping.values():
        names.update([each] if isinstance(each, str) else each)
    return names


def _answers(origin: Origin, environ: Mapping[str, str]) -> str:
    """Whether feature extraction answers with a vector of each text or of each token.

    Raises:
        ValueError: AMPHORA_ANSWERS is neither.
    """
    named = environ.get("AMPHORA_ANSWERS", "")
    if named and named not in (TOKENS, VECTORS):
        raise ValueError(f"AMPHORA_ANSWERS is {named!r}. Give {TOKENS} or {VECTORS}.")
    # Hugging Face's image serves a model without a head only where HF_TASK says so: its clients
    # read a matrix. Where nobody asked for that, texts have vectors.
    asked = environ.get("HF_TASK") == FEATURES and not origin.sentence_modules
    chosen = named or (TOKENS if asked else VECTORS)
    what = "each token" if chosen == TOKENS else "each text"
    other = VECTORS if chosen == TOKENS else TOKENS
    print(f"answers: a vector of {what} (AMPHORA_ANSWERS={other} for the other)", flush=True)
    return chosen
