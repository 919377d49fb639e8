"""Bodies of Hugging Face's image: JSON, JSON Lines, CSV, plain text, images, audio and video.

A record of JSON Lines or CSV that cannot be read has an error as its answer, in its place.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amphora.serving.api import media, tgi
from amphora.serving.api.canonical import TEXT_KEY, ApiRequest, ModelTraits, is_conversation
from amphora.serving.api.tei import plain_documents
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault, bad_request

_PAIRS: Sequence[tuple[str, str]] = (("text", "text_pair"), ("question", "context"))
_RANKINGS = (frozenset({"source_sentence", "sentences"}), frozenset({"query", "texts"}))
"""Inputs that compare a text with others; each is a request of its own."""
_FORMS = (*map(frozenset, _PAIRS), *_RANKINGS)
"""Inputs of several parts, which may stand in a body without the name `inputs`."""
_OPTIONS = {"use_cache", "use_gpu", "wait_for_model"}
"""The `options` of Hugging Face's Inference API, which have no effect here."""
_OTHER_DELIMITERS = (";", "\t", "|")
_SURE_HEADERS = ("inputs", "text")
"""A CSV of one column has a header if its first row is one of these names."""
_MOST_SEARCHES = 100
"""How often a body may be searched for the ends of rows that are not CSV."""
_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as `surrogateescape` decodes them."""
_ESCAPED_HALF = re.compile(rb"\\u[dD]")


def text_of(body: str | bytes) -> str:
    """Return a body as text without a byte order mark. Raise Fault (400) if it is not UTF-8."""
    try:
        text = body if isinstance(body, str) else body.decode()
    except UnicodeDecodeError as error:
        message = f"The body is not UTF-8: {error.reason} at byte {error.start}."
        raise bad_request(message) from error
    return text.removeprefix("\ufeff")


def read_json(body: bytes, model: ModelTraits) -> Any:
    """Return the value of a JSON body. Raise Fault (400) if it is not JSON, a key stands twice with
    two values, or a text cannot be written as UTF-8."""

    def refuse_constant(name: str) -> None:
        raise bad_request(f"The body is not valid JSON: it contains {name}.")

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Of a key that stands twice, with two values, one would be ignored.
        document = dict(pairs)
        if len(document) < len(pairs):
            for name, value in pairs:
                if document[name] != value:
                    raise bad_request(f"{name!r} stands in the body twice, with two values.")
        return document

    try:
        document = json.loads(
            text_of(body), parse_constant=refuse_constant, object_pairs_hook=as_object
        )
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}. {model.example}") from error
    # In valid UTF-8 only JSON's escapes make half of a surrogate pair.
    if _ESCAPED_HALF.search(body):
        _check_encodable(document)
    return document


def _check_encodable(value: Any) -> None:
    """Raise Fault (400) if a text, at any depth, cannot be written as UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"A text holds half of a surrogate pair: {value[:60]!a}."
            raise bad_request(message) from error
    elif isinstance(value, (list, dict)):
        for entry in value.items() if isinstance(value, dict) else value:
            _check_encodable(list(entry) if isinstance(entry, tuple) else entry)


def read_document(route: str, document: object, model: ModelTraits) -> ApiRequest:
    """Return the request of a JSON document: an input, a list of inputs, or an object with the
    inputs and their parameters, which are in `parameters` or next to the inputs. Raise Fault (400)
    if it has no inputs, or parameters that contradict each other.
    """
    parameters: dict[str, Any] = {}
    inputs: Any = document
    if isinstance(document, dict):
        rest = dict(document)
        nested, options = rest.pop("parameters", None), rest.get("options")
        if isinstance(options, dict) and set(options) <= _OPTIONS:
            del rest["options"]
        key = next((key for key in model.texts if key in rest), None)
        names = set(rest)
        forms = () if key == TEXT_KEY else (*_FORMS, *model.pairs)
        if (form := next((form for form in forms if names.issuperset(form)), None)) is not None:
            inputs = {name: rest.pop(name) for name in list(rest) if name in form}
        elif key is not None:
            inputs = rest.pop(key)
        else:
            raise bad_request(
                f"The request has no 'inputs', but {', '.join(map(repr, document)) or 'nothing'}. "
                f"{model.example}",
                "inputs",
            )
        if nested is not None and not isinstance(nested, dict):
            remedy = 'give an object, as in {"inputs": ..., "parameters": {"top_k": 2}}.'
            raise bad_request(f"'parameters' is {json.dumps(nested)[:60]}: {remedy}", "parameters")
        for name in set(rest) & set(nested or {}):
            if rest[name] != (nested or {})[name]:
                raise bad_request(f"{name!r} stands in the request twice, with two values.")
        parameters = {**rest, **(nested or {})}
    is_list = isinstance(inputs, list) and not is_conversation(inputs)
    values = inputs if is_list else [inputs]
    if not values:
        raise model.no_inputs()
    if model.settings:
        prompts = []
        for value in values:
            if isinstance(value, dict) and len(value) == 1 and not {*value}.isdisjoint(model.texts):
                (value,) = value.values()  # the text of an object such as {"text": "a"}
            prompts.append(value)
        return tgi.read_generation(route, prompts, parameters, model, single=not is_list)
    if not is_list and isinstance(inputs, dict) and set(inputs) == {"query", "documents"}:
        values = [{"query": inputs["query"], "texts": plain_documents(inputs["documents"])}]
    compares = isinstance(inputs, dict) and any(form <= {*values[0]} for form in _RANKINGS)
    return ApiRequest(inputs=values, parameters=parameters, single=not is_list, compares=compares)


def read_text(body: bytes, model: ModelTraits) -> ApiRequest:
    """Return the request of a plain text in UTF-8."""
    text = text_of(body)
    if not text.strip():
        raise model.no_inputs()
    return read_document("", text, model)


def read_file(body: bytes) -> ApiRequest:
    """Return the request of the bytes of an image, of audio or of a video."""
    if not body:
        raise bad_request("The body is empty. Send the bytes of the file.")
    return ApiRequest(inputs=[body], single=True)


def read_csv(body: bytes, content_type: str, model: ModelTraits) -> list[Any | Fault]:
    """Return an input for each row of a CSV body, or what is wrong with it.

    Its header names the columns of the model's training data, or those that every model knows;
    otherwise each row is a text. `header=present` or `absent` of the content type decides whether
    the first row is one. Raise Fault: 400 for fields that other marks than commas separate, 415 for
    another value of `header`.
    """
    has_header = media_types.parameter(content_type, "header")
    if has_header not in ("", "present", "absent"):
        message = f"Content-Type is {content_type!r}: header is present, absent or left out."
        raise media.unsupported_type(message)
    rows = _csv_rows(body)
    first_row = [] if isinstance(rows[0], Fault) else rows[0]
    header = [_plain_name(cell) for cell in first_row]
    form = {} if has_header == "absent" else _columns_of(header, model)
    if has_header == "present" and not form:
        if isinstance(rows[0], Fault):
            raise rows[0]
        if len(header) != 1:
            raise bad_request(
                f"The header names {', '.join(first_row)[:60] or 'nothing'}, and none of its"
                " columns is one that the model reads: name one text."
            )
        form = {"text": header[0]}
    if form and len(header) == 1 and not has_header:
        if len(rows) == 1:
            form = {}  # It may be a text.
        elif first_row[0] not in (*_SURE_HEADERS, *model.columns.values()):
            raise bad_request(
                f"The first row is {first_row[0]!r}: a header or a text? Send the Content-Type"
                " text/csv; header=present or header=absent, or texts as JSON."
            )
    indices = {part: header.index(name) for part, name in form.items()}
    fields, first = (len(header), 1) if indices else (1, 0)
    inputs: list[Any | Fault] = []
    for number, row in enumerate(rows[first:], first + 1):
        if isinstance(row, Fault):
            inputs.append(row)
        elif not row:
            inputs.append(bad_request(f"CSV row {number} is blank."))
        elif len(row) != fields:
            message = (
                f"CSV row {number} has {len(row)} fields: {','.join(row)[:60]!r}. Send "
                "one text in each row, in double quotes if it holds a comma, or a header row that "
                "names the column text, or the columns that the model was trained on."
            )
            inputs.append(bad_request(message))
        elif len(indices) > 1:
            inputs.append({part: row[index] for part, index in indices.items()})
        else:
            inputs.append(row[indices.get("text", 0)])
    return inputs


def _csv_rows(body: bytes) -> list[list[str] | Fault]:
    """Return the rows of a CSV body, or what is wrong with a row. Raise Fault (400) if other marks
    than commas separate its fields."""
    text = body.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = list(io.StringIO(text or "\n", newline=""))
    rows = _rows_by(",", lines)
    is_one = bool(rows) and not isinstance(rows[0], Fault) and len(rows[0]) == 1
    for mark in _OTHER_DELIMITERS if len(rows) > 1 and is_one else ():
        others = _rows_by(mark, lines) if mark in text else []
        lengths = {0 if isinstance(row, Fault) else len(row) for row in others if row}
        if len(lengths) == 1 and not lengths & {0, 1}:
            raise bad_request(
                f"Each row has {lengths.pop()} fields between {mark!r}. Separate fields by "
                "commas; if each row is a text, put it in double quotes."
            )
    return rows


def _rows_by(mark: str, lines: Sequence[str]) -> list[list[str] | Fault]:
    """Return the fields of each row between marks. A row that is not CSV is the line on which it
    begins; the next line begins another row."""
    csv.field_size_limit(sys.maxsize)
    rows: list[list[str] | Fault] = []
    start = searched = 0
    is_utf8 = not any(map(_NO_UTF8.search, lines))
    while start < len(lines):
        rest = map(lines.__getitem__, range(start, len(lines)))
        reader = csv.reader(rest, delimiter=mark, strict=True)
        read = 0
        try:
            for row in reader:
                read = reader.line_num
                if not is_utf8 and any(map(_NO_UTF8.search, row)):
                    rows.append(bad_request(f"CSV row {len(rows) + 1} is not UTF-8."))
                else:
                    rows.append(row)
            break
        except csv.Error as error:
            searched += reader.line_num - read - 1
            if searched > _MOST_SEARCHES * len(lines):
                raise bad_request(f"The body is not valid CSV: {error}.") from error
            rows.append(bad_request(f"CSV row {len(rows) + 1} is not valid: {error}."))
            start += read + 1
    return rows


def _columns_of(header: Sequence[str], model: ModelTraits) -> Mapping[str, str]:
    """Return the columns of a header by the parts of an input; empty without a known column."""
    forms: list[Mapping[str, str]] = [{name: name for name in pair} for pair in _PAIRS]
    forms += [{"text": name} for name in model.texts if len(model.columns) < 2]
    forms += [{"text": first, "text_pair": second} for first, second in model.pairs]
    trained = {key: _plain_name(name) for key, name in model.columns.items()
               if isinstance(name, str)}  # fmt: skip
    if trained:
        forms.insert(0, trained if len(trained) > 1 else {"text": trained.popitem()[1]})
    return next((form for form in forms if set(form.values()) <= set(header)), {})


def _plain_name(name: str) -> str:
    """Return a column's name in the form of the known names."""
    return name.strip().lower().replace(" ", "_")


def read_lines(body: bytes, read: Callable[[bytes], ApiRequest]) -> list[ApiRequest | Fault]:
    """Return the request of each line of JSON Lines, or what is wrong with it."""
    requests: list[ApiRequest | Fault] = []
    for number, line in enumerate(body.splitlines() or [b""], 1):
        try:
            if not line.strip():
                raise bad_request("it is blank.")
            request = read(line)
            if request.streams:
                raise bad_request("A line of JSON Lines cannot be streamed.", "stream")
            requests.append(request)
        except Fault as fault:
            requests.append(Fault(fault.status, fault.code, f"Line {number}: {fault}", fault.param))
    return requests
