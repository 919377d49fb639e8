"""OpenAI's API for models that the recipe computes: chats, completions and embeddings.

Unsupported keys are refused by name, since an answer that ignored them would look correct. vLLM
takes these bodies unchanged.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amphora.serving.api.canonical import (
    LENGTH,
    ApiRequest,
    ModelTraits,
    check_flags,
    check_keys,
    wrong_value,
)
from amphora.serving.api.tei import NAMES
from amphora.serving.protocol.media_types import bad_request
from amphora.serving.protocol.routes import CHAT, EMBEDDINGS

_CHAT_TOKENS, _COMPLETION_TOKENS = 1024, 16
"""Default numbers of new tokens; the second is the API's default."""
REMARKS = {
    "model", "user", "safety_identifier", "prompt_cache_key", "metadata", "service_tier",
    "prompt_cache_retention",
}  # fmt: skip
"""Keys about the client, storage or billing, which do not change the answer."""
_IDLE: Mapping[str, Sequence[Any]] = {
    "best_of": [1], "modalities": [["text"]], "use_beam_search": [False], "ignore_eos": [False],
    "skip_special_tokens": [True], "echo": [False], "store": [False], "suffix": [""],
    "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}], "logprobs": [False],
    "top_logprobs": [0], "length_penalty": [1],
}  # fmt: skip
"""Keys that are not supported, with the values that change nothing."""
_OTHERS = {"best_of", "modalities", "store", "suffix", "functions"}
"""Those of them that vLLM does not support, either."""
_SETTINGS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop",
             "seed", "repetition_penalty")  # fmt: skip
_SCORES = ("echo", "logprobs")
"""Settings of completions of models that can score tokens."""
_STREAMS = ("stream", "stream_options")
_CHAT_KEYS = ("max_completion_tokens", "response_format", "tools", "functions", "tool_choice",
              "parallel_tool_calls", "reasoning_effort")  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant")


def read(route: str, document: Any, model: ModelTraits) -> ApiRequest:
    """Return the request of a body of one of the API's routes. Raise Fault (400) for keys that are
    unknown or unsupported, or have wrong values."""
    if route == EMBEDDINGS:
        return _read_embeddings(document, model)
    is_chat = route == CHAT
    needed = "messages" if is_chat else "prompt"
    others = {*REMARKS, *_IDLE, *_SETTINGS, *_STREAMS, *(_CHAT_KEYS if is_chat else ())}
    body = check_keys(route, document, {needed}, others)
    check_flags(body, ("stream", "parallel_tool_calls"))
    scores = () if is_chat else [name for name in _SCORES if name in model.settings]
    _refuse_unsupported(body, scores)
    if {"max_tokens", "max_completion_tokens"} <= set(body):
        raise bad_request("max_tokens and max_completion_tokens mean the same: give one of them.")
    prompts = [_messages(body["messages"])] if is_chat else _prompts(body["prompt"])
    settings = {name: body[name] for name in (*_SETTINGS, *scores) if name in body}
    if settings.get("logprobs") is False:
        del settings["logprobs"]
    if "max_completion_tokens" in body:
        settings["max_tokens"] = body["max_completion_tokens"]
    temperature = settings.get("temperature", 1)
    if type(temperature) not in (int, float) or not 0 <= temperature <= 2:
        raise wrong_value("temperature", temperature, "give a number from 0 to 2.")
    # The API's defaults replace those of the model's generation_config.json.
    settings = {"temperature": 1.0, "top_p": 1, "top_k": 0, **settings}
    if settings["top_k"] == -1:
        settings["top_k"] = 0
    options = body.get("stream_options", {})
    has_usage = options.get("include_usage", False) if isinstance(options, dict) else None
    flags = {"include_usage": has_usage, "include_obfuscation": False}
    if type(has_usage) is not bool or {**flags, **options} != flags:
        remedy = 'give an object with "include_usage": obfuscation is not supported.'
        raise wrong_value("stream_options", options, remedy)
    if "stream_options" in body and not body.get("stream"):
        raise bad_request("stream_options needs stream: true.", "stream_options")
    if streams := body.get("stream", False):
        settings["stream"] = True
    stop = settings.get("stop", [])
    return OpenAiRequest(
        inputs=prompts, parameters=settings, streams=streams, model=model.name, is_chat=is_chat,
        usual_tokens=_CHAT_TOKENS if is_chat else _COMPLETION_TOKENS, has_usage=has_usage,
        stops=[stop] if isinstance(stop, str) else stop,
    )  # fmt: skip


def _refuse_unsupported(body: Mapping[str, Any], scores: Collection[str]) -> None:
    """Raise Fault (400) for the first key that only vLLM, or no engine, supports. `scores` are keys
    that the model supports without a stream."""
    idle = {**_IDLE, "functions": [[]], "response_format": [{"type": "text"}],
            "tool_choice": ["none", "auto"]}  # fmt: skip
    for name in (name for name in idle if name in body):
        given = body[name]
        if any(given == v and isinstance(given, bool) == isinstance(v, bool) for v in idle[name]):
            continue
        if name not in scores:
            engine = "" if name in _OTHERS else ", which only vLLM supports"
            raise bad_request(f"{name} is {json.dumps(given)[:60]}{engine}: leave it out.", name)
        if body.get("stream"):
            raise wrong_value(name, given, "only vLLM streams with it.")
    if body.get("tools") and body.get("tool_choice") != "none":
        message = 'Only vLLM supports tools: leave them out, or give tool_choice "none".'
        raise bad_request(message, "tools")


def replace_do_sample(document: Any) -> Any:
    """Return a body with a temperature of 0 for `do_sample: false`, which huggingface.js sends."""
    if not isinstance(document, dict) or not isinstance(document.get("do_sample"), bool):
        return document
    rest = {name: value for name, value in document.items() if name != "do_sample"}
    return rest if document["do_sample"] else {**rest, "temperature": 0}


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise wrong_value("messages", value, "give a list of messages.")
    messages = []
    for index, message in enumerate(value):
        key = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            usual = '{"role": "user", "content": "a text"}'
            raise wrong_value(key, message, f"give {usual}; roles are {', '.join(_ROLES)}.")
        given = {name: value for name, value in message.items() if value not in (None, [])}
        if extra := sorted(set(given) - {"role", "content", "name", "refusal", "annotations"}):
            raise bad_request(f"{key} has {', '.join(extra)}, which is not supported.", key)
        if "content" not in given:
            raise bad_request(f"{key} has no content.", key)
        # Chat templates know OpenAI's role "developer" as "system".
        role = "system" if given["role"] == "developer" else given["role"]
        names = ("content", "name")
        messages.append({"role": role, **{name: given[name] for name in names if name in given}})
    return messages


def _are_ids(value: Any) -> bool:
    """Return whether a JSON value is a list of token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(number) is int and 0 <= number < 1 << 31 for number in value)
    )


def _prompts(value: Any) -> list[Any]:
    prompts = value if isinstance(value, list) and not _are_ids(value) else [value]
    if not prompts or not all(isinstance(part, str) or _are_ids(part) for part in prompts):
        remedy = "give a text, a list of token ids, or a list of these."
        raise wrong_value("prompt", value, remedy)
    return prompts


def _read_embeddings(document: Any, model: ModelTraits) -> ApiRequest:
    body = check_keys(EMBEDDINGS, document, {"input"}, {*REMARKS, "encoding_format", "dimensions"})
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise wrong_value(
            "input",
            body["input"],
            "give a text or a list of texts, not token ids (LangChain:"
            " check_embedding_ctx_length=False).",
        )
    if not all(texts):
        raise bad_request("A text of the input is empty.", "input")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise bad_request(
            f"encoding_format is {encoding!r}: give float or base64.", "encoding_format"
        )
    parameters: dict[str, Any] = {"normalize": True}
    if "dimensions" in body:
        parameters["dimensions"] = body["dimensions"]

    def form(prediction: Mapping[str, Any]) -> dict[str, Any]:
        vectors = prediction["entries"]
        if encoding == "base64":  # of little-endian float32
            packed = [struct.pack(f"<{len(vector)}f", *vector) for vector in vectors]
            vectors = [base64.b64encode(data).decode() for data in packed]
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        tokens = prediction["tokens"]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    return ApiRequest(inputs=texts, parameters=parameters, form=form, names=NAMES)


def _first_stop(text: str, stops: Sequence[str]) -> int:
    """Return the position of the first stop text, or the length of the text without one."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return min(positions, default=len(text))


@dataclass(frozen=True, kw_only=True)
class OpenAiRequest(ApiRequest):
    """A chat, or prompts to complete."""

    model: str
    """The model's name."""
    is_chat: bool
    stops: Sequence[str]
    has_usage: bool
    """Whether a stream ends with its usage."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_document = True
    generates = True

    def answer(self, prediction: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document of all texts."""
        choices: list[dict[str, Any]] = []
        generated = 0
        for text in (text for texts in prediction["entries"] for text in texts):
            shown = text["text"][: _first_stop(text["text"], self.stops)]
            shown = text.get("echoed", "") + shown
            message = {"role": "assistant", "content": shown, "refusal": None}
            choice = {"message": message} if self.is_chat else {"text": shown}
            choices.append(_entry(len(choices), choice, text["finish"], text.get("scores")))
            generated += len(text["tokens"])
        usage = _usage(prediction["tokens"], generated)
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def events(self, texts: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        """Yield the chunks of the only text. What may be the beginning of a stop text is held back
        until the next token."""
        head, held, usage = self._head("chat.completion.chunk"), "", _usage(0, 0)

        def chunk(delta: Mapping[str, Any], finish: str = "") -> Any:
            choice = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
            entry = _entry(0, choice, finish)
            return {**head, "choices": [entry], **({"usage": None} if self.has_usage else {})}

        for text in texts:
            # The first token comes first, since an error after the first chunk breaks the stream.
            if self.is_chat and text["generated"] == 1:
                yield chunk({"role": "assistant", "content": "", "refusal": None})
            usage = _usage(text["prompt_tokens"], text["generated"])
            held += text["added"]
            safe = _first_stop(held, self.stops)
            if safe == len(held) and not text["finish"]:
                for stop in self.stops:
                    for size in range(1, min(len(stop), len(held) + 1)):
                        if held.endswith(stop[:size]):
                            safe = min(safe, len(held) - size)
            shown, held = held[:safe], held[safe:]
            if shown:
                yield chunk({"content": shown})
            if text["finish"]:
                yield chunk({}, text["finish"])
        if self.has_usage:
            yield {**head, "choices": [], "usage": usage}
        yield "[DONE]"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.id,
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


def _entry(
    index: int,
    choice: Mapping[str, Any],
    finish: str,
    scores: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    reason = None if not finish else "length" if finish == LENGTH else "stop"
    logprobs = None
    if scores is not None:
        ends = list(itertools.accumulate((len(score["text"]) for score in scores), initial=0))
        logprobs = {
            "text_offset": ends[:-1],
            "token_logprobs": [score["logprob"] for score in scores],
            "tokens": [score["text"] for score in scores],
            "top_logprobs": [score["top"] for score in scores],
        }
    return {"index": index, **choice, "logprobs": logprobs, "finish_reason": reason}


def _usage(read: int, generated: int) -> dict[str, int]:
    total = read + generated
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": total}
