"""The handlers that `amphora serve` uses for a model without code.

HF_TASK, or else the head of the model, selects the task: one of the recipe's, or of transformers'
pipelines.

The server parses requests and writes answers (`amphora.serving.api`). These functions get the
inputs and parameters of a request as plain values, and return predictions as such. Texts beyond the
model's limit are truncated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipe.console import log
from recipe.late_imports import imported_by_call

with (
    imported_by_call("scipy.optimize", "linear_sum_assignment"),
    imported_by_call("boto3", "Session"),
):
    from recipe.backend import bounds, turns
    from recipe.backend.requests.payloads import Request
    from recipe.backend.requests.probes import TEXTS
    from recipe.backend.served_task import ServedTask
    from recipe.backend.shared_encoder import takes_adapters
    from recipe.inference import named_adapters, registry
    from recipe.models.sources.origin import Origin


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
        (prediction,) = predict_batch_fn([model.prepare(request)], model)
        answer = prediction() if callable(prediction) else prediction
        if isinstance(answer, Exception):
            raise answer
        try:
            json.dumps(answer, allow_nan=False, default=str)
        except ValueError as error:
            raise ValueError(
                "The model's answer contains NaN or infinity: check its weights and its code."
            ) from error
    if model.loaded_model is not None:
        model.loaded_model.release_replaced()


def describe_fn(model_dir: str, model: ServedTask) -> dict[str, Any]:
    """Describe the model, for the page at / and the routes of clients' APIs."""
    task = registry.chosen(Origin.find(model_dir, os.environ), os.environ)
    name = os.environ.get("AMPHORA_MODEL_NAME") or os.environ.get("HF_MODEL_ID") or "model"
    adapts = model.may_adapt and takes_adapters(os.environ)
    return {"model": name, "task": task, "adapters": adapts, **model.describe()}


def turns_fn(model: ServedTask, pause: Callable[..., None]) -> None:
    """Let predictions pause between calls of the model, and start what each worker needs."""
    turns.take(pause)
    if model.loaded_model is not None and (engine := model.loaded_model.engine) is not None:
        engine.start()


def request_fn(request: Mapping[str, Any], model: ServedTask) -> Request:
    """Prepare a request of the server's API layer (`amphora.serving.api`), whose plain values are
    the fields of a `Request`. Raise BadRequest if an input or a parameter is wrong, or the requests
    of its body cost too much together."""
    parsed = Request(**request)
    with bounds.shared(parsed.spent):
        task = named_adapters.select(parsed, model)
        prepared = task.prepare(parsed)
        return prepared if task is model else replace(prepared, task=task)


def tokens_fn(data: Request, model: ServedTask) -> list[int]:
    """Return the number of tokens of each text."""
    return list(data.sizes)


def predict_batch_fn(inputs: Sequence[Request], model: ServedTask) -> list[Any]:
    """Compute all requests together. Return a dict of plain values for each, which
    `amphora.serving.api.canonical` describes; an exception; an iterator over the pieces of a
    stream; or, for a prediction that takes many turns, a function that returns the dict."""
    return named_adapters.predict(inputs, model)


def load_adapter_fn(name: str, folder: str, model_dir: str, model: ServedTask) -> dict[str, Any]:
    """Load an adapter of the model, and describe it as `describe_fn` does."""
    origin = Origin.find(model_dir, os.environ)
    task = named_adapters.load(name, folder, model, origin, os.environ)
    return {"model": name, **task.describe()}


def unload_adapter_fn(name: str, model: ServedTask) -> None:
    """Unload an adapter. Requests that it is answering are finished."""
    model.adapters.tasks.pop(name, None)
