"""Translates requests of Hugging Face's and TGI's APIs to OpenAI's API, which vLLM answers, and the
answers back. Bodies of OpenAI's API pass unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault, bad_request
from amphora.serving.protocol.routes import CHAT, COMPLETIONS, GENERATE_STREAM, RESPONSES, TGI

EVENTS = "text/event-stream"
ROUTES = {"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES}
"""The routes of OpenAI's API by the key that each requires."""
_LINES = ("application/jsonlines", "application/x-jsonlines", "application/x-ndjson")
_DEFAULT_TOKENS = 64
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_STOPS = ("stop", "stop_sequences", "stop_sequence")
# Parameters of Hugging Face's APIs, and their names in OpenAI's API or vLLM's extension of it.
_NAMES = {
    **{name: name for name in (*_SAMPLING, "seed", "repetition_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "adapter_id": "model",
    "truncate": "truncate_prompt_tokens",
}
CUT = "truncation"
"""The flag that cuts a prompt to the part of the context that the new tokens leave."""
_FLAGS = ("do_sample", "return_full_text", "details", "stream", CUT)
_KNOWN = {*_NAMES, *_FLAGS, *_STOPS, "grammar"}
# Parameters that vLLM does not have, with the values that have no effect.
_IDLE: Mapping[str, Any] = {
    "watermark": False, "best_of": 1, "num_beams": 1, "top_n_tokens": 0, "no_repeat_ngram_size": 0,
    "decoder_input_details": False, "typical_p": 1.0, "length_penalty": 1.0,
}  # fmt: skip


@dataclass
class Part:
    """One request to vLLM."""

    route: str
    body: dict[str, Any]
    inputs: Any = None
    """The text, texts or conversation of Hugging Face's or TGI's API; None: a body of OpenAI's API,
    whose answer passes unchanged."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of Hugging Face's or TGI's API."""
    is_tgi: bool = False
    """Whether the answer is TGI's object instead of Hugging Face's list."""

    def answer(self, document: dict[str, Any]) -> Any:
        """Return the answer that follows from vLLM's document."""
        if self.inputs is None:
            return document
        is_list = isinstance(self.inputs, list) and not _is_conversation(self.inputs)
        prompts = self.inputs if is_list else [self.inputs]
        choices = sorted(document["choices"], key=lambda choice: choice["index"])
        size = len(choices) // len(prompts)
        answers = []
        for index, prompt in enumerate(prompts):
            entries = []
            for choice in choices[index * size : (index + 1) * size]:
                text, has_details = _text(choice), self.values.get("details")
                full = self.values.get("return_full_text", not has_details)
                entry = {"generated_text": _prepend_prompt(prompt, text) if full else text}
                if has_details:
                    tokens = _tokens(choice, text)
                    details = _details(choice, len(tokens), self.values)
                    entry["details"] = {**details, "prefill": [], "tokens": tokens}
                entries.append(entry)
            answers.append(entries)
        if self.is_tgi:
            return answers[0][0]
        return answers if is_list else answers[0]


def read(route: str, body: bytes, content_type: str) -> Part | list[Part | Fault]:
    """Return the request to vLLM, or for JSON Lines a request or an error for each line.

    Raises Fault: 415 for an unknown content type, 400 for a wrong body.
    """
    kind = media_types.media_type(content_type)
    if kind in _LINES and route not in ROUTES.values():
        lines = [line for line in body.splitlines() if line.strip()]
        if not lines:
            raise bad_request("The body holds no line.")
        parts: list[Part | Fault] = []
        for line in lines:
            try:
                part = _translate_document("/invocations", line)
                if part.body.get("stream"):
                    raise bad_request("A line of JSON Lines cannot be streamed.", "stream")
                parts.append(part)
            except Fault as fault:
                parts.append(fault)
        return parts
    if kind != media_types.JSON:
        raise Fault(
            415,
            "unsupported_content_type",
            f"Content-Type {content_type[:80]!r} is not supported. Send {media_types.JSON}, or on"
            f" /invocations {_LINES[0]}.",
        )
    return _translate_document(route, body)


def _translate_document(route: str, body: bytes) -> Part:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON: {error}.") from error
    if route in ROUTES.values():
        if not isinstance(document, dict):
            raise bad_request("The body is not an object.")
        return Part(route, document)
    if isinstance(document, (str, list)):
        document = {"inputs": document}
    if not isinstance(document, dict):
        raise bad_request('Send {"inputs": ..., "parameters": {...}}.', "inputs")
    is_tgi = route in TGI
    if "inputs" not in document:
        routes = [ROUTES[key] for key in ROUTES if key in document]
        if len(routes) != 1 or is_tgi:
            raise bad_request(f"The body needs inputs, or one of {', '.join(ROUTES)}.", "inputs")
        return Part(routes[0], document)
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise bad_request("parameters is not an object.", "parameters")
    others = {key: document[key] for key in document.keys() - {"inputs", "parameters", "options"}}
    values = {name: value for name, value in {**others, **parameters}.items() if value is not None}
    inputs = document["inputs"]
    if is_tgi:
        if not isinstance(inputs, str):
            raise bad_request("inputs is not a text.", "inputs")
        values = {"return_full_text": False, **values, "stream": route == GENERATE_STREAM}
    settings = _settings(values)
    logprobs: dict[str, Any]
    texts = [inputs] if isinstance(inputs, str) else inputs
    if _is_conversation(inputs):
        continues = inputs[-1]["role"] == "assistant"
        route, logprobs = CHAT, {"logprobs": True}
        fields = {"messages": inputs, "add_generation_prompt": not continues,
                "continue_final_message": continues}  # fmt: skip
    elif isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        route, logprobs, fields = COMPLETIONS, {"logprobs": 0}, {"prompt": texts}
    else:
        raise bad_request(
            "inputs must be a text, a list of texts, or one conversation. Send several"
            f" conversations as {_LINES[0]}, one in each line.",
            "inputs",
        )
    if values.get("stream"):
        if not (isinstance(inputs, str) or route == CHAT) or settings.get("n", 1) != 1:
            raise bad_request("Only one text can be streamed.", "stream")
        settings["stream"] = True
    if values.get("details") or values.get("stream"):
        settings |= {**logprobs, "return_token_ids": True}
    return Part(route, {**fields, **settings}, inputs, values, is_tgi)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value)
    )


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate parameters of Hugging Face's APIs to keys of OpenAI's API.

    vLLM checks the values, and ignores the settings of sampling at a temperature of 0.

    Raises Fault (400) for parameters that are unknown, that vLLM does not have, or that contradict.
    """
    values = {
        name: value for name, value in values.items() if name not in _IDLE or value != _IDLE[name]
    }
    if unknown := [name for name in values if name not in _KNOWN]:
        raise bad_request(
            f"{', '.join(map(repr, unknown))} is not supported by vLLM, which generates this"
            f" model's text (AMPHORA_GENERATION). Supported: {', '.join(sorted(_KNOWN))}.",
            unknown[0],
        )
    for name in (*_FLAGS, *_NAMES):
        if name in values and isinstance(values[name], bool) != (name in _FLAGS):
            expected = "true or false" if name in _FLAGS else "a number"
            raise bad_request(f"{name} is {values[name]!r}: give {expected}.", name)
    stops = [name for name in _STOPS if name in values]
    if len(stops) > 1:
        raise bad_request(f"{' and '.join(stops)} mean the same: give one of them.", stops[1])
    body = {_NAMES[name]: value for name, value in values.items() if name in _NAMES}
    body.setdefault("max_tokens", _DEFAULT_TOKENS)
    if values.get("do_sample") and body.get("temperature") == 0:
        raise bad_request("temperature is 0, and do_sample is true.", "do_sample")
    if not values.get("do_sample", any(name in values for name in _SAMPLING)):
        body["temperature"] = 0.0
    if stops:
        body |= {"stop": values[stops[0]], "include_stop_str_in_output": True}
    if values.get(CUT):
        body.setdefault("truncate_prompt_tokens", -1)  # the front knows the context's length
    if "truncate_prompt_tokens" in body:
        body["truncation_side"] = "left"
    match values.get("grammar"):
        case None:
            pass
        case {"type": "json", "value": value}:
            schema = {"name": "grammar", "schema": value}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case {"type": "regex", "value": value}:
            body["structured_outputs"] = {"regex": value}
        case _:
            raise bad_request('grammar is {"type": "json" or "regex", "value"}.', "grammar")
    return body


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, or of a chunk, of either API."""
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def _prepend_prompt(prompt: Any, text: str) -> Any:
    """Return a prompt with its text; for a conversation, its messages and the assistant's."""
    if isinstance(prompt, str):
        return prompt + text
    if prompt[-1]["role"] != "assistant":
        return [*prompt, {"role": "assistant", "content": text}]
    return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{text}"}]


def _tokens(choice: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """Return TGI's tokens of a choice, or of a chunk, with this text."""
    ids, logprobs = choice.get("token_ids") or [], choice.get("logprobs") or {}
    if "content" in logprobs:
        pairs = [(token["token"], token["logprob"]) for token in logprobs["content"] or ()]
    else:
        columns = (logprobs.get(name, ()) for name in ("tokens", "token_logprobs"))
        pairs = list(zip(*columns, strict=True))
    ends = choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None
    tokens = []
    for index, (number, (piece, logprob)) in enumerate(zip(ids, pairs, strict=True)):
        shown = text if len(ids) == 1 and not ends else piece
        special = ends and index == len(ids) - 1
        tokens.append({"id": number, "text": shown, "logprob": logprob, "special": special})
    return tokens


def _details(choice: Mapping[str, Any], count: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return TGI's details of a choice that has ended with its `count`-th token."""
    reason = choice.get("finish_reason")
    if reason == "stop":
        reason = "stop_sequence" if isinstance(choice.get("stop_reason"), str) else "eos_token"
    return {"finish_reason": reason, "generated_tokens": count, "seed": values.get("seed")}


class Events:
    """Translates chunks of a stream of OpenAI's API to TGI's events."""

    def __init__(self, part: Part, accept: str) -> None:
        self.content_type = accept if accept in _LINES else EVENTS
        self._prompt, self._values = part.inputs, part.values
        self._rest = b""
        self._text = ""
        self._count = self._prompt_tokens = 0

    def read(self, data: bytes) -> bytes:
        """Return the client's bytes for bytes of vLLM's stream. Raises Fault for an error in it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        before, after = (b"data: ", b"\n\n") if self.content_type == EVENTS else (b"", b"\n")
        written = b""
        for line in lines:
            value = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or value == b"[DONE]":
                continue
            document = json.loads(value)
            if "error" in document:
                raise Fault(500, "stream_broken", str(document["error"].get("message")))
            for choice in document["choices"]:
                ids = document.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()
                self._prompt_tokens = self._prompt_tokens or len(ids)
                text = _text(choice)
                self._text += text
                tokens = _tokens(choice, text)
                for index, token in enumerate(tokens, 1):
                    self._count += 1
                    whole, details = None, None
                    if choice.get("finish_reason") and index == len(tokens):
                        full = self._values.get("return_full_text", False)
                        whole = _prepend_prompt(self._prompt, self._text) if full else self._text
                        details = _details(choice, self._count, self._values)
                        details["input_length"] = self._prompt_tokens
                    event = {"index": self._count, "token": token, "generated_text": whole,
                             "details": details}  # fmt: skip
                    written += before + json.dumps(event, ensure_ascii=False).encode() + after
        return written


def renamed(message: str, part: Part) -> str:
    """Return one of vLLM's messages with the names that the client has given."""
    for name, key in _NAMES.items():
        if part.inputs is not None and name in part.values and name != "adapter_id":
            message = re.sub(rf"\b{key}\b", name, message)
    return message


def written(value: Any, accept: str) -> tuple[bytes, str]:
    """Return a value as JSON, or as JSON Lines if the client accepts them, and its media type."""
    if accept in _LINES and isinstance(value, list):
        return b"".join(json.dumps(v, ensure_ascii=False).encode() + b"\n" for v in value), accept
    return json.dumps(value, ensure_ascii=False).encode(), media_types.JSON
