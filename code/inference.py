"""The handlers that `amphora serve` uses for a model without code.

HF_TASK, or else the head of the model, selects the task: those of texts, and of transformers'
pipelines those that read images.

Requests: `{"inputs": "text"}`, `{"inputs": ["text", ...], "parameters": {"top_k": 2}}`, pairs,
questions with their contexts, a bare string or list, JSON Lines, CSV with a record in each row,
plain text, or the bytes of an image. Answers have the shape of
Hugging Face's image (docs/SERVING.md has the table). Texts beyond the model's limit are truncated;
the header X-Amphora-Truncated of the answer lists their positions. An invalid record of JSON Lines
or CSV is answered by an error in its place, listed in X-Amphora-Failed. If all records are invalid,
or lines have different parameters, the request is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from recipe.console import log
from recipe.late_imports import imported_by_call

with (
    imported_by_call("scipy.optimize", "linear_sum_assignment"),
    imported_by_call("boto3", "Session"),
):
    from recipe.backend import bounds, turns
    from recipe.backend.requests import answers, payloads
    from recipe.backend.requests.payloads import Prepared, Request, UnknownModel
    from recipe.backend.requests.probes import TEXTS
    from recipe.backend.served_task import ServedTask
    from recipe.inference import registry
    from recipe.inference.apis import openai, request_reader
    from recipe.models.sources.origin import Origin

_ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
"""Header that names a LoRA adapter."""


def model_fn(model_dir: str) -> ServedTask:
    """Load the model in `model_dir`, or that of HF_MODEL_ID if there is none."""
    bounds.read(os.environ)
    if os.environ.get("HF_MODEL_ID") and not os.environ.get("HF_TASK"):
        origin = Origin.find(model_dir, os.environ)
        if origin.location != model_dir:
            origin.refuse_handler()
    return registry.load(model_dir, os.environ)


def model_warmup_fn(model_dir: str, model: ServedTask) -> None:
    """Answer a request, so that a model that cannot answer fails at start."""
    if (request := model.example(TEXTS[0])) is None:
        log("warm-up: skipped, since this task has no example request")
    else:
        answers.write_answer(predict_fn(Call(request), model), payloads.JSON)
    if model.loaded_model is not None:
        model.loaded_model.release_replaced()


def describe_fn(model_dir: str, model: ServedTask) -> dict[str, Any]:
    """Describe the model, for the page at / and the routes of clients' APIs."""
    task = registry.chosen(Origin.find(model_dir, os.environ), os.environ)
    return {"model": openai.served_name(), "task": task, **model.describe()}


def turns_fn(model: ServedTask, pause: Callable[..., None]) -> None:
    """Let predictions pause between calls of the model, and start what each worker needs."""
    turns.take(pause)
    if model.loaded_model is not None and (engine := model.loaded_model.engine) is not None:
        engine.start()


@dataclass
class Call:
    """A request on its way through these functions, prepared once, by the first that needs it."""

    request: Request
    _prepared: Prepared | None = None

    def prepared(self, model: ServedTask) -> Prepared:
        """Return the request as the model's task prepares it. Raise BadRequest if an input or a
        parameter is wrong, or the model does not answer the API."""
        if self._prepared is None:
            model.refuse_other_apis(self.request)
            self._prepared = model.prepare(self.request)
        return self._prepared


def input_fn(body: bytes, content_type: str, context: Any = None) -> Call:
    """Read a request in Hugging Face's form, OpenAI's, TEI's or TGI's.

    Raises:
        BadRequest: The body is invalid; the message says why, with a valid example.
        UnknownModel: A header names an adapter, and these models have none.
        UnsupportedContentType: The content type is not supported.
    """
    if name := getattr(context, "headers", {}).get(_ADAPTER, ""):
        raise UnknownModel(
            f"{_ADAPTER} is {name!r}, and this model has no adapters: only vLLM serves adapters by "
            "name. Leave the header out."
        )
    path = getattr(context, "path", "/invocations")
    return Call(request_reader.read(body, content_type, path))


def tokens_fn(data: Call, model: ServedTask) -> list[int]:
    """Return the number of tokens of each text. Raise BadRequest if its task does not know a
    parameter, or the model does not answer the request's API."""
    return list(data.prepared(model).sizes)


def predict_fn(data: Call, model: ServedTask) -> Any:
    """Return an answer for each text, or an iterator over pieces of a streamed generation."""
    (prediction,) = predict_batch_fn([data], model)
    if callable(prediction):
        return prediction()
    if isinstance(prediction, Exception):
        raise prediction
    return prediction


def predict_batch_fn(inputs: Sequence[Call], model: ServedTask) -> list[Any]:
    """Compute all requests together, and return the result of `predict_fn` for each. For a
    prediction that takes many turns, return a function that returns it."""
    requests = [data.prepared(model) for data in inputs]
    answered: list[Any] = []
    for prepared, prediction in zip(requests, model.predict(requests), strict=True):
        if callable(prediction):
            answered.append(partial(_later, prediction, prepared))
        else:
            answered.append(request_reader.format_answer(prediction, prepared))
    return answered


def _later(prediction: Callable[[], Any], prepared: Prepared) -> Any:
    answer = request_reader.format_answer(prediction(), prepared)
    if isinstance(answer, Exception):
        raise answer
    return answer


def output_fn(prediction: Any, accept: str, context: Any = None) -> tuple[Any, str]:
    """Return the answer as JSON, JSON Lines, CSV or NPY, and its type. Raise UnsupportedContentType
    if `accept` names another type."""
    for name in ("truncated", "failed", "unfinished"):
        if context is not None and (positions := getattr(prediction, name, ())):
            header = f"X-Amphora-{name.capitalize()}"
            context.set_response_header(0, header, ",".join(map(str, positions)))
    return answers.write_answer(prediction, accept)
