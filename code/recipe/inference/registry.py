"""Which task a model answers, and the model loaded for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from recipe.compat import quieten
from recipe.inference import classifier, embedder, generator, tagger
from recipe.inference.loaded_model import Origin
from recipe.inference.payloads import Request
from recipe.storage import checksums

_CLASSIFICATION, _FEATURES = "text-classification", "feature-extraction"
_TAGGING, _GENERATION = "token-classification", "text-generation"
_SYNONYMS = {"sentiment-analysis": _CLASSIFICATION, "ner": _TAGGING}
_HEADS = {
    "ForSequenceClassification": _CLASSIFICATION,
    "ForTokenClassification": _TAGGING,
    "ForCausalLM": _GENERATION,
    "LMHeadModel": _GENERATION,
}

_ADAPTERS = {"SEQ_CLS": _CLASSIFICATION, "TOKEN_CLS": _TAGGING, "CAUSAL_LM": _GENERATION}


class Task(Protocol):
    """A loaded model that answers requests."""

    @property
    def warm_up(self) -> Mapping[str, Any]:
        """Parameters of a request that costs little."""

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text. Raises BadRequest where the request is none for this task."""

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """The prediction for each request."""


_LOADERS: Mapping[str, Callable[[Origin], Task]] = {
    _CLASSIFICATION: classifier.load,
    _TAGGING: tagger.load,
    _FEATURES: embedder.load,
    _GENERATION: generator.load,
}


def load(model_dir: str, environ: Mapping[str, str]) -> Task:
    """The model in `model_dir` or of HF_MODEL_ID, for HF_TASK or for what its head is made for.

    Raises:
        ModelError: there is no model, or its files have changed since they were written.
        ValueError: HF_TASK names a task that these handlers cannot do.
    """
    quieten()
    origin = Origin.find(model_dir, environ)
    with checksums.verified(origin.place):
        name = environ.get("HF_TASK") or task_of(origin)
        name = _SYNONYMS.get(name, name)
        if name not in _LOADERS:
            raise ValueError(f"HF_TASK is {name!r}. Give {', '.join(_LOADERS)}.")
        print(f"task: {name}", flush=True)
        return _LOADERS[name](origin)


def task_of(origin: Origin) -> str:
    """The task that a model's class is made for; feature extraction where it has no head."""
    if origin.adapter:
        # Beside an adapter lies the configuration of its base, whose class is another.
        return _ADAPTERS.get(origin.adapter.get("task_type") or "", _FEATURES)
    names = getattr(origin.config(), "architectures", None) or []
    heads = (task for name in names for head, task in _HEADS.items() if name.endswith(head))
    return next(heads, _FEATURES)
