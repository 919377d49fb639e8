"""Chooses the task of a model, and loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from recipe.backend.pipelines import library
from recipe.backend.pipelines.foreign import Foreign
from recipe.backend.proofs import verification
from recipe.backend.served_task import ServedTask
from recipe.compat import quieten
from recipe.console import log
from recipe.errors import ModelError, did_you_mean
from recipe.models.sources.origin import Origin
from recipe.runtime import device
from recipe.spec import TRAINED_TASK
from recipe.storage import checksums
from recipe.task_table import SERVED, TASKS, resolve, served_as

FEATURES, SENTENCES, TRANSLATIONS = "feature-extraction", "sentence-similarity", "translation"
_SYNONYMS = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-ranking": "text-classification",
    "reranking": "text-classification",
    "sentence-embeddings": SENTENCES,
    "text-to-speech": "text-to-audio",
    "vqa": "visual-question-answering",
}
_SAME_HEAD = {"zero-shot-classification": "text-classification"}
_OTHER_HEADS = {
    "table-question-answering": ["AutoModelForSeq2SeqLM"],
    "document-question-answering": ["AutoModelForImageTextToText"],
}
"""Auto classes of models that pipelines also take, by the class that config.json names (TAPEX,
Donut)."""
# Tasks whose models have no head, or many uses: their classes do not determine the task.
_VAGUE = {"feature-extraction", "image-feature-extraction", "zero-shot-audio-classification",
          "decision", "any-to-any"}  # fmt: skip


def load(model_dir: str, environ: Mapping[str, str]) -> ServedTask:
    """Load the model in `model_dir` or of HF_MODEL_ID, for HF_TASK or the task of its head.

    Raise ModelError if there is no model, its files have changed since they were written, no task
    uses its head, or the device cannot compute it, and ValueError if HF_TASK is not a known task.
    """
    quieten()
    device.avoid_wrong_kernels()
    origin = Origin.find(model_dir, environ)
    with checksums.verified(origin.location):
        name = chosen(origin, environ)
        log(f"task: {name}")
        if (served := SERVED.get(name)) is None:
            foreign = Foreign.load(origin, name, environ)
            # A pipeline takes the class that config.json names if its task has none for the model.
            kind, heads = type(foreign.pipeline.model), _heads(name)
            if kind.__module__.startswith("transformers.") and heads and kind.__name__ not in heads:
                raise ModelError(
                    f"The model {origin.location} is a {kind.__name__}, which {name} cannot use.",
                    "Leave HF_TASK out, or give the task that it was trained for.",
                )
            task: ServedTask = foreign
        else:
            task = resolve(served.load)(origin, **served.options)
        verification.verify(origin, name, task, environ)
        return task


def chosen(origin: Origin, environ: Mapping[str, str]) -> str:
    """Return HF_TASK, else the task of the model's head. Raise ModelError if no task uses the head,
    and ValueError if HF_TASK is not a known task."""
    name = environ.get("HF_TASK") or task_of(origin)
    name = _SYNONYMS.get(name, name)
    if name.startswith(f"{TRANSLATIONS}_"):
        name = TRANSLATIONS
    known = [*dict.fromkeys([*SERVED, *library.names()])]
    if name not in known:
        raise ValueError(
            f"HF_TASK is {name!r}. Give {', '.join(known)}. {did_you_mean(name, known)}"
        )
    if environ.get("HF_TASK"):
        check_head(origin, name)
    return name


def check_head(origin: Origin, name: str) -> None:
    """Raise ModelError if a model has the head of another task than HF_TASK.

    The heads of some tasks have weights with the same names and shapes, so a wrong one would load.
    """
    if origin.adapter or name in _VAGUE:
        return
    taken = _heads(name)
    classes = getattr(origin.config(), "architectures", None) or []
    if not taken or taken.intersection(classes):
        return
    for kind in classes:
        if (task := task_of_class(kind)) not in (None, *_VAGUE):
            raise ModelError(
                f"HF_TASK is {name!r}, but config.json of {origin.location} names {kind}, the "
                f"head of {task}.",
                f"Leave HF_TASK out, or give {task}.",
            )


def _heads(name: str) -> set[str]:
    """Return the classes of models that a task takes; none if it takes any."""
    if served := SERVED.get(_SAME_HEAD.get(name, name)):
        architectures = [*served.architectures]
    else:
        architectures = [*library.architectures(name), *_OTHER_HEADS.get(name, ())]
    if "AutoModel" in architectures:
        return set()
    return {model for auto in architectures for _, model in _classes(auto)}


def task_of(origin: Origin) -> str:
    """Return the task that the recipe trained a model for, else that of its class. Raise ModelError
    if no task uses it: without its head, the model's answers would not be what it was trained
    for."""
    # Without a config.json of its own, an adapter has that of its base.
    is_bare = bool(origin.adapter.get("task_type")) and origin.holder("config.json") == origin.base
    if not is_bare and (trained := trained_task(origin)) is not None:
        return trained
    modules = [] if origin.adapter else origin.sentence_modules
    kind = origin.sentence_settings.get("model_type")
    if modules and (kind, len(modules)) != ("CrossEncoder", 1):
        return FEATURES
    if origin.adapter:
        # The config.json next to an adapter names the class of its base.
        kind = origin.adapter.get("task_type") or ""
        # If peft has no name for the task, it saves the class of the adapted model.
        around = (origin.adapter.get("auto_mapping") or {}).get("base_model_class") or ""
        if not kind and (claimed := task_of_class(around.removeprefix("FSDP"))) is not None:
            return claimed
        claiming = [name for name, entry in SERVED.items() if kind in entry.adapters]
        what = f"is an adapter whose task_type is {kind!r}"
    else:
        classes = getattr(origin.config(), "architectures", None) or []
        claiming = [task for name in classes if (task := task_of_class(name)) is not None]
        what = f"has {', '.join(classes) or 'no architectures in its config.json'}"
    if not claiming:
        raise ModelError(
            f"The model {origin.location} {what}, which no task supports.",
            f"Set HF_TASK to one of {', '.join(SERVED)}, or add an inference.py.",
        )
    return claiming[0]


def trained_task(origin: Origin) -> str | None:
    """Return the task that answers with a model of the recipe, if its config.json names one. What
    other tools have trained since has the field, too, but often another class."""
    settings = origin.read_settings()  # an encoder's may be in a folder below
    named = settings.get(TRAINED_TASK)
    if not isinstance(named, dict) or [named.get("class")] != settings.get("architectures"):
        return None
    task = named.get("task", "")
    return (served_as(task) or None) if task in TASKS else None


def task_of_class(name: str) -> str | None:
    """Return the task of a class of transformers; None if no task uses it."""
    # Tasks of images, audio and tables come first, since some of their classes are also in the
    # mappings of texts.
    media = [
        (task, set(library.architectures(task)) - {"AutoModelForCausalLM"})
        for task in library.names()
        if task not in SERVED and task not in _VAGUE
    ]
    texts = [(task, set(entry.architectures)) for task, entry in SERVED.items()]
    for task, architectures in media + texts:
        if any(name == model for auto in architectures for _, model in _classes(auto)):
            return task
    headless = [kind for kind, model in _classes("AutoModel") if model == name]
    if not headless:
        return None
    reads_texts = any(kind in TOKENIZER_MAPPING_NAMES for kind in headless)
    return FEATURES if reads_texts else "image-feature-extraction"


def _classes(architecture: str) -> list[tuple[str, str]]:
    """Return the names of configurations and models of one of transformers' Auto classes."""
    mapping: Any = getattr(transformers, architecture)._model_mapping
    return [
        (kind, name)
        for kind, classes in mapping._model_mapping.items()
        for name in ([classes] if isinstance(classes, str) else classes)
    ]
