"""Requests and answers as values, independent of models and of bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from recipe.backend.requests.parameters import RULES, Rule, are_texts, faults
from recipe.spec import TEXT_NAMES, Form, Kind, normalized

JSON, JSON_LINES, CSV = "application/json", "application/jsonlines", "text/csv"
NPY, TEXT, EVENTS = "application/x-npy", "text/plain", "text/event-stream"
SPELLINGS = {
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
    # Clients of AWS's own image classifier send it.
    "application/x-image": "image/x-image",
}
TEXT_KEYS = ("inputs", *TEXT_NAMES)
"""Keys and columns that hold a text."""
EXAMPLE = 'Send for example {"inputs": ["a text", "another"]}.'
ANY_EXAMPLE = (
    'Send for example {"inputs": ["a text", "another"]}, or {"inputs": "the image in base64"} for '
    "a model of images."
)
"""For bodies that are invalid for every task."""

Label = dict[str, Any]
"""{"label": name, "score": float}"""
Text = str | tuple[str, str]
"""One input of a model: a text, or a pair of texts."""


class UnsupportedContentType(TypeError):
    """The request's Content-Type, or every type in its Accept, is not supported."""


class BadRequest(ValueError):
    """The request's body is invalid. The message says how to correct it."""

    status_code = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The invalid key, as in OpenAI's errors."""


class TokenIds(tuple[int, ...]):
    """An input that was sent as token ids."""


def checked_body(
    path: str, document: Any, rules: Mapping[str, Rule], needed: Set[str]
) -> dict[str, Any]:
    """Return the keys of a body of the route `path` that are not null. Raise BadRequest, with the
    first invalid key, for those that are missing, unknown or invalid; the message names all."""
    if not isinstance(document, dict):
        raise BadRequest(f"The body is not an object with {', '.join(sorted(needed))}.")
    body = {name: value for name, value in document.items() if value is not None}
    wrong = faults(body, rules)
    if unknown := [repr(name) for name in body if name not in rules]:
        wrong.append(
            f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not supported;"
            f" {path} takes {', '.join(sorted(rules))}"
        )
    missing = sorted(needed - set(body))
    wrong += [f"{name} is not there" for name in missing]
    if wrong:
        keys = [name for name in body if name not in rules or not rules[name].is_right(body[name])]
        raise BadRequest(". ".join(wrong) + ".", next(iter([*keys, *missing[-1:]])))
    return body


class NotTakenHere(BadRequest):
    """The body is for another task, such as an image for a model of texts."""

    status_code = 415


class UnknownModel(BadRequest):
    """The request names a model or an adapter that is not served."""

    status_code = 404
    code = "model_not_found"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request as read from its body. The task that answers it reads `Inputs`, and makes
    `Prepared` of these."""

    inputs: Sequence[Any]
    """Values of JSON, texts, or the bytes of a file."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    """Whether the body has one input that is not in a list."""
    records: bool = False
    """Whether each input is a line of JSON Lines or a CSV row, which may be invalid alone."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Error messages of invalid records, by their positions in the answer."""
    groups: Sequence[int | None] = ()
    """The number of inputs in each line's list, None for a line that is not a list, as SageMaker
    Clarify sends them. Empty if no line is one."""
    read_columns: Callable[[Sequence[str]], Request] | None = None
    """Reads a CSV body again, by columns of these names if its header has them."""
    route: str = ""
    """The route of the API (OpenAI, TEI, TGI) to which the body belongs; empty for other bodies."""
    settings: Any = None
    """Settings of generation, if the body is one of OpenAI's API."""
    form: Callable[[Any, Prepared], Any] | None = None
    """Converts the task's answer to that of the API; None leaves it unchanged."""

    @property
    def streams(self) -> bool:
        """Return whether the answer is a stream."""
        return bool(self.parameters.get("stream"))

    def renamed(self, names: Mapping[str, str]) -> Request:
        """Return the request with parameters renamed by `names`, {other server's: this server's}.
        Raise BadRequest if a parameter is given by both names."""
        if both := [old for old, new in names.items() if {old, new} <= set(self.parameters)]:
            raise BadRequest(f"{both[0]} and {names[both[0]]} mean the same: give one of them.")
        if names.keys().isdisjoint(self.parameters):
            return self
        parameters = {names.get(k, k): value for k, value in self.parameters.items()}
        return replace(self, parameters=parameters)

    def checked(self, known: Set[str], task: str, nullable: Set[str] = frozenset()) -> Request:
        """Return the request with valid parameters, without those that are null unless they are
        `nullable`. Raise BadRequest if one is not `known` to the task, or has an invalid value."""
        for name, value in self.parameters.items():
            if name not in known:
                takes = f"takes {', '.join(sorted(known))}" if known else "takes none"
                raise BadRequest(f"The parameter {name!r} is not one of {task}, which {takes}.")
            if value is not None and not RULES[name].is_right(value):
                shown = json.dumps(value)[:60]
                raise BadRequest(f"{name} is {shown}. Give {RULES[name].words}, or leave it out.")
        parameters = self.parameters.items()
        kept = {k: value for k, value in parameters if value is not None or k in nullable}
        return self if len(kept) == len(parameters) else replace(self, parameters=kept)

    def read(self, reader: Callable[[Any], Any], columns: Sequence[str] = ()) -> Inputs:
        """Return what `reader` makes of each input, or of the text of an object such as
        `{"text": "a"}`. It raises BadRequest for an invalid one, as this does if all records are
        invalid, or an input that is not a record.

        A CSV body whose header has the text `columns` that the model was trained on is read by them
        instead of the usual names.
        """
        source = self.read_columns(columns) if columns and self.read_columns is not None else self
        faults, values = dict(source.faults), []
        for index, value in zip(_valid(source.inputs, source.faults), source.inputs, strict=True):
            if isinstance(value, dict) and len(value) == 1:
                # A list stays in its object: it may be a pair.
                ((name, inner),) = value.items()
                value = inner if name in TEXT_KEYS and isinstance(inner, str) else value
            try:
                values.append(reader(value))
            except BadRequest as error:
                if not self.records:
                    raise
                faults[index] = str(error)
        if not values:
            raise BadRequest(faults[min(faults)] if faults else f"There is no text. {EXAMPLE}")
        return Inputs(values, faults)


def _valid(values: Sequence[Any], faults: Mapping[int, str]) -> list[int]:
    """Return the positions of valid inputs in the answer."""
    return [index for index in range(len(values) + len(faults)) if index not in faults]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a request as its task reads them, without invalid records."""

    values: Sequence[Any]
    """What the task makes of each input, such as a `Text`."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Error messages of invalid records, by their positions in the answer."""

    def without(self, request: Request, invalid: Mapping[int, str]) -> Inputs:
        """Return the inputs except those at the positions `invalid`, with what is wrong with each.
        Raise BadRequest for the first of them unless they are some of several records."""
        if not invalid:
            return self
        indices = _valid(self.values, self.faults)
        if not request.records or len(invalid) == len(self.values):
            raise BadRequest(f"Input {indices[min(invalid)] + 1} {invalid[min(invalid)]}")
        faults = {indices[index]: f"The input {message}" for index, message in invalid.items()}
        kept = [text for index, text in enumerate(self.values) if index not in invalid]
        return replace(self, values=kept, faults={**self.faults, **faults})


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request whose inputs its task has prepared for the model."""

    request: Request
    """With checked parameters."""
    inputs: Inputs
    sizes: Sequence[int]
    """The number of tokens of each row of the model, including those that may be generated."""
    tokens: int = 0
    """The tokens of all inputs, which answers of some APIs name."""
    truncated: Sequence[int] = ()
    """Positions of the inputs that were truncated."""
    work: Any = None
    """What the task's model computes, such as rows of tokens."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Return the request's parameters."""
        return self.request.parameters


def is_conversation(value: Any) -> bool:
    """Return whether a JSON value is a list of messages, which is one input."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and {"role", "content"} <= set(message) for message in value
        )
    )


def a_text(value: Any) -> str:
    """Return a text. Raise BadRequest if the value is not one."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        raise NotTakenHere(f"The model reads texts, not images. {EXAMPLE}")
    raise BadRequest(f"An input is {json.dumps(value)[:60]}, not a text. {EXAMPLE}")


def read_record(value: Any, forms: Sequence[Form]) -> dict[str, Any]:
    """Return the cells of an object by the roles of their columns.

    Args:
        value: An object by names of columns.
        forms: What the object may hold, the usual form first.

    Raises:
        BadRequest: The value is not an object of one of the forms.
    """
    if isinstance(value, bytes):
        a_text(value)
    record = value if isinstance(value, dict) else {}
    given = [(normalized(name), cell) for name, cell in record.items() if cell is not None]
    for form in forms:
        cells = {
            column.role: cell
            for column in form.columns
            for name, cell in given
            if name in map(normalized, column.names)
            and (are_texts(cell) if column.kind is Kind.TEXTS else isinstance(cell, str))
        }
        if len(cells) == len(form.columns) == len(given):
            return cells
    texts = [
        {c.names[0]: ["a", "b"] if c.kind is Kind.TEXTS else "a text" for c in form.columns}
        for form in forms[:2]
    ]
    raise BadRequest(
        f"An input is {json.dumps(value)[:60]}, not an object of "
        f"{' or '.join(' and '.join(keys) for keys in texts)}. Send for example "
        f"{json.dumps({'inputs': texts[0]})}."
    )


@dataclass(frozen=True)
class Document:
    """An answer that is sent as one JSON value, whatever types the request accepts."""

    value: Any
    truncated: Sequence[int] = ()


@dataclass(frozen=True)
class EventStream:
    """An answer that is sent as server-sent events, whatever types the request accepts."""

    events: Iterator[Any]
    """JSON values, and strings that are sent unchanged."""


class Answers(list[Any]):
    """An answer for each input of a request."""

    def __init__(
        self, answers: Sequence[Any], truncated: Sequence[int] = (), single: bool = False
    ) -> None:
        super().__init__(answers)
        self.single = single
        """Whether JSON has the only entry without a list, as pipelines answer a single input."""
        self.truncated = truncated
        """Positions of the texts that were truncated."""
        self.failed: Sequence[int] = ()
        """Positions of the invalid records."""
        self.unfinished: Sequence[int] = ()
        """Positions of the prompts whose generation ended at the token limit."""


def restore_records(prediction: Any, prepared: Prepared) -> Any:
    """Return one entry per record: the prediction, an error if the record is invalid, or a list if
    its inputs are a list."""
    faults, groups = prepared.inputs.faults, prepared.request.groups
    if not isinstance(prediction, Answers) or not (faults or groups):
        return prediction
    indices = _valid(prediction, faults)
    entries: dict[int, Any] = dict(zip(indices, prediction, strict=True))
    for index, message in faults.items():
        entries[index] = {"error": {"code": "bad_request", "message": message}}
    groups = groups or [None] * len(entries)
    records = [record for record, size in enumerate(groups) for _ in range(size or 1)]
    rest = iter(range(len(entries)))
    restored = Answers(
        [
            entries[next(rest)] if size is None else [entries[next(rest)] for _ in range(size)]
            for size in groups
        ],
        sorted({records[indices[index]] for index in prediction.truncated}),
    )
    restored.unfinished = sorted({records[indices[index]] for index in prediction.unfinished})
    restored.failed = sorted({records[index] for index in faults})
    return restored


def media_type(header: str) -> str:
    """Return the media type of a header, such as `text/csv` of `Text/CSV; charset=utf-8`."""
    plain_type = header.partition(";")[0].strip().lower()
    return SPELLINGS.get(plain_type, plain_type)
