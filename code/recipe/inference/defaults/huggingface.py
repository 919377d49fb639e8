"""The functions of Hugging Face's image that a file may leave out.

`model_fn` makes a pipeline for the task of the model's head, or of HF_TASK; `input_fn` reads JSON
unchanged, CSV and images as a dict with "inputs", NPY as an array.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from recipe.backend.requests.payloads import (
    CSV,
    JSON,
    NPY,
    BadRequest,
    UnsupportedContentType,
    media_type,
)
from recipe.inference.defaults import serialization


class NoHeader(BadRequest):
    """The first line of a CSV names no column that is known."""


_NESTED = {"zero-shot-classification", "table-question-answering"}
_CSV_NAMES = ("question", "context", "inputs")


def decode(body: str | bytes, content_type: str, task: str = "") -> Any:
    """Return a request's data as Hugging Face's image passes it to `predict_fn`.

    Args:
        body: Text for JSON and CSV, bytes for other types.
        content_type: The request's.
        task: The pipeline's task, if it is known: two take no CSV.

    Returns:
        JSON unchanged; {"inputs": [...]} of CSV with a header; an array of NPY, which is read
        without pickle; {"inputs": image} of an image; {"inputs": bytes} of a sound.

    Raises:
        BadRequest: (400) The body is not of its type.
        UnsupportedContentType: (415) The type is another one.
    """
    kind = media_type(content_type)
    if kind == JSON:
        return read_json(body)
    if kind == CSV:
        if task in _NESTED:
            raise BadRequest(f"{task} takes no CSV, since its requests are nested: send JSON.")
        return read_table(text_of(body))
    if kind == NPY:
        return read_npy(bytes_of(body))
    if kind.startswith("image/"):
        from PIL import Image

        from recipe.backend import media

        data = bytes_of(body)
        media.Pixels().take(data)
        try:
            return {"inputs": Image.open(io.BytesIO(data)).convert("RGB")}
        except (OSError, ValueError) as error:
            raise BadRequest(f"The body is not an image that can be read: {error}.") from error
    if kind.startswith("audio/"):
        return {"inputs": bytes_of(body)}
    raise UnsupportedContentType(
        f"Content-Type {content_type!r} is not supported without your own input_fn."
        " Send application/json, text/csv, application/x-npy, image/* or audio/*."
    )


def text_of(body: str | bytes) -> str:
    """Return a body as text without a byte order mark. Raise BadRequest if it is not UTF-8."""
    try:
        text = body if isinstance(body, str) else body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error
    return text.removeprefix("\ufeff")


def bytes_of(body: str | bytes) -> bytes:
    """Return a body as bytes."""
    return body.encode() if isinstance(body, str) else body


def read_json(body: str | bytes) -> Any:
    """Return any JSON value. Raise BadRequest if the body is not JSON."""
    try:
        return json.loads(text_of(body))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from error


def read_npy(body: bytes) -> np.ndarray[Any, Any]:
    """Return an array. Raise BadRequest; objects, which would run code, are refused too."""
    try:
        array = np.load(io.BytesIO(body), allow_pickle=False)
    except Exception as error:
        # A header made up to harm raises MemoryError, TokenError, BadZipFile, and what not.
        raise BadRequest(f"The body is not an NPY array that may be read: {error}") from error
    if not isinstance(array, np.ndarray):
        raise BadRequest("The body is an NPZ archive, not an NPY array.")
    return array


def read_table(text: str) -> dict[str, Any]:
    """Return the rows of CSV as dicts, or the texts alone if a column is named inputs.

    Raises:
        NoHeader: The first line does not name the columns.
        BadRequest: A row has another number of fields than the first line.
    """
    header = next(iter(text.splitlines()), "")
    if not any(name in header.lower() for name in _CSV_NAMES):
        raise NoHeader(
            "The CSV's first line must name its columns: inputs, or question and context."
        )
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise BadRequest(f"The body is not valid CSV: {error}.") from error
    if not rows:
        raise BadRequest("The CSV has no row below its header.")
    for number, row in enumerate(rows, 2):
        # DictReader puts what is too much under None, and None if something is missing.
        if None in row or None in row.values():
            raise BadRequest(
                f"Line {number} of the CSV has another number of fields than its header."
            )
    if "inputs" in rows[0]:
        return {"inputs": [row["inputs"] for row in rows]}
    return {"inputs": rows}


def make_pipeline(model_dir: str, environ: Mapping[str, str]) -> Any:
    """Load transformers' pipeline for the model in `model_dir`, or of HF_MODEL_ID, on this device.

    It computes in float32, as in Hugging Face's image, unless AMPHORA_DTYPE names another
    precision: users' code calls `.numpy()`, which knows no bfloat16. For the tasks whose pipelines
    transformers 5 has dropped, which that image has, it is a `TaskPipeline`; for all, where the
    device compiles a program for each shape.

    Raises:
        ModelError: There is no model, or its files are damaged or lack weights.
        ValueError: HF_TASK names a task that nothing here knows.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    from recipe.backend import loading, pipelines, precision
    from recipe.backend.saved.origin import Origin
    from recipe.backend.static import programs as static
    from recipe.compat import quieten
    from recipe.inference import registry
    from recipe.storage import checksums
    from recipe.task_table import SERVED

    quieten(bars=False)
    origin = Origin.find(model_dir, environ)
    name = environ.get("HF_TASK") or registry.task_of(origin)
    try:
        task, targets, _ = PIPELINE_REGISTRY.check_task(name)
    except KeyError:
        return TaskPipeline(name, registry.load(model_dir, environ))
    kind, _, _ = precision.chosen(environ)
    if kind in static.DEVICES and task in SERVED:
        # transformers' pipelines have a shape for each text.
        return TaskPipeline(task, registry.load(model_dir, {**environ, "HF_TASK": task}))
    precise = {**environ, "AMPHORA_DTYPE": environ.get("AMPHORA_DTYPE") or "float32"}
    with checksums.verified(origin.place):
        if task not in SERVED:
            return pipelines.Foreign.load(origin, task, precise).pipeline
        return pipelines.around(task, loading.load(origin, targets["pt"][0], precise))


class TaskPipeline:
    """One of the image's own tasks, called as transformers' pipelines are called.

    Attributes:
        task: Its name.
        model: The model.
        tokenizer: Its tokenizer.
    """

    def __init__(self, name: str, answerer: Any) -> None:
        self.task = name
        self._answerer = answerer
        loaded = getattr(answerer, "loaded", None)
        self.model = getattr(loaded, "model", None)
        self.tokenizer = getattr(loaded, "tokenizer", None)

    def __call__(self, inputs: Any = None, **parameters: Any) -> Any:
        """Return the answer for `{"inputs": inputs, "parameters": parameters}`, as lists and dicts.

        `question` and `context` may be named instead of `inputs`. Raises BadRequest (400) if the
        inputs or a parameter are not the task's.
        """
        from recipe.backend.requests import bodies, payloads

        if inputs is None:
            names = ("question", "context")
            inputs = {name: parameters.pop(name) for name in names if name in parameters}
        document = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
        request = bodies.read_request(document, payloads.JSON)
        self._answerer.measure(request)
        (answer,) = self._answerer.predict([request])
        if isinstance(answer, Exception):
            raise answer
        return as_values(answer)


def as_values(answer: Any) -> Any:
    """Return an answer of the image's own tasks as lists and dicts; a stream of texts unchanged."""
    if isinstance(answer, Iterator):
        return answer
    entries = serialization.plain(answer)
    return entries[0] if getattr(answer, "single", False) else entries
