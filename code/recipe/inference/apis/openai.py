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
    are_texts,
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
    checked_body,
    texts_or_ids,
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
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": options.PARAMETERS["repetition_penalty"],
    "logit_bias": Rule(
        lambda value: (
            isinstance(value, dict)
            and all(
                str(token).isdecimal() and type(bias) in (int, float) and -100 <= bias <= 100
                for token, bias in value.items()
            )
        ),
        "an object of token ids to numbers from -100 to 100",
    ),
}
# Keys of other servers, with the values that change nothing.
_IDLE: Mapping[str, Rule] = {
    "best_of": one_of(1), "modalities": one_of(["text"]), "use_beam_search": _OFF,
    "ignore_eos": _OFF, "skip_special_tokens": one_of(True), "echo": _OFF, "store": _OFF,
    "suffix": one_of(""), "min_p": Rule(lambda value: value == 0, "0: it is not supported"),
    "length_penalty": Rule(lambda value: value == 1, "1: it is not supported"),
}  # fmt: skip
_CHAT_RULES: Mapping[str, Rule] = {
    **_REMARKS,
    **_IDLE,
    **_GENERATION,
    "messages": Rule(lambda value: isinstance(value, list) and bool(value), "a list of messages"),
    "max_completion_tokens": whole(1),
    "logprobs": _OFF,
    "top_logprobs": Rule(lambda value: value == 0, "0: log-probabilities are not supported"),
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
    "logprobs": _OFF,
    "echo": FLAG,
    "best_of": whole(1),
}
_EMBEDDING_RULES: Mapping[str, Rule] = {
    **_REMARKS,
    "input": TEXT_OR_TEXTS,
    "encoding_format": one_of("float", "base64"),
    "dimensions": whole(1),
}
_ROLES = ("system", "developer", "user", "assistant")


def read(path: str, document: Any) -> Request:
    """Read a body of one of the API's routes. Raise BadRequest with all keys that are unknown or
    unsupported, or have wrong values."""
    rules, needed, make = ROUTES[path]
    return make(checked_body(path, document, rules, {needed}))


def _settings(body: Mapping[str, Any], *, default: int) -> GenerationSettings:
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
        frequency_penalty=body.get("frequency_penalty", 0.0),
        presence_penalty=body.get("presence_penalty", 0.0),
        logit_bias=tuple((int(k), float(v)) for k, v in body.get("logit_bias", {}).items()),
        # Without sampling all choices are equal.
        sequences=body.get("n", 1) if samples else 1,
        seed=body.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        cuts=False,
    )
    options.refuse_contradictions(settings)
    return settings


def _chat(body: Mapping[str, Any]) -> Request:
    if body.get("tools") and body.get("tool_choice") != "none":
        raise BadRequest(
            'tools are not supported: leave them out, or give tool_choice "none".', "tools"
        )
    if {"max_tokens", "max_completion_tokens"} <= set(body):
        raise BadRequest("max_tokens and max_completion_tokens mean the same: give one of them.")
    settings = _settings(body, default=_CHAT_TOKENS)
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
    form = TextsForm(body=body, settings=settings, is_chat=True)
    streams = {"stream": body.get("stream", False)}
    return Request(inputs=[messages], parameters=streams, settings=settings, form=form)


def _completion(body: Mapping[str, Any]) -> Request:
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise BadRequest("best_of is supported only if it is n.")
    prompts = texts_or_ids(body["prompt"])
    if body.get("echo") and not are_texts(prompts):
        raise BadRequest("echo needs prompts that are texts, not token ids.", "echo")
    settings = _settings(body, default=_COMPLETION_TOKENS)
    echoed = prompts if body.get("echo") else None
    form = TextsForm(body=body, settings=settings, is_chat=False, echoed=echoed)
    streams = {"stream": body.get("stream", False)}
    return Request(inputs=prompts, parameters=streams, settings=settings, form=form)


def _embeddings(body: Mapping[str, Any]) -> Request:
    texts = texts_or_ids(body["input"])
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

    stops: tuple[str, ...]
    held: str = ""
    is_over: bool = False

    def show(self, piece: str, *, is_last: bool) -> str:
        """Add a generated piece, and return the text that can be shown now."""
        self.held += piece
        safe = cut = _first_stop(self.held, self.stops)
        self.is_over = cut < len(self.held) or is_last
        if not self.is_over:
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
    settings: GenerationSettings
    is_chat: bool
    echoed: Sequence[str] | None = None
    """The prompts, if they are returned before the generated texts."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self, prediction: Any, prepared: Prepared) -> Any:
        """Return the API's answer: of `Answers` a document, of an iterator over tokens a stream."""
        if isinstance(prediction, Iterator):
            return EventStream(self._chunks(prediction, prepared))
        choices: list[dict[str, Any]] = []
        generated = 0
        # Without sampling, one text is returned as all `n` choices.
        copies = self.body.get("n", 1) // self.settings.sequences
        for prompt, texts in enumerate(prediction):
            for text in (text for text in texts for _ in range(copies)):
                shown = text.text[: _first_stop(text.text, self.settings.stop)]
                choice = self._choice(shown, prompt)
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

    def _choice(self, text: str, prompt: int) -> dict[str, Any]:
        if self.is_chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": (self.echoed[prompt] if self.echoed is not None else "") + text}

    def _chunks(self, texts: Iterator[Completion], prepared: Prepared) -> Iterator[Any]:
        copies = self.body.get("n", 1) // self.settings.sequences
        usage = (self.body.get("stream_options") or {}).get("include_usage", False)
        choices: dict[int, ShownText] = {}
        generated = 0

        head = self._head("chat.completion.chunk")

        def chunk(index: int, choice: Mapping[str, Any], reason: str | None = None) -> Any:
            entry = _entry(index, choice, reason)
            return {**head, "choices": [entry], **({"usage": None} if usage else {})}

        def piece(index: int, text: str, reason: str | None = None) -> Any:
            delta = {"content": text} if text else {}
            return chunk(index, {"delta": delta} if self.is_chat else {"text": text}, reason)

        for written in texts:
            generated += copies
            first = (written.prompt * self.settings.sequences + written.index) * copies
            for index in range(first, first + copies):
                if index not in choices:
                    choices[index] = ShownText(self.settings.stop)
                    if self.is_chat:
                        role = {"role": "assistant", "content": "", "refusal": None}
                        yield chunk(index, {"delta": role})
                    elif self.echoed is not None:
                        yield chunk(index, self._choice("", written.prompt))
                state = choices[index]
                if not state.is_over:
                    text = state.show(written.tokens[-1].text, is_last=bool(written.finish))
                    if text:
                        yield piece(index, text)
                if written.finish:
                    yield piece(index, "", _REASONS.get(written.finish, "stop"))
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
