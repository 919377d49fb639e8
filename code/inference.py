"""The handlers that `amphora serve` uses for a model without code.

HF_TASK, or else the head of the model, selects the task: those of transformers' pipelines, and
question answering, summarization, translation, text2text-generation and sentence-similarity.

Requests: `{"inputs": "text"}`, `{"inputs": ["text", ...], "parameters": {"top_k": 2}}`, pairs,
questions with their contexts, a bare string or list, JSON Lines, CSV with a record in each row,
plain text, an NPY array of texts, or the bytes of an image or audio file. Answers have the shape of
Hugging Face's image (docs/SERVING.md has the table). Texts beyond the model's limit are truncated;
the header X-Amphora-Truncated of the answer lists their positions. An invalid record of JSON Lines
or CSV is answered by an error in its place, listed in X-Amphora-Failed. If all records are invalid,
or lines have different parameters, the request is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    from recipe.backend.requests.payloads import Request, UnknownModel
    from recipe.backend.saved.origin import Origin
    from recipe.backend.served_task import ServedTask
    from recipe.inference import registry
    from recipe.inference.apis import description, request_reader, tei

_ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
"""Header that names a LoRA adapter."""


def model_fn(model_dir: str) -> ServedTask:
    """Load the model in `model_dir`, or that of HF_MODEL_ID if there is none."""
    bounds.read(os.environ)
    return registry.load(model_dir, os.environ)


def model_warmup_fn(model_dir: str, model: ServedTask) -> None:
    """Answer two requests, so that a model that cannot answer fails at start."""
    for length in (1, 16):
        request = model.example("A sentence to warm up with. " * length)
        if request is None:
            log("warm-up: skipped, since this task has no example request")
            break
        answers.write_answer(predict_fn(request, model), payloads.JSON)
    if (engine := registry.engine_of(model)) is not None:
        engine.take_over()


def describe_fn(model_dir: str, model: ServedTask) -> dict[str, Any]:
    """Describe the model, for the page at / and the routes of clients' APIs."""
    task = registry.chosen(Origin.find(model_dir, os.environ), os.environ)
    return description.describe(model, task)


def turns_fn(model: ServedTask, pause: Callable[..., None]) -> None:
    """Let predictions pause between calls of the model, and start what each worker needs."""
    turns.take(pause)
    if (engine := registry.engine_of(model)) is not None:
        engine.start()


def input_fn(body: bytes, content_type: str, context: Any = None) -> Request:
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
    return request_reader.read(body, content_type, getattr(context, "path", "/invocations"))


def tokens_fn(data: Request, model: ServedTask) -> list[int]:
    """Return the number of tokens of each text.

    Raises:
        BadRequest: A parameter is unknown to the model's task, or the model does not answer the
            request's API.
    """
    description.refuse_other_apis(model, data)
    if data.route == tei.TOKENIZE:
        return [len(text) for text in data.texts]
    return model.measure(data)


def predict_fn(data: Request, model: ServedTask) -> Any:
    """Return an answer for each text, or an iterator over pieces of a streamed generation."""
    tokens_fn(data, model)
    (prediction,) = predict_batch_fn([data], model)
    if callable(prediction):
        return prediction()
    if isinstance(prediction, Exception):
        raise prediction
    return prediction


def predict_batch_fn(inputs: Sequence[Request], model: ServedTask) -> list[Any]:
    """Compute all requests together, and return the result of `predict_fn` for each. For a
    prediction that takes many turns, return a function that returns it."""
    predicted = iter(model.predict([data for data in inputs if data.route != tei.TOKENIZE]))
    answered = []
    for request in inputs:
        if request.route == tei.TOKENIZE:
            tokenizer = description.tokenizer_of(model)
            answered.append(partial(tei.tokenized, request, tokenizer))
            continue
        prediction = next(predicted)
        is_later = callable(prediction)
        answered.append(
            partial(_later, prediction, request)
            if is_later
            else request_reader.in_form(prediction, request)
        )
    return answered


def _later(prediction: Callable[[], Any], request: Request) -> Any:
    answer = request_reader.in_form(prediction(), request)
    if isinstance(answer, Exception):
        raise answer
    return answer


def output_fn(prediction: Any, accept: str, context: Any = None) -> tuple[Any, str]:
    """Return the answer as JSON, JSON Lines, CSV or NPY, and its type.

    Raises:
        UnsupportedContentType: `accept` names another type.
    """
    for name in ("truncated", "failed", "unfinished"):
        if context is not None and (places := getattr(prediction, name, ())):
            header = f"X-Amphora-{name.capitalize()}"
            context.set_response_header(0, header, ",".join(map(str, places)))
    return answers.write_answer(prediction, accept)
