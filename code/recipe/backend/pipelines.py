"""transformers' pipelines: around a loaded model, and for tasks without a `serve` module here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

from recipe.backend import bounds, media, precision, turns
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests import serialization
from recipe.backend.requests.bodies import MEDIA_PARTS
from recipe.backend.requests.payloads import (
    Answers,
    BadRequest,
    Inputs,
    NotTakenHere,
    Prepared,
    Request,
)
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin, refuse_empty
from recipe.backend.served_task import ServedTask
from recipe.compat import dtype_argument
from recipe.console import log
from recipe.errors import UNLOADABLE, ModelError, why_unloadable

_SOUNDS = {"automatic-speech-recognition", "audio-classification", "zero-shot-audio-classification"}
_WORDS = {"text-to-audio", "table-question-answering"}
_TEXT_KEYS = {"text", "question", "query", "prompt", "candidate_labels", "role", "type", "content"}
_COUNTS = ("max_new_tokens", "max_length", "num_beams", "num_return_sequences")
_FORMS = {
    "table-question-answering": "table",
    **dict.fromkeys(("automatic-speech-recognition", "audio-classification"), "audio"),
    **dict.fromkeys(
        ("image-classification", "image-segmentation", "image-feature-extraction",
         "image-to-text", "depth-estimation", "object-detection"), "image"
    ),
}  # fmt: skip
"""The form of the page for some tasks; JSON for the others."""
_FAULTS = (ValueError, TypeError, KeyError, IndexError, AssertionError)


def wrap_pipeline(task: str, loaded: LoadedModel) -> Any:
    """Return transformers' pipeline for a task around a loaded model."""
    make: Any = transformers.pipeline
    # The pipeline truncates texts at the tokenizer's limit, which some folders lack.
    loaded.tokenizer.model_max_length = loaded.max_length
    device = loaded.model.device
    return make(task, model=loaded.model, tokenizer=loaded.tokenizer, device=device)


def names() -> list[str]:
    """Return the tasks that the installed transformers has pipelines for."""
    return sorted(PIPELINE_REGISTRY.supported_tasks)


def architectures(task: str) -> list[str]:
    """Return transformers' Auto classes whose models have the task's head."""
    return [model.__name__ for model in PIPELINE_REGISTRY.supported_tasks[task]["pt"]]


@dataclass(frozen=True, kw_only=True)
class Foreign(ServedTask):
    """A task that a pipeline of transformers answers, one request at a time."""

    task: str
    pipeline: Any
    parameters: frozenset[str]
    """The names of the pipeline's parameters."""

    @classmethod
    def load(cls, origin: Origin, task: str, environ: Mapping[str, str]) -> Foreign:
        """Load transformers' own pipeline for a task. Raise ModelError if the model cannot be
        loaded for it, a library is missing, or the device needs fixed shapes, and ValueError if
        AMPHORA_DTYPE is not a precision."""
        what = f"transformers' pipeline for {task}"
        kind, name, dtype = precision.library_precision(environ, what)
        make: Any = transformers.pipeline
        try:
            pipeline = make(
                task, model=origin.location, device=kind, **dtype_argument(dtype), **origin.options
            )
        except ImportError as error:
            why = " ".join(str(error).split()).partition(" You can install")[0]
            raise ModelError(
                f"The model {origin.location} cannot be loaded for {task}: {why}",
                "Name the library that is missing in code/requirements.txt.",
            ) from error
        except (*UNLOADABLE, KeyError, TypeError) as error:
            raise ModelError(
                f"The model {origin.location} cannot be loaded for {task}: {why_unloadable(error)}",
                "Check that its files are complete, and that HF_TASK is what it was trained for.",
            ) from error
        weights.refuse_broken(pipeline.model, origin)
        turns.pause_before_calls(pipeline.model)
        if task in _WORDS and pipeline.tokenizer is not None:
            refuse_empty(pipeline.tokenizer, origin.location)
        log(
            f"model: {type(pipeline.model).__name__} on {kind} in {name}, by transformers' own "
            "pipeline: one request at a time"
        )
        return cls(task=task, pipeline=pipeline, parameters=parameters_of(pipeline))

    @property
    def sampling_rate(self) -> int:
        """Return the sampling rate of the model's audio, in hertz."""
        return int(getattr(self.pipeline.feature_extractor, "sampling_rate", 16000))

    def example(self, text: str) -> Request | None:
        from PIL import Image

        inputs: Any
        if self.task in _SOUNDS:
            inputs = {"raw": [0.0] * self.sampling_rate, "sampling_rate": self.sampling_rate}
        elif self.task == "table-question-answering":
            inputs = {"query": text, "table": {"a": ["1"], "b": ["2"]}}
        elif self.task in _WORDS:
            inputs = text
        elif self.task in ("keypoint-matching", "image-text-to-text"):
            return None
        else:
            inputs = Image.new("RGB", (64, 64), "grey")
        labels = {"candidate_labels": ["a", "b"]} if self.task.startswith("zero-shot") else {}
        return Request(inputs=[inputs], raw=inputs, single=True, parameters=labels)

    @property
    def form(self) -> str:
        return _FORMS.get(self.task, "json")

    def prepare(self, request: Request) -> Prepared:
        """Return the pipeline's inputs. Each has the size 1, since its tokens are unknown."""
        if request.faults and not request.inputs:
            raise BadRequest(request.faults[min(request.faults)])
        inputs = list(request.inputs) if request.raw is None else request.raw
        if isinstance(inputs, dict) and self.task not in _WORDS:
            if unknown := sorted(set(inputs) - MEDIA_PARTS):
                raise BadRequest(
                    f"An input has the unknown parts {', '.join(map(repr, unknown))}. Send "
                    'parameters next to it: {"inputs": ..., "parameters": {...}}.'
                )
            moved = {name: inputs[name] for name in inputs if name in self.parameters}
            request = replace(request, parameters={**moved, **request.parameters})
            inputs = {name: value for name, value in inputs.items() if name not in moved}
            if len(inputs) == 1 and set(inputs) <= {"image", "images", "audio", "video", "videos"}:
                (inputs,) = inputs.values()
        is_sound, is_words = self.task in _SOUNDS, self.task in _WORDS
        kind = "audio/" if is_sound else "text" if is_words else "image/"
        if request.content_type and not request.content_type.startswith(kind):
            raise NotTakenHere(
                f"{self.task} does not read {request.content_type}. Send {kind}* or JSON."
            )
        if is_sound and isinstance(inputs, list):
            inputs = [media.sound(value, self.sampling_rate) for value in inputs]
        elif is_sound:
            inputs = media.sound(inputs, self.sampling_rate)
        elif not is_words:
            inputs = decode_images(inputs, media.Pixels())
        for name in request.parameters:
            if name not in self.parameters:
                raise BadRequest(
                    f"{self.task} has no parameter {name!r}. It takes "
                    f"{', '.join(sorted(self.parameters)) or 'none'}."
                )
        _hold(request.parameters, count := len(request.inputs))
        kept = Inputs(request.inputs, request.faults)
        return Prepared(request=request, inputs=kept, sizes=[1] * count, work=inputs)

    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Return the pipeline's answer to each request, or an exception in its place."""
        answers: list[Any] = []
        for prepared in requests:
            try:
                answer = self.pipeline(prepared.work, **prepared.parameters)
            except BadRequest as error:
                answers.append(error)
            except (*_FAULTS, RuntimeError) as error:
                # Audio of fewer samples than the model's first convolution reads.
                if isinstance(error, RuntimeError) and "Kernel size" not in str(error):
                    raise
                why = f"{type(error).__name__}: {error}"
                answers.append(BadRequest(f"{self.task} cannot answer this: {why}"))
            else:
                answer = serialization.plain(answer)
                # A list that answers a single input is one entry, not one for each input.
                is_one = prepared.request.single or not isinstance(answer, list)
                answers.append(Answers([answer], single=True) if is_one else Answers(answer))
        return answers


def _hold(parameters: Mapping[str, Any], inputs: int) -> None:
    """Refuse parameters of a pipeline that make a small request expensive: by TooCostly tokens
    beyond the bound, by BadRequest chunks of audio below a second, and what is not a number."""
    nested = parameters.get("generate_kwargs")
    writing = {**parameters, **(nested if isinstance(nested, dict) else {})}
    counts = {name: writing.get(name) or 1 for name in _COUNTS}
    if wrong := [name for name, value in counts.items() if type(value) is not int]:
        raise BadRequest(f"{wrong[0]} is {str(counts[wrong[0]])[:60]!r}. Give a whole number.")
    length = max(counts["max_new_tokens"], counts["max_length"])
    answers = max(counts["num_beams"], counts["num_return_sequences"])
    reason = f"{inputs} inputs x {answers} beams or answers x {length} tokens"
    bounds.hold(bounds.Bound.WRITTEN, inputs * answers * length, reason)
    chunk, stride = (parameters.get(name) or 0 for name in ("chunk_length_s", "stride_length_s"))
    lengths = [chunk, *(stride if isinstance(stride, list) else [stride])]
    if not all(isinstance(seconds, (int, float)) for seconds in lengths):
        raise BadRequest("chunk_length_s or stride_length_s is not a number of seconds.")
    # By default, a chunk shares a sixth of its length with each neighbour.
    usual = chunk / 3 if parameters.get("stride_length_s") is None else 2 * lengths[-1]
    shared = sum(lengths[1:]) if isinstance(stride, list) else usual
    if chunk and chunk - shared < 1:
        raise BadRequest(
            f"chunk_length_s is {chunk}, of which {shared:.4g} s are shared with the chunks before "
            "and after it. Give a chunk_length_s that leaves 1 s or more."
        )


def decode_images(value: Any, pixels: media.Pixels, key: str = "") -> Any:
    """Return a JSON value of any depth, or the bytes of an image, with decoded images in place of
    base64. Raise BadRequest if an image cannot be read, or is a URL or a path. `key` is the key of
    the value in its object: the strings of some keys are texts.
    """
    if isinstance(value, bytes):
        return media.image(value, pixels)
    if isinstance(value, str):
        return value if key in _TEXT_KEYS else media.image(value, pixels)
    if isinstance(value, dict):
        if value.get("type") in ("image", "image_url", "audio", "video", "video_url"):
            parts = [part for name, part in value.items() if name != "type"]
            if value["type"] != "image" or len(parts) != 1 or not isinstance(parts[0], str):
                raise BadRequest(
                    f"A message has {str(dict(value))[:60]}. URLs are not followed: send "
                    '{"type": "image", "image": "<base64>"}.'
                )
            return {"type": "image", "image": media.image(parts[0], pixels)}
        return {name: decode_images(part, pixels, name) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [decode_images(part, pixels, key) for part in value]
    return value


def parameters_of(pipeline: Any) -> frozenset[str]:
    """Return the names of a pipeline's parameters, from the signature and the code of its
    `_sanitize_parameters`."""
    function = pipeline._sanitize_parameters
    signature = inspect.signature(function).parameters.values()
    known = {item.name for item in signature if item.kind is item.POSITIONAL_OR_KEYWORD}
    if any(item.kind is item.VAR_KEYWORD for item in signature):
        source = inspect.getsource(function)
        known |= {
            a or b for a, b in re.findall(r'"(\w+)" in kwargs|kwargs\[?\.?\w*\(?"(\w+)"', source)
        }
    return frozenset(known - {"timeout", "self", "tokenizer_kwargs", "return_tensors"})
