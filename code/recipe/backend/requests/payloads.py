"""Requests and answers as values, independent of models and of bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from recipe.backend.requests.parameters import REQUIRED, RULES, are_texts
from recipe.spec import TEXT_NAMES, CellKind, Form, normalize_name

TEXT_KEYS = ("inputs", *TEXT_NAMES)
"""Keys and columns that hold a text."""
EXAMPLE = 'Send for example {"inputs": ["a text", "another"]}.'
Label = dict[str, Any]
"""{"label": name, "score": float}"""
Text = str | tuple[str, str]
"""One input of a model: a text, or a pair of texts."""


class BadRequest(ValueError):
    """The request's body is invalid. The message says how to correct it."""

    status_code = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The invalid key, as in OpenAI's errors."""


class NotTakenHere(BadRequest):
    """The body is for another task, such as an image for a model of texts."""

    status_code = 415


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that the server has read from a body; and what its task prepares for the model."""

    inputs: Sequence[Any]
    """Values of JSON, texts, or the bytes of a file."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    """Whether the body has one input that is not in a list."""
    usual_tokens: int = 64
    """New tokens of a text, if the parameters have no number."""
    continues: bool = True
    """Whether a conversation's final message of the assistant is continued."""
    spent: dict[Any, int] = field(default_factory=dict)
    """What the requests before it in the same body cost (`bounds.shared`)."""
    adapter: str = ""
    """The name of the adapter that answers; empty for the model itself."""
    values: Sequence[Any] = ()
    """What the task reads of each input, such as a `Text`."""
    sizes: Sequence[int] = ()
    """The number of tokens of each row of the model, including those that may be generated."""
    tokens: int = 0
    """The tokens of all inputs, which answers of some APIs name."""
    truncated: Sequence[int] = ()
    """Positions of the inputs that were truncated."""
    work: Any = None
    """What the task's model computes, such as rows of tokens."""
    task: Any = None
    """The task of the adapter that answers; None for the model itself."""

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
                raise BadRequest(
                    f"The parameter {name!r} is not one of {task}, which {takes}.", name
                )
            if value is not None and not RULES[name].is_right(value):
                shown = json.dumps(value)[:60]
                way_out = "" if name in REQUIRED else ", or leave it out"
                raise BadRequest(f"{name} is {shown}. Give {RULES[name].words}{way_out}.", name)
        parameters = self.parameters.items()
        kept = {k: value for k, value in parameters if value is not None or k in nullable}
        return self if len(kept) == len(parameters) else replace(self, parameters=kept)

    def read(self, reader: Callable[[Any], Any]) -> list[Any]:
        """Return what `reader` makes of each input, or of the text of an object such as
        `{"text": "a"}`. It raises BadRequest for an invalid one."""
        values = []
        for value in self.inputs:
            if isinstance(value, dict) and len(value) == 1:
                # A list stays in its object: it may be a pair.
                ((name, inner),) = value.items()
                value = inner if name in TEXT_KEYS and isinstance(inner, str) else value
            values.append(reader(value))
        if not values:
            raise BadRequest(f"There is no text. {EXAMPLE}")
        return values

    def answer(self, entries: Sequence[Any], *, single: bool = False) -> dict[str, Any]:
        """Return the request's prediction, as `amphora.serving.api.canonical` describes it: for
        each input its entry, or what is wrong with it. If it is `single`, JSON has the only entry
        without a list, as pipelines answer a single input."""
        return {
            "entries": list(entries), "single": single, "truncated": self.truncated,
            "tokens": self.tokens,
        }  # fmt: skip


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
        raise NotTakenHere(f"The model reads texts, not files. {EXAMPLE}")
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
    given = [(normalize_name(name), cell) for name, cell in record.items() if cell is not None]
    for form in forms:
        cells = {
            column.role: cell
            for column in form.columns
            for name, cell in given
            if name in map(normalize_name, column.names)
            and (are_texts(cell) if column.kind is CellKind.TEXTS else isinstance(cell, str))
        }
        if len(cells) == len(form.columns) == len(given):
            return cells
    texts = [
        {c.names[0]: ["a", "b"] if c.kind is CellKind.TEXTS else "a text" for c in form.columns}
        for form in forms[:2]
    ]
    raise BadRequest(
        f"An input is {json.dumps(value)[:60]}, not an object of "
        f"{' or '.join(' and '.join(keys) for keys in texts)}. Send for example "
        f"{json.dumps({'inputs': texts[0]})}."
    )
