"""OpenAI's API: bodies and answers of chat completions, completions and embeddings.

A body becomes a `Request` whose `form` converts the task's prediction to the API's answer, so it is
batched and streamed like any other request. Unsupported keys are refused by name, since an answer
that ignored them would look correct.
"""

from __future__ import annotations

import base64
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipe.backend.generation import options
from recipe.backend.generation.decoding import LENGTH, Completion
from recipe.backend.generation.options import GenerationSettings
from recipe.backend.requests.parameters import (
    FLAG,
    TEXT,
    TEXT_OR_TEXTS,
    TEXTS_OR_IDS,
    Rule,
    are_ids,
    number,
    one_of,
    whole,
)
from recipe.backend.requests.payloads import (
    Answers,
    BadRequest,
    Document,
    EventStream,
    Prepared,
    Request,
    TokenIds,
    checked_body,
)
from recipe.backend.requests.routes import CHAT, COMPLETIONS, EMBEDDINGS

_REASONS = {LENGTH: "length"}
_CHAT_TOKENS, _COMPLETION_TOKENS = 1024, 16
"""Default numbers of new tokens; the second is the API's default."""

_ANY = Rule(lambda value: True, "")
_OFF = Rule(lambda value: value is False or value in ([], {}), "nothing: it is not supported")

# Keys about the client, storage or billing, which do not change the answer.
_REMARKS = {
    "model": TEXT, "user": TEXT, "safety_identifier": TEXT, "prompt_cache_key": TEXT,
    "metadata": _ANY, "service_tier": _ANY, "prompt_cache_retention": _ANY,
}  # fmt: skip
_GENERATION: Mapping[str, Rule] = {
    "stream": FLAG,
    "stream_options": Rule(
        lambda value: (
            isinstance(value, dict)
            and set(value) <= {"include_usage", "include_obfuscation"}
            and all(type(flag) is bool for flag in value.values())
            and not value.get("include_obfuscation")
        ),
        'an object with "include_usage": obfuscation is not supported',
    ),
    "max_tokens": whole(1),
    "min_tokens": whole(0),
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": whole(-1),
    "n": whole(1, options.MOST_SEQUENCES),
    "stop": options.PARAMETERS["stop"],
    "seed": options.PARAMETERS["seed"],
    "repetition_penalty": options.PARAMETERS["repetition_penalty"],
}
_ZERO = Rule(lambda value: value == 0, "0: only vLLM supports it")
_ONE = Rule(lambda value: value == 1, "1: it is not supported")
# Keys that are not supported, with the values that change nothing.
_IDLE: Mapping[str, Rule] = {
    "best_of": _ONE, "modalities": one_of(["text"]), "use_beam_search": _OFF, "ignore_eos": _OFF,
    "skip_special_tokens": one_of(True), "echo": _OFF, "store": _OFF, "suffix": one_of(""),
    "min_p": _ZERO, "presence_penalty": _ZERO, "frequency_penalty": _ZERO, "logit_bias": _OFF,
    "logprobs": _OFF, "top_logprobs": _ZERO, "length_penalty": _ONE,
}  # fmt: skip
_CHAT_RULES: Mapping[str, Rule] = {
    **_REMARKS,
    **_IDLE,
    **_GENERATION,
    "messages": Rule(lambda value: isinstance(value, list) and bool(value), "a list of messages"),
    "max_completion_tokens": whole(1),
    "response_format": Rule(
        lambda value: isinstance(value, dict) and value.get("type") == "text",
        '{"type": "text"}: other formats are not supported',
    ),
    "tools": Rule(lambda value: isinstance(value, list), "a list"),
    "functions": _OFF,
    "tool_choice": one_of("none", "auto"),
    "parallel_tool_calls": FLAG,
}
_COMPLETION_RULES: Mapping[str, Rule] = {
    **_REMARKS,
    **_IDLE,
    **_GENERATION,
    "prompt": TEXTS_OR_IDS,
}
_EMBEDDING_RULES: Mapping[str, Rule] = {
    **_REMARKS,
    "input": Rule(
        TEXT_OR_TEXTS.is_right,
        "a text or a list of texts, not token ids (LangChain: check_embedding_ctx_length=False)",
    ),
    "encoding_format": one_of("float", "base64"),
    "dimensions": whole(1),
}
_ROLES = ("system", "developer", "user", "assistant")


def read(path: str, document: Any) -> Request:
    """Read a body of one of the API's routes. Raise BadRequest with all keys that are unknown or
    unsupported, or have wrong values."""
    rules, needed, make = ROUTES[path]
    return make(checked_body(path, document, rules, {needed}))


def _texts(body: Mapping[str, Any], prompts: list[Any], default: int, *, is_chat: bool) -> Request:
    """Return the request to continue prompts by `default` new tokens, if the body has no number."""
    if "stream_options" in body and not body.get("stream"):
        raise BadRequest("stream_options needs stream: true.", "stream_options")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    if most is not None and (least := body.get("min_tokens", 0)) > most:
        raise BadRequest(
            f"min_tokens is {least}, but at most {most} tokens are generated. Give a smaller "
            "min_tokens, or a larger max_tokens."
        )
    temperature = body.get("temperature", 1)
    samples = temperature >= options.GREEDY_BELOW
    # The API's defaults replace those of the model's generation_config.json.
    chosen: dict[str, Any] = {"top_k": max(0, body.get("top_k", 0)), "top_p": body.get("top_p", 1)}
    if "repetition_penalty" in body:
        chosen["repetition_penalty"] = body["repetition_penalty"]
    if samples:
        chosen["temperature"] = float(temperature)
    if body.get("min_tokens"):
        chosen["min_new_tokens"] = body["min_tokens"]
    stop = body.get("stop", [])
    settings = GenerationSettings(
        max_new_tokens=most,
        default_new_tokens=default,
        do_sample=samples,
        chosen=tuple(chosen.items()),
        sequences=body.get("n", 1),
        seed=body.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
    options.refuse_contradictions(settings)
    form = TextsForm(body=body, stops=settings.stop, is_chat=is_chat)
    streams = {"stream": body.get("stream", False)}
    return Request(inputs=prompts, parameters=streams, settings=settings, form=form)


def _chat(body: Mapping[str, Any]) -> Request:
    if body.get("tools") and body.get("tool_choice") != "none":
        raise BadRequest(
            'tools are not supported: leave them out, or give tool_choice "none".', "tools"
        )
    if {"max_tokens", "max_completion_tokens"} <= set(body):
        raise BadRequest("max_tokens and max_completion_tokens mean the same: give one of them.")
    messages = []
    for index, message in enumerate(body["messages"]):
        key = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRequest(
                f"{key} is {json.dumps(message)[:60]}: give"
                f' {{"role": "user", "content": "a text"}}; roles are {", ".join(_ROLES)}.',
                key,
            )
        given = {name: value for name, value in message.items() if value not in (None, [])}
        if extra := sorted(set(given) - {"role", "content", "name", "refusal", "annotations"}):
            raise BadRequest(f"{key} has {', '.join(extra)}, which is not supported.", key)
        if "content" not in given:
            raise BadRequest(f"{key} has no content.", key)
        # Chat templates know OpenAI's role "developer" as "system".
        role = "system" if given["role"] == "developer" else given["role"]
        names = ("content", "name")
        messages.append({"role": role, **{name: given[name] for name in names if name in given}})
    return _texts(body, [messages], _CHAT_TOKENS, is_chat=True)


def _completion(body: Mapping[str, Any]) -> Request:
    value = body["prompt"]
    parts = value if isinstance(value, list) and not are_ids(value) else [value]
    prompts = [TokenIds(part) if isinstance(part, list) else part for part in parts]
    return _texts(body, prompts, _COMPLETION_TOKENS, is_chat=False)


def _embeddings(body: Mapping[str, Any]) -> Request:
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    if not all(texts):
        raise BadRequest("A text of the input is empty.", "input")
    parameters: dict[str, Any] = {"normalize": True}
    if "dimensions" in body:
        parameters["dimensions"] = body["dimensions"]

    def form(prediction: Answers, prepared: Prepared) -> Document:
        vectors: list[Any] = [*prediction]
        if body.get("encoding_format") == "base64":  # of little-endian float32
            arrays = [np.asarray(vector, dtype="<f4") for vector in prediction]
            vectors = [base64.b64encode(array.tobytes()).decode() for array in arrays]
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": prepared.tokens, "total_tokens": prepared.tokens}
        answer = {"object": "list", "data": data, "model": served_name(), "usage": usage}
        return Document(answer, prediction.truncated)

    return Request(inputs=texts, parameters=parameters, form=form)


def served_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the model's name: AMPHORA_MODEL_NAME, else HF_MODEL_ID, else `model`."""
    return environ.get("AMPHORA_MODEL_NAME") or environ.get("HF_MODEL_ID") or "model"


@dataclass
class ShownText:
    """Holds back the end of a stream while it may be the beginning of a stop text."""

    stops: Sequence[str]
    held: str = ""

    def show(self, piece: str, *, is_last: bool) -> str:
        """Add a generated piece, and return the text that can be shown now."""
        self.held += piece
        safe = _first_stop(self.held, self.stops)
        if safe == len(self.held) and not is_last:
            for stop in self.stops:
                for size in range(1, min(len(stop), len(self.held) + 1)):
                    if self.held.endswith(stop[:size]):
                        safe = min(safe, len(self.held) - size)
        shown, self.held = self.held[:safe], self.held[safe:]
        return shown


def _first_stop(text: str, stops: Sequence[str]) -> int:
    """Return the position of the first stop text, or the length of the text without one."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return min(positions, default=len(text))


@dataclass(frozen=True, kw_only=True)
class TextsForm:
    """Converts generated texts to the API's answer: a document, or a stream of events."""

    body: Mapping[str, Any]
    stops: Sequence[str]
    is_chat: bool
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self, prediction: Any, prepared: Prepared) -> Any:
        """Return the API's answer: of `Answers` a document, of an iterator over tokens a stream."""
        if isinstance(prediction, Iterator):
            return EventStream(self._chunks(prediction, prepared))
        choices: list[dict[str, Any]] = []
        generated = 0
        for text in (text for texts in prediction for text in texts):
            shown = text.text[: _first_stop(text.text, self.stops)]
            message = {"role": "assistant", "content": shown, "refusal": None}
            choice = {"message": message} if self.is_chat else {"text": shown}
            choices.append(_entry(len(choices), choice, _REASONS.get(text.finish, "stop")))
            generated += len(text.tokens)
        body = self._head("chat.completion")
        return Document({**body, "choices": choices, "usage": _usage(prepared, generated)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.id,
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": served_name(),
            "system_fingerprint": None,
        }

    def _chunks(self, texts: Iterator[Completion], prepared: Prepared) -> Iterator[Any]:
        usage = (self.body.get("stream_options") or {}).get("include_usage", False)
        head = self._head("chat.completion.chunk")
        state = ShownText(self.stops)
        generated = 0

        def chunk(delta: Mapping[str, Any], reason: str | None = None) -> Any:
            choice = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
            entry = _entry(0, choice, reason)
            return {**head, "choices": [entry], **({"usage": None} if usage else {})}

        for written in texts:
            # The first token comes first, since an error after the first chunk breaks the stream.
            if self.is_chat and not generated:
                yield chunk({"role": "assistant", "content": "", "refusal": None})
            generated += 1
            if text := state.show(written.tokens[-1].text, is_last=bool(written.finish)):
                yield chunk({"content": text})
            if written.finish:
                yield chunk({}, _REASONS.get(written.finish, "stop"))
        if usage:
            yield {**head, "choices": [], "usage": _usage(prepared, generated)}
        yield "[DONE]"


def _entry(index: int, choice: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **choice, "logprobs": None, "finish_reason": reason}


def _usage(prepared: Prepared, generated: int) -> dict[str, int]:
    read = prepared.tokens
    total = read + generated
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": total}


ROUTES: Mapping[str, tuple[Mapping[str, Rule], str, Callable[[Mapping[str, Any]], Request]]] = {
    CHAT: (_CHAT_RULES, "messages", _chat),
    COMPLETIONS: (_COMPLETION_RULES, "prompt", _completion),
    EMBEDDINGS: (_EMBEDDING_RULES, "input", _embeddings),
}
"""For each route: the rules of its keys, the required key, and the function that reads it."""
