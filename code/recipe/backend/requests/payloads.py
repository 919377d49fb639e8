"""Requests and answers as values, independent of models and of bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from recipe.backend.requests.parameters import RULES, Rule, are_ids

JSON, JSON_LINES, CSV = "application/json", "application/jsonlines", "text/csv"
NPY, TEXT, EVENTS = "application/x-npy", "text/plain", "text/event-stream"
SPELLINGS = {
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
}
EXAMPLE = 'Send for example {"inputs": ["a text", "another"]}.'

Label = dict[str, Any]
"""{"label": name, "score": float}"""
Text = str | tuple[str, str]
"""What a model reads at once: a text, or a text and its pair."""


class UnsupportedContentType(TypeError):
    """The request's Content-Type, or every type in its Accept, is not supported."""


class BadRequest(ValueError):
    """The request's body cannot be read; the message says what would be right."""

    status_code = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The key that is wrong, as OpenAI's errors name it."""


class TokenIds(tuple[int, ...]):
    """An input that came as tokens of the model's own vocabulary."""


def refuse(wrong: Sequence[str], body: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise BadRequest with all that is `wrong` with a body, and the first key that is wrong."""
    if wrong:
        keys = [name for name in body if name not in rules or not rules[name].is_right(body[name])]
        missing = re.match(r"(\w+) is not there", wrong[-1])
        raise BadRequest(". ".join(wrong) + ".", keys[0] if keys else missing and missing[1])


def texts_or_ids(value: Any) -> list[Any]:
    """Return the inputs of a body whose value is one of `TEXTS_OR_IDS`."""
    parts = value if isinstance(value, list) and not are_ids(value) else [value]
    return [TokenIds(part) if isinstance(part, list) else part for part in parts]


def check_ids(ids: TokenIds, size: int) -> TokenIds:
    """Return `ids`. Raise BadRequest if one exceeds the vocabulary's size."""
    if unknown := [number for number in ids if number >= size]:
        raise BadRequest(f"Token id {unknown[0]} is not one of the model's {size} tokens.")
    return ids


class NotTakenHere(BadRequest):
    """The body is one that another task reads, such as an image."""

    status_code = 415


class UnknownModel(BadRequest):
    """The request names a model or an adapter that is not served."""

    status_code = 404
    code = "model_not_found"


@dataclass(kw_only=True)
class Request:
    """What a request asks."""

    texts: Sequence[Any]
    """The inputs, one by one: as they came, until a task has `read` them; then each is a `Text`, or
    what else the task makes of it."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    """Whether the body held one input that is not in a list."""
    records: bool = False
    """Whether each input is a record, whose fault is its own: a line of JSON Lines, a CSV row."""
    raw: Any = None
    """The inputs as they stood in a JSON body, or the bytes of an image or a sound."""
    content_type: str = ""
    token_ids: list[list[int]] | None = None
    """The texts' token ids, once they are known."""
    type_ids: list[list[int] | None] | None = None
    """Which part of a pair each token is of; None if the model does not ask for it."""
    truncated: Sequence[int] = ()
    """Places of the texts that were longer than the model can read, and were cut."""
    faults: dict[int, str] = field(default_factory=dict)
    """Records that hold no input: their places in the answer, and why."""
    by_columns: Callable[[Sequence[str]], Request | None] | None = None
    """Reads a CSV body again, by columns of these names; None if its header lacks one of them."""
    is_read: bool = False
    route: str = ""
    """The route of a client's API whose body this is; empty for a body of our own."""
    settings: Any = None
    """Settings of generation, if an API other than pipelines' has read them."""
    form: Callable[[Any, Request], Any] | None = None
    """What makes another API's answer of the task's; None: the task's own is the answer."""
    prepared: Any = None
    """What a task has made of the inputs for its model."""

    @property
    def streams(self) -> bool:
        """Return whether the answer is a stream."""
        return bool(self.parameters.get("stream"))

    def rename_parameters(self, names: Mapping[str, str]) -> None:
        """Let the parameters that another server calls otherwise have our names.

        Raises:
            BadRequest: One is there by both names.
        """
        if both := [old for old, new in names.items() if {old, new} <= set(self.parameters)]:
            raise BadRequest(f"{both[0]} and {names[both[0]]} mean the same: give one of them.")
        if not names.keys().isdisjoint(self.parameters):
            self.parameters = {names.get(k, k): value for k, value in self.parameters.items()}

    def check_parameters(
        self, known: Set[str], task: str, nullable: Set[str] = frozenset()
    ) -> None:
        """Check the parameters; those that are null, except the `nullable`, are left out.

        Raises:
            BadRequest: A parameter is not one of the task's `known`, or has a value that it may not
                have.
        """
        for name, value in self.parameters.items():
            if name not in known:
                takes = f"takes {', '.join(sorted(known))}" if known else "takes none"
                raise BadRequest(f"The parameter {name!r} is not one of {task}, which {takes}.")
            if value is not None and not RULES[name].is_right(value):
                shown = json.dumps(value)[:60]
                raise BadRequest(f"{name} is {shown}. Give {RULES[name].words}, or leave it out.")
        if None in self.parameters.values():
            self.parameters = {
                name: value
                for name, value in self.parameters.items()
                if value is not None or name in nullable
            }

    def read(self, reader: Callable[[Any], Any], columns: Sequence[str] = ()) -> None:
        """Make of each input, once, what `reader` makes of it.

        Args:
            reader: Raises BadRequest for what it cannot read.
            columns: The text columns that the model was trained on, if they are known. A CSV body
                whose header has them is read by them, and not by the names that are usual.

        Raises:
            BadRequest: `reader` has, for all records or for an input that is not a record.
        """
        if self.is_read:
            return
        self.is_read = True
        if columns and self.by_columns is not None:
            table = self.by_columns(columns)
            if table is not None:
                self.texts, self.faults = table.texts, table.faults
        count = len(self.texts) + len(self.faults)
        places = [place for place in range(count) if place not in self.faults]
        faults, inputs = dict(self.faults), []
        for place, value in zip(places, self.texts, strict=True):
            try:
                inputs.append(reader(value))
            except BadRequest as error:
                if not self.records:
                    raise
                faults[place] = str(error)
        if not inputs:
            raise BadRequest(faults[min(faults)] if faults else f"There is no text. {EXAMPLE}")
        self.texts, self.faults = inputs, faults

    def keep_those_with_tokens(self, *made: list[Any]) -> None:
        """Leave out the inputs of which the tokenizer has made no token, as of "" those do that add
        none of their own: a model would compute them of nothing, or of what stands beside them.

        Args:
            made: What was made of each input, the first its tokens; those of others are removed.

        Raises:
            BadRequest: There is such an input, and it is not one of several records.
        """
        empty = {place for place, tokens in enumerate(made[0]) if not tokens}
        if not empty:
            return
        count = len(self.texts) + len(self.faults)
        places = [place for place in range(count) if place not in self.faults]
        message = "has no token: it is empty, or holds nothing that the model's tokenizer knows"
        if not self.records or len(empty) == len(self.texts):
            raise BadRequest(f"Input {places[min(empty)] + 1} {message}.")
        self.faults |= {places[place]: f"The input {message}." for place in empty}
        self.texts = [text for place, text in enumerate(self.texts) if place not in empty]
        for values in made:
            values[:] = [value for place, value in enumerate(values) if place not in empty]


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
        raise NotTakenHere(f"The model reads texts, not an image or a sound. {EXAMPLE}")
    raise BadRequest(f"An input is {json.dumps(value)[:60]}, not a text. {EXAMPLE}")


def a_text_or_pair(value: Any) -> Text:
    """Return a text; or a pair from `{"text", "text_pair"}` or a list of two texts.

    Raises:
        BadRequest: It is neither.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and set(value) <= {"text", "text_pair"} and "text" in value:
        first, second = value["text"], value.get("text_pair")
        return a_text(first) if second is None else (a_text(first), a_text(second))
    pair = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(pair, (list, tuple)) and len(pair) == 2:
        return a_text(pair[0]), a_text(pair[1])
    if isinstance(value, bytes):
        return a_text(value)
    raise BadRequest(
        f"An input is {json.dumps(value)[:60]}, not a text or a pair of texts. {EXAMPLE[:-1]}"
        ', or {"inputs": [{"text": "a text", "text_pair": "another"}]}.'
    )


@dataclass(frozen=True)
class Document:
    """An answer that is one value of JSON, whatever types the request accepts."""

    value: Any
    truncated: Sequence[int] = ()
    failed: Sequence[int] = ()


@dataclass(frozen=True)
class EventStream:
    """An answer of server-sent events, whatever types the request accepts."""

    events: Iterator[Any]
    """Values of JSON, and texts that stand as they are."""


class Answers(list[Any]):
    """An answer for each input of a request."""

    def __init__(
        self, answers: Sequence[Any], truncated: Sequence[int] = (), single: bool = False
    ) -> None:
        super().__init__(answers)
        self.single = single
        """Whether the JSON answer is the single entry, not a list of it, as in pipelines."""
        self.truncated = truncated
        """Places of the texts that were cut."""
        self.failed: Sequence[int] = ()
        """Places of the records that could not be read."""
        self.unfinished: Sequence[int] = ()
        """Places of the prompts whose texts end at the most tokens, and not by themselves."""

    @property
    def document(self) -> Any:
        """Return the JSON value: the entries, or the only one."""
        return self[0] if self.single else list(self)


def with_faults(prediction: Any, request: Request) -> Any:
    """Return `prediction` with an error instead of each record that could not be read."""
    if not request.faults or isinstance(prediction, Exception):
        return prediction
    count = len(prediction) + len(request.faults)
    places = [place for place in range(count) if place not in request.faults]
    entries = {
        place: {"error": {"code": "bad_request", "message": message}}
        for place, message in request.faults.items()
    } | dict(zip(places, prediction, strict=True))
    woven = Answers(
        [entries[place] for place in range(count)],
        [places[place] for place in prediction.truncated],
    )
    woven.failed = sorted(request.faults)
    return woven


def media_type(header: str) -> str:
    """Return the media type of a header, such as `text/csv` of `Text/CSV; charset=utf-8`."""
    plain_type = header.partition(";")[0].strip().lower()
    return SPELLINGS.get(plain_type, plain_type)
