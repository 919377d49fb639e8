"""The handlers of Hugging Face's image, for files that do not define them.

`model_fn` makes a pipeline for HF_TASK, or else for the task of the model's head. `input_fn`
returns JSON unchanged, CSV and images as a dict with the key "inputs", and NPY as an array.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from recipe.backend.requests import serialization
from recipe.backend.requests.bodies import text_of
from recipe.backend.requests.payloads import (
    CSV,
    JSON,
    NPY,
    BadRequest,
    UnsupportedContentType,
    media_type,
)

_NESTED = {"zero-shot-classification", "table-question-answering"}
_CSV_NAMES = ("question", "context", "inputs")


def decode(body: str | bytes, content_type: str, task: str = "") -> Any:
    """Return a request's data as Hugging Face's image passes it to `predict_fn`.

    That is for JSON its value, for CSV {"inputs": [...]}, which two tasks do not accept, for NPY an
    array, for an image {"inputs": image}, and for audio {"inputs": bytes}. Raise BadRequest (400)
    if the body is not of its type, and UnsupportedContentType (415) for other types.
    """
    kind = media_type(content_type)
    if kind == JSON:
        return read_json(body)
    if kind == CSV:
        if task in _NESTED:
            raise BadRequest(f"{task} has nested requests, which CSV cannot hold: send JSON.")
        return read_table(text_of(body))
    if kind == NPY:
        return array_of(bytes_of(body))
    if kind.startswith("image/"):
        from PIL import Image

        from recipe.backend import images

        data = bytes_of(body)
        images.Pixels().take(data)
        try:
            return {"inputs": Image.open(io.BytesIO(data)).convert("RGB")}
        except (OSError, ValueError) as error:
            raise BadRequest(f"The body is not a readable image: {error}.") from error
    if kind.startswith("audio/"):
        return {"inputs": bytes_of(body)}
    raise UnsupportedContentType(
        f"Content-Type {content_type!r} is not supported. Send application/json, text/csv,"
        " application/x-npy, image/* or audio/*, or define input_fn."
    )


def bytes_of(body: str | bytes) -> bytes:
    """Return a body as bytes."""
    return body.encode() if isinstance(body, str) else bytes(body)


def array_of(body: bytes) -> np.ndarray[Any, Any]:
    """Return the array of an NPY body. Raise BadRequest if it has none, or one of objects, since
    pickle would run code."""
    try:
        array = np.load(io.BytesIO(body), allow_pickle=False)
    except Exception as error:
        # A malicious header raises MemoryError, TokenError, BadZipFile and others.
        raise BadRequest(f"The body is not a valid NPY array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise BadRequest("The body is an NPZ archive, not an NPY array.")
    return array


def read_json(body: str | bytes) -> Any:
    """Return a JSON value, in which NaN is allowed. Raise BadRequest if the body is not JSON."""
    text = text_of(body)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from error


def read_table(text: str) -> dict[str, Any]:
    """Return CSV rows as dicts, or only the texts if a column is named inputs. Raise
    BadRequest if the first line does not name the columns, or a row has more or fewer fields."""
    header = next(iter(text.splitlines()), "")
    if not any(name in header.lower() for name in _CSV_NAMES):
        raise BadRequest(
            "The CSV's first line must name its columns: inputs, or question and context. "
            "AMPHORA_HANDLER_DEFAULTS=pytorch reads a CSV of numbers."
        )
    # The toolkit would take the whole line for the name of one column.
    marks = (mark for mark in ",;\t|" if set(header.lower().split(mark)) & set(_CSV_NAMES))
    delimiter = next(marks, ",")
    csv.field_size_limit(sys.maxsize)
    try:
        stream = io.StringIO(text, newline="")
        rows = list(csv.DictReader(stream, delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise BadRequest(f"The body is not valid CSV: {error}.") from error
    if not rows:
        raise BadRequest("The CSV has no row below its header.")
    for number, row in enumerate(rows, 2):
        # DictReader stores surplus fields under the key None, and None for missing fields.
        if None in row or None in row.values():
            raise BadRequest(
                f"Line {number} of the CSV has another number of fields than its header."
            )
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in rows[0] else rows}


def make_pipeline(model_dir: str, environ: Mapping[str, str]) -> Any:
    """Load transformers' pipeline for the model in `model_dir`, or of HF_MODEL_ID, on this device.

    It computes in float32, as in Hugging Face's image, unless AMPHORA_DTYPE names another
    precision: user code calls `.numpy()`, which does not support bfloat16. It is a `TaskPipeline`
    for tasks whose pipelines transformers 5 dropped, and on devices that compile a program for each
    shape.

    Raise ModelError if there is no model, or its files are damaged or incomplete, and ValueError if
    HF_TASK is not a known task.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    from recipe.backend import loading, pipelines, precision, programs
    from recipe.compat import quieten
    from recipe.inference import registry
    from recipe.models.sources.origin import Origin
    from recipe.storage import checksums
    from recipe.task_table import SERVED

    quieten()
    origin = Origin.find(model_dir, environ)
    name = environ.get("HF_TASK") or registry.task_of(origin)
    try:
        task, targets, _ = PIPELINE_REGISTRY.check_task(name)
    except KeyError:
        return TaskPipeline(name, registry.load(model_dir, environ))
    if environ.get("HF_TASK"):
        registry.check_head(origin, task)
    kind, _, _ = precision.chosen(environ)
    if kind in programs.DEVICES and task in SERVED:
        # transformers' pipelines would compile a program for the length of each text.
        return TaskPipeline(task, registry.load(model_dir, {**environ, "HF_TASK": task}))
    precise = {**environ, "AMPHORA_DTYPE": environ.get("AMPHORA_DTYPE") or "float32"}
    with checksums.verified(origin.location):
        if task not in SERVED:
            return pipelines.load_pipeline(origin, task, precise)
        return pipelines.wrap_pipeline(task, loading.load(origin, targets["pt"][0], precise))


class TaskPipeline:
    """A task of these handlers behind the interface of transformers' pipelines: it is called, and
    has the attributes `task` (its name), `model` and `tokenizer`."""

    def __init__(self, name: str, answerer: Any) -> None:
        self.task = name
        self._answerer = answerer
        loaded = getattr(answerer, "loaded", None)
        self.model = getattr(loaded, "model", None)
        self.tokenizer = getattr(loaded, "tokenizer", None)

    def __call__(self, inputs: Any = None, **parameters: Any) -> Any:
        """Return the answer for `{"inputs": inputs, "parameters": parameters}`, as lists and dicts.

        `question` and `context` may be given instead of `inputs`. Raises BadRequest (400) for
        inputs or parameters that the task does not accept.
        """
        from recipe.backend.requests import bodies

        if inputs is None:
            names = ("question", "context")
            inputs = {name: parameters.pop(name) for name in names if name in parameters}
        document = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
        request = bodies.read_request(document, JSON)
        (answer,) = self._answerer.predict([self._answerer.prepare(request)])
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Iterator):
            return answer
        entries = serialization.plain(answer)
        return entries[0] if getattr(answer, "single", False) else entries
