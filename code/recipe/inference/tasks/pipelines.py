"""transformers' own pipelines: around a model that is loaded already, and for the tasks that have
no batching of their own here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

from recipe.compat import in_precision
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.inference import loaded_model
from recipe.inference.answers import plain
from recipe.inference.loaded_model import Encoder
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, NotTakenHere, Request
from recipe.inference.tasks import media

_SOUNDS = {"automatic-speech-recognition", "audio-classification", "zero-shot-audio-classification"}
_WORDS = {"text-to-audio", "table-question-answering"}
_IMAGE_KEYS = {"image", "images"}
_TEXT_KEYS = {"text", "question", "query", "prompt", "candidate_labels", "role", "type", "content"}
_FAULTS = (ValueError, TypeError, KeyError, IndexError, AssertionError)


def around(task: str, loaded: Encoder) -> Any:
    """transformers' pipeline for the task, with the model and the tokenizer that are loaded."""
    make: Any = transformers.pipeline
    # The pipeline cuts texts at what the tokenizer says, which of some folders is nothing.
    loaded.tokenizer.model_max_length = loaded.max_length
    device = loaded.model.device
    return make(task, model=loaded.model, tokenizer=loaded.tokenizer, device=device)


def names() -> list[str]:
    """The tasks that the installed transformers has pipelines for."""
    return sorted(PIPELINE_REGISTRY.supported_tasks)


def architectures(task: str) -> list[str]:
    """transformers' Auto classes whose models have the task's head."""
    return [each.__name__ for each in PIPELINE_REGISTRY.supported_tasks[task]["pt"]]


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A task that transformers' pipeline answers, one request at a time."""

    task: str
    pipeline: Any
    parameters: frozenset[str]
    """What the pipeline takes beside its inputs."""

    def example(self, text: str) -> Request | None:
        """A request that this task answers; None where none can be made without knowing more."""
        from PIL import Image

        if self.task in _SOUNDS:
            raw = {"raw": [0.0] * self._rate, "sampling_rate": self._rate}
            return self._asking(Request(texts=[raw], raw=raw, single=True))
        if self.task in _WORDS:
            inputs: Any = {"query": text, "table": {"a": ["1"], "b": ["2"]}}
            inputs = inputs if self.task == "table-question-answering" else text
            return Request(texts=[inputs], raw=inputs, single=True)
        if self._reads_images and self.task not in ("keypoint-matching", "image-text-to-text"):
            grey = Image.new("RGB", (64, 64), "grey")
            return self._asking(Request(texts=[grey], raw=grey, single=True, prepared=grey))
        return None

    def _asking(self, request: Request) -> Request:
        if self.task.startswith("zero-shot"):
            request.parameters = {"candidate_labels": ["a", "b"]}
        return request

    @property
    def _reads_images(self) -> bool:
        return self.task not in _SOUNDS | _WORDS

    @property
    def _rate(self) -> int:
        return int(getattr(self.pipeline.feature_extractor, "sampling_rate", 16000))

    def measure(self, request: Request) -> list[int]:
        """One for each input: how long they take is not known.

        Raises:
            BadRequest: a parameter or an input is none of this task's.
        """
        for name in request.parameters:
            if name not in self.parameters:
                raise BadRequest(
                    f"The parameter {name!r} is not one of {self.task}, which takes "
                    f"{', '.join(sorted(self.parameters)) or 'none'}."
                )
        if request.prepared is None:
            inputs = list(request.texts) if request.raw is None else request.raw
            request.prepared = self._inputs(inputs, request.content_type)
        return [1] * len(request.texts)

    def _inputs(self, value: Any, content_type: str) -> Any:
        if content_type:
            wanted = (
                "audio/" if self.task in _SOUNDS else "image/" if self._reads_images else "text"
            )
            if not content_type.startswith(wanted):
                raise NotTakenHere(f"{self.task} takes no {content_type}. Send {wanted}* or JSON.")
        if self.task in _WORDS:
            return value
        if self.task in _SOUNDS:
            if isinstance(value, list):
                return [media.sound(each, self._rate) for each in value]
            return media.sound(value, self._rate)
        return _with_images(value)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """What the pipeline answers to each request, or the exception in its place."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Any:
        try:
            self.measure(request)
            answer = plain(self.pipeline(request.prepared, **request.parameters))
        except _FAULTS as error:
            if isinstance(error, BadRequest):
                return error
            return BadRequest(f"{self.task} cannot answer this: {type(error).__name__}: {error}")
        if not isinstance(answer, list):
            return Answers([answer], single=True)
        # A list that is one input's answer is one entry of a table, and not one for each record.
        return Answers([answer], single=True) if request.single else Answers(answer)


def _with_images(value: Any, key: str = "") -> Any:
    """`value` with a picture in the place of every text that may stand for one."""
    if isinstance(value, bytes):
        return media.image(value)
    if isinstance(value, str):
        return value if key in _TEXT_KEYS else media.image(value)
    if isinstance(value, dict):
        if value.get("type") in ("image", "image_url", "audio", "video", "video_url"):
            return _part(value)
        return {name: _with_images(each, name) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_images(each, key) for each in value]
    return value


def _part(value: Mapping[str, Any]) -> dict[str, Any]:
    """A picture in a chat's message."""
    given = [each for name, each in value.items() if name != "type"]
    if value["type"] != "image" or len(given) != 1 or not isinstance(given[0], str):
        raise BadRequest(
            f"A message holds {str(dict(value))[:60]}. Addresses are not followed: send "
            '{"type": "image", "image": "<base64>"}.'
        )
    return {"type": "image", "image": media.image(given[0])}


def load(origin: Origin, task: str, environ: Mapping[str, str]) -> Foreign:
    """transformers' pipeline for a task of its own.

    Raises:
        ModelError: the model cannot be loaded for it, or another library is needed that is missing.
        ValueError: AMPHORA_DTYPE is one that pipelines do not have.
    """
    # Pipelines make arrays of what models answer, and those know no bfloat16.
    exact = {**environ, "AMPHORA_DTYPE": environ.get("AMPHORA_DTYPE") or "float32"}
    kind, name, dtype = loaded_model.precision(exact)
    if name == "int8":
        raise ValueError(f"AMPHORA_DTYPE is 'int8', which {task} has not. Give float32, bfloat16.")
    make: Any = transformers.pipeline
    try:
        made = make(task, model=origin.place, device=kind, **in_precision(dtype), **origin.options)
    except (*UNLOADABLE, ImportError, KeyError, TypeError) as error:
        raise ModelError(
            f"The model {origin.place} cannot be loaded for {task}: {why_unloadable(error)}",
            "Check that its files are whole, and that HF_TASK is what it was trained for.",
        ) from error
    loaded_model.refuse_broken(made.model, origin)
    if task in _WORDS and made.tokenizer is not None:
        loaded_model.refuse_empty(made.tokenizer, origin.place)
    print(
        f"model: {type(made.model).__name__} on {kind} in {name}, by transformers' own pipeline: "
        "one request at a time",
        flush=True,
    )
    return Foreign(task=task, pipeline=made, parameters=_parameters(made))


def _parameters(made: Any) -> frozenset[str]:
    """The names that a pipeline takes: those of its signature, and those that it looks for among
    the rest."""
    function = made._sanitize_parameters
    signature = inspect.signature(function).parameters.values()
    known = {each.name for each in signature if each.kind is each.POSITIONAL_OR_KEYWORD}
    if any(each.kind is each.VAR_KEYWORD for each in signature):
        source = inspect.getsource(function)
        known |= {
            a or b for a, b in re.findall(r'"(\w+)" in kwargs|kwargs\[?\.?\w*\(?"(\w+)"', source)
        }
    return frozenset(known - {"timeout", "self", "tokenizer_kwargs", "return_tensors"})
