"""OpenAI's API: bodies of chat completions, completions and embeddings, as requests of ours.

A body becomes a `Request` whose `form` makes the API's answer of the task's prediction, so that it
is batched and streamed as any other. What the API has and these models have not is refused by name:
an answer that ignored it would look like one that honoured it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipe.inference.apis.openai_forms import (
    ChatChoices,
    CompletionChoices,
    EmbeddingsForm,
    TextsForm,
)
from recipe.inference.generation import options
from recipe.inference.generation.options import REFUSE, Settings
from recipe.inference.payloads import BadRequest, Request

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_CHAT_TOKENS, _COMPLETION_TOKENS = 1024, 16
"""New tokens where a request does not say, at most; the second as the API documents it."""

Check = tuple[Callable[[Any], bool], str]
_ANY: Check = (lambda value: True, "")
_FLAG: Check = (lambda value: type(value) is bool, "true or false")
_TEXT: Check = (lambda value: isinstance(value, str), "a text")
_OFF: Check = (lambda value: value is False or value in ([], {}), "nothing: it is not supported")


def _whole(least: int, most: int = 1 << 31) -> Check:
    said = f"a whole number from {least}" + (f" to {most}" if most < 1 << 31 else "")
    return (lambda value: type(value) is int and least <= value <= most), said


def _number(least: float, most: float) -> Check:
    said = f"a number from {least:g} to {most:g}"
    return (lambda value: type(value) in (int, float) and least <= value <= most), said


def _one_of(*values: Any) -> Check:
    return (lambda value: value in values), f"{' or '.join(map(json.dumps, values))}"


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        str(name).isdecimal() and type(each) in (int, float) and -100 <= each <= 100
        for name, each in value.items()
    )


# What says who asks, or how the service should keep or bill it; nothing about the answer.
_REMARKS = {
    "model": _TEXT, "user": _TEXT, "safety_identifier": _TEXT, "prompt_cache_key": _TEXT,
    "metadata": _ANY, "service_tier": _ANY, "prompt_cache_retention": _ANY,
}  # fmt: skip
_GENERATION = {
    "stream": _FLAG,
    "stream_options": (
        lambda value: (
            isinstance(value, dict)
            and set(value) <= {"include_usage", "include_obfuscation"}
            and all(type(each) is bool for each in value.values())
        ),
        'an object with "include_usage"',
    ),
    "max_tokens": _whole(1),
    "min_tokens": _whole(0),
    "temperature": _number(0, 2),
    "top_p": (lambda value: type(value) in (int, float) and 0 < value <= 1, "0 to 1, and not 0"),
    "top_k": _whole(-1),
    "n": _whole(1, options.MOST_SEQUENCES),
    "stop": options.PARAMETERS["stop"],
    "seed": options.PARAMETERS["seed"],
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": options.PARAMETERS["repetition_penalty"],
    "logit_bias": (_is_bias, "an object of token ids to numbers from -100 to 100"),
}
_CHAT_CHECKS: Mapping[str, Check] = {
    **_REMARKS,
    **_GENERATION,
    "messages": (lambda value: isinstance(value, list) and bool(value), "a list of messages"),
    "max_completion_tokens": _whole(1),
    "logprobs": _FLAG,
    "top_logprobs": _whole(0, 20),
    "response_format": (
        lambda value: isinstance(value, dict) and value.get("type") == "text",
        '{"type": "text"}: other formats are not supported',
    ),
    "modalities": _one_of(["text"]),
    "store": _OFF,
    "tools": _OFF,
    "functions": _OFF,
    "tool_choice": _one_of("none", "auto"),
    "parallel_tool_calls": _FLAG,
}
_COMPLETION_CHECKS: Mapping[str, Check] = {
    **_REMARKS,
    **_GENERATION,
    "prompt": (
        lambda value: (
            isinstance(value, str)
            or (isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value))
        ),
        "a text or a list of texts: token ids are not taken",
    ),
    "logprobs": _whole(0, 5),
    "echo": _FLAG,
    "best_of": _whole(1),
}
_EMBEDDING_CHECKS: Mapping[str, Check] = {
    **_REMARKS,
    "input": (
        lambda value: (
            isinstance(value, str)
            or (isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value))
        ),
        "a text or a list of texts: token ids of another model's tokenizer mean nothing here",
    ),
    "encoding_format": _one_of("float", "base64"),
    "dimensions": _whole(1),
}
_ROLES = ("system", "developer", "user", "assistant")


def read(path: str, document: Any) -> Request:
    """The request that a body of one of the API's routes makes.

    Raises:
        BadRequest: a key is unknown or unsupported, or a value is none; all that is wrong is said.
    """
    checks = {CHAT: _CHAT_CHECKS, COMPLETIONS: _COMPLETION_CHECKS, EMBEDDINGS: _EMBEDDING_CHECKS}
    needed = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}[path]
    if not isinstance(document, dict):
        raise BadRequest(f'The body is no object. Send {{"model": "...", "{needed}": ...}}.')
    asked = {name: value for name, value in document.items() if value is not None}
    known = checks[path]
    wrong = options.faults(asked, known)
    unknown = [name for name in asked if name not in known]
    if unknown:
        wrong.append(
            f"{', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not supported;"
            f" {path} takes {', '.join(sorted(known))}"
        )
    if needed not in asked:
        wrong.append(f"there is no {needed!r}")
    if wrong:
        raise BadRequest(". ".join(wrong) + ".")
    if path == EMBEDDINGS:
        return _embeddings(asked)
    return _chat(asked) if path == CHAT else _completion(asked)


def _settings(asked: Mapping[str, Any], *, default: int, logprobs: int | None) -> Settings:
    temperature = asked.get("temperature")
    samples = temperature != 0
    chosen: dict[str, Any] = {"top_k": max(0, asked.get("top_k", 0))}
    chosen |= {name: asked[name] for name in ("top_p", "repetition_penalty") if name in asked}
    if temperature:
        chosen["temperature"] = float(temperature)
    if asked.get("min_tokens"):
        chosen["min_new_tokens"] = asked["min_tokens"]
    stop = asked.get("stop", [])
    settings = Settings(
        max_new_tokens=asked.get("max_completion_tokens", asked.get("max_tokens")),
        default_new_tokens=default,
        do_sample=samples,
        chosen=tuple(chosen.items()),
        frequency_penalty=asked.get("frequency_penalty", 0.0),
        presence_penalty=asked.get("presence_penalty", 0.0),
        logit_bias=tuple((int(k), float(v)) for k, v in asked.get("logit_bias", {}).items()),
        # Without sampling all choices are the same one.
        sequences=asked.get("n", 1) if samples else 1,
        seed=asked.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
        long_prompts=REFUSE,
    )
    options.check(settings)
    return settings


def _chat(asked: Mapping[str, Any]) -> Request:
    if asked.get("top_logprobs") and not asked.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true.")
    if {"max_tokens", "max_completion_tokens"} <= set(asked):
        raise BadRequest("max_tokens and max_completion_tokens mean the same: give one of them.")
    logprobs = asked.get("top_logprobs", 0) if asked.get("logprobs") else None
    settings = _settings(asked, default=_CHAT_TOKENS, logprobs=logprobs)
    messages = [_message(number, each) for number, each in enumerate(asked["messages"])]
    form = TextsForm(asked=asked, settings=settings, writer=ChatChoices())
    return _request([messages], asked, settings, form)


def _message(number: int, message: Any) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise BadRequest(
            f"{where} is {json.dumps(message)[:60]}: give"
            f' {{"role": "user", "content": "a text"}}; roles are {", ".join(_ROLES)}.'
        )
    message = {name: value for name, value in message.items() if value not in (None, [])}
    if extra := sorted(set(message) - {"role", "content", "name", "refusal", "annotations"}):
        raise BadRequest(f"{where} has {', '.join(extra)}, which is not supported.")
    if "content" not in message:
        raise BadRequest(f"{where} has no content.")
    # OpenAI's name for what the templates of all other models call the system.
    role = "system" if message["role"] == "developer" else message["role"]
    names = ("content", "name")
    return {"role": role, **{name: message[name] for name in names if name in message}}


def _completion(asked: Mapping[str, Any]) -> Request:
    if asked.get("best_of", 1) not in (1, asked.get("n", 1)):
        raise BadRequest("best_of is supported only where it is n.")
    if asked.get("echo") and "logprobs" in asked:
        raise BadRequest("echo and logprobs together are not supported: prompts are not scored.")
    prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
    settings = _settings(asked, default=_COMPLETION_TOKENS, logprobs=asked.get("logprobs"))
    echoed = prompts if asked.get("echo") else None
    form = TextsForm(asked=asked, settings=settings, writer=CompletionChoices(echoed))
    return _request(prompts, asked, settings, form)


def _request(
    texts: Sequence[Any], asked: Mapping[str, Any], settings: Settings, form: Any
) -> Request:
    streams = {"stream": True} if asked.get("stream") else {}
    return Request(texts=texts, parameters=streams, settings=settings, form=form)


def _embeddings(asked: Mapping[str, Any]) -> Request:
    texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
    if not all(texts):
        raise BadRequest("A text of the input is empty.")
    parameters = {"normalize": True}
    return Request(texts=texts, parameters=parameters, form=EmbeddingsForm(asked))
