"""transformers' pipelines: around a loaded model, and for tasks of images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

from recipe.backend import images, precision, programs, turns, zero_shot
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import Answers, BadRequest, PreparedRequest, Request
from recipe.backend.requests.probes import draw_images
from recipe.backend.saved import weights
from recipe.backend.served_task import ServedTask
from recipe.compat import dtype_argument
from recipe.console import log
from recipe.errors import UNLOADABLE, ModelError, describe_error, why_unloadable
from recipe.models.sources import tokenizers
from recipe.models.sources.origin import Origin, refuse_empty

TASKS: Mapping[str, Sequence[str]] = {
    "image-classification": ("top_k", "function_to_apply"),
    "image-segmentation": ("subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold"),
    "image-feature-extraction": ("pool",),
    "depth-estimation": (),
    "object-detection": ("threshold",),
    "zero-shot-image-classification": ("candidate_labels", "hypothesis_template"),
    "zero-shot-object-detection": ("candidate_labels", "threshold", "top_k"),
}
"""The tasks whose inputs are images, and the parameters of their pipelines."""
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


def load_pipeline(origin: Origin, task: str, environ: Mapping[str, str]) -> Any:
    """Load transformers' own pipeline for a task. Raise ModelError if the model cannot be loaded
    for it, a library is missing, or the device needs fixed shapes, and ValueError if AMPHORA_DTYPE
    is not a precision."""
    # The library converts answers to NumPy arrays, which do not support bfloat16.
    requested = environ.get("AMPHORA_DTYPE") or "float32"
    kind, name, dtype = precision.chosen({**environ, "AMPHORA_DTYPE": requested})
    if kind in programs.DEVICES:
        raise programs.refused(kind, f"transformers' pipeline for {task} has no fixed shapes")
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
    if pipeline.tokenizer is not None:
        if task not in TASKS:
            refuse_empty(pipeline.tokenizer, origin.location)
        tokenizer = tokenizers.match_file(pipeline.tokenizer, origin.location, **origin.options)
        pipeline.tokenizer = tokenizer
        processor: Any = getattr(pipeline, "processor", None)
        if hasattr(processor, "tokenizer"):
            processor.tokenizer = tokenizer
        tokenizers.log_replacement(tokenizer)
    log(
        f"model: {type(pipeline.model).__name__} on {kind} in {name}, by transformers' own "
        "pipeline: one request at a time"
    )
    return pipeline


@dataclass(frozen=True, kw_only=True)
class Foreign(ServedTask):
    """A task of images that a pipeline of transformers answers, one request at a time."""

    task: str
    """One of `TASKS`."""
    pipeline: Any

    @classmethod
    def load(cls, origin: Origin, task: str, environ: Mapping[str, str]) -> Foreign:
        """Load the pipeline of a task (`load_pipeline`)."""
        pipeline = load_pipeline(origin, task, environ)
        turns.pause_before_calls(pipeline.model)
        return cls(task=task, pipeline=pipeline)

    def example(self, text: str) -> Request:
        from PIL import Image

        out = io.BytesIO()
        Image.new("RGB", (64, 64), "grey").save(out, format="PNG")
        labels = {"candidate_labels": ["a", "b"]} if "candidate_labels" in TASKS[self.task] else {}
        return Request(inputs=[out.getvalue()], single=True, parameters=labels)

    def probes(self) -> Sequence[Request]:
        if self.task != "image-classification":
            return ()
        labels = len(self.pipeline.model.config.id2label)
        parameters = {"top_k": labels, "function_to_apply": "none"}
        images = draw_images()
        return [Request(inputs=[image], single=True, parameters=parameters) for image in images]

    @property
    def form(self) -> str:
        return "json" if "candidate_labels" in TASKS[self.task] else "image"

    def prepare(self, request: Request) -> PreparedRequest:
        """Return the pipeline's inputs. Each has the size 1, since its tokens are unknown."""
        request = request.checked({*TASKS[self.task]}, self.task)
        pixels = images.Pixels()
        inputs = request.read(lambda value: images.read(value, pixels))
        if "candidate_labels" in TASKS[self.task]:
            labels, _ = zero_shot.labels_and_hypotheses(request, len(inputs.values))
            parameters = {**request.parameters, "candidate_labels": labels}
            request = replace(request, parameters=parameters)
        work = inputs.values[0] if request.single else list(inputs.values)
        sizes = [1] * len(inputs.values)
        return PreparedRequest(request=request, inputs=inputs, sizes=sizes, work=work)

    def predict(self, requests: Sequence[PreparedRequest]) -> list[Any]:
        """Return the pipeline's answer to each request, or an exception in its place."""
        answers: list[Any] = []
        for prepared in requests:
            try:
                answer = self.pipeline(prepared.work, **prepared.parameters)
            except BadRequest as error:
                answers.append(error)
            except _FAULTS as error:
                why = f"{type(error).__name__}: {describe_error(error)}"
                answers.append(BadRequest(f"{self.task} cannot answer this: {why}"))
            else:
                is_one = prepared.request.single
                answers.append(Answers([answer], single=True) if is_one else Answers(answer))
        return answers
