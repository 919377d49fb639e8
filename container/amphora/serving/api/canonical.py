"""The value that a request becomes, whatever its API: inputs to encode, or prompts to continue.

Generation has the keys of OpenAI's API, and vLLM's extensions of it, so that vLLM and the recipe's
own generation take the same settings. A prediction is a dict of plain values:

- `entries`, one for each input, an exception for an invalid one; `single`, if a list of one entry
  stands for it; positions of `truncated` inputs;
- the entry of a prompt is a list of texts, `{"text", "finish", "tokens"}`, where the tokens have
  `id`, `text`, `special` and `logprob`; a stream is an iterator over such a text, each time with
  its last token alone, what it `added`, and the numbers of `prompt_tokens` and `generated` ones;
- by OpenAI's `echo` and `logprobs`, a text has its prompt (`echoed`) and the `scores` of tokens,
  each with its `text`, `logprob`, and the `top` log-probabilities in its place by text;
- `tokens`, those of all inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from amphora.common.errors import did_you_mean
from amphora.serving.api.media import EVENTS
from amphora.serving.protocol.media_types import Fault, bad_request

LENGTH, END, STOPPED = "length", "eos_token", "stop_sequence"
"""How a text ends, in the words of TGI's API."""
TEXT_KEY = "inputs"


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What the API layer knows of a model."""

    name: str = "model"
    routes: Collection[str] = ()
    """The routes of clients' APIs that it answers."""
    texts: Sequence[str] = (TEXT_KEY,)
    """Keys and columns that hold a text."""
    pairs: Sequence[tuple[str, str]] = ()
    """Keys and columns that hold two texts together."""
    example: str = 'Send for example {"inputs": ["a text", "another"]}.'
    """What an error about a body without inputs proposes."""
    columns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """The columns of its training data by the keys of an input."""
    settings: Collection[str] = ()
    """The keys of OpenAI's API that it generates by; empty if it encodes."""
    passed: Mapping[str, str] = field(default_factory=dict)
    """Routes of OpenAI's API, by a key of their bodies, whose bodies and answers pass unchanged."""
    adapter: str = ""
    """The name of the adapter that it is; empty for a model."""
    adapters: dict[str, ModelTraits] | None = None
    """Its adapters by name; None if it takes none, so that it answers to any name."""

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> ModelTraits:
        """Return what a handler's `describe_fn` says of its model's `bodies`."""
        shared = ("routes", "columns")
        known = {name: description[name] for name in shared if name in description}
        name = description.get("model", "model")
        return cls(name=name, **known, **description.get("bodies", {}))

    def no_inputs(self) -> Fault:
        """Return the error for a body without an input."""
        return bad_request(f"The request holds no inputs. {self.example}")

    def addressed(self, name: str) -> ModelTraits:
        """Return the model, or the adapter that a request names. Raise Fault (404) if there is
        none."""
        if self.adapters is None or name in ("", self.name):
            return self
        if name not in self.adapters:
            raise unknown_model(name, [self.name, *sorted(self.adapters)])
        return self.adapters[name]


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A request of any API to a model, and the form of its answer: inputs to encode, or in its
    subclasses prompts to continue."""

    inputs: Sequence[Any]
    """Values of JSON, or the bytes of a file; prompts are texts, lists of token ids, or
    conversations."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """By Hugging Face's names; those of prompts, and of a `route`, by the keys of OpenAI's API."""
    single: bool = False
    """Whether the body has one input that is not in a list."""
    usual_tokens: int = 64
    """New tokens, if the parameters have no number and the model has so many positions left."""
    continues: bool = False
    """Whether a conversation's final message of the assistant is continued."""
    streams: bool = False
    """Whether the answer is a stream."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names that the client has given to parameters, by their names here."""
    adapter: str = ""
    """The name of the adapter that the body names; empty for the model."""
    route: str = ""
    """The route of a body of OpenAI's API, `parameters`, for an engine that answers it itself."""
    form: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the API's document of a prediction; None: the answer is a list of entries, in any type
    that the client accepts."""
    compares: bool = False
    """Whether its input compares a text with others, so that it shares no batch."""
    records: Sequence[int] = ()
    """The line of JSON Lines or row of CSV of each input, or of all if it is not `mergeable`."""
    kinds: Sequence[str] = (EVENTS,)
    """The types of a stream, the usual one first."""
    generates: ClassVar[bool] = False
    """Whether the inputs are prompts."""

    @property
    def values(self) -> dict[str, Any]:
        """Return the request as plain values, for a handler."""
        names = ("inputs", "parameters", "single", "usual_tokens", "continues")
        return {name: getattr(self, name) for name in names}

    @property
    def mergeable(self) -> bool:
        """Return whether inputs of other records may join its own."""
        return not (self.generates or self.is_document or self.compares)

    @property
    def is_document(self) -> bool:
        """Return whether the answer is JSON, whatever types the client accepts."""
        return self.form is not None

    def answer(self, prediction: Mapping[str, Any]) -> Any:
        """Return the API's document of a prediction, or a list of entries."""
        return prediction["entries"] if self.form is None else self.form(prediction)

    def events(self, texts: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        """Return the events of a stream of the only text."""
        raise NotImplementedError

    def renamed(self, message: str) -> str:
        """Return an error's message with the names that the client has given."""
        for key, name in self.names.items():
            message = re.sub(rf"\b{key}\b", name, message)
        return message


def is_conversation(value: Any) -> bool:
    """Return whether a JSON value is a list of messages, which is one input."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and {"role", "content"} <= set(message) for message in value
        )
    )


def check_flags(values: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise Fault (400) for a value that is neither true nor false."""
    for name in names:
        if name in values and not isinstance(values[name], bool):
            raise bad_request(f"{name} is {values[name]!r}: give true or false.", name)


def check_keys(route: str, body: Any, needed: Collection[str], others: Collection[str]) -> Any:
    """Return the keys of a route's body that are not null. Raise Fault (400) with the first invalid
    key, for keys that are missing or unknown; the message names all."""
    if not isinstance(body, dict):
        raise bad_request(f"The body is not an object with {', '.join(sorted(needed))}.")
    body = {name: value for name, value in body.items() if value is not None}
    known = {*needed, *others}
    unknown = [name for name in body if name not in known]
    missing = [name for name in sorted(needed) if name not in body]
    wrong = [f"{name} is missing" for name in missing]
    if unknown:
        verb = "is" if len(unknown) == 1 else "are"
        takes = f"{route} takes {', '.join(sorted(known))}"
        wrong.insert(0, f"{', '.join(map(repr, unknown))} {verb} not supported; {takes}")
    if wrong:
        raise bad_request(". ".join(wrong) + ".", [*unknown, *missing][0])
    return body


def unknown_model(name: str, known: Sequence[str]) -> Fault:
    """Return the error for a model that is not one of the `known` ones."""
    listed = f"{', '.join(known[:20])}{' ...' if len(known) > 20 else '.'}"
    message = f"There is no model {name[:200]!r}. Loaded: {listed}{did_you_mean(name, known)}"
    return Fault(404, "model_not_found", message, "model")


def wrong_value(key: str, value: Any, remedy: str) -> Fault:
    """Return the error for the value of a key."""
    return bad_request(f"{key} is {json.dumps(value)[:60]}: {remedy}", key)
