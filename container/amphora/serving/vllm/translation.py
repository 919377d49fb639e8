"""Translates requests of Hugging Face's and TGI's APIs to OpenAI's API, which vLLM answers, and the
answers back. Bodies of OpenAI's API pass unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATE, GENERATE_STREAM = "/generate", "/generate_stream"
OPENAI = (CHAT, COMPLETIONS, RESPONSES)
EVENTS, TEXT = "text/event-stream", "text/plain"
_LINES = ("application/jsonlines", "application/x-jsonlines", "application/x-ndjson")
_DEFAULT_TOKENS = 64
_GREEDY_BELOW = 1e-5
"""A temperature, as in the image's own handlers."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_STOPS = ("stop", "stop_sequences", "stop_sequence")
# Parameters of Hugging Face's APIs, and their names in OpenAI's API or vLLM's extension of it.
_NAMES = {
    **{name: name for name in (*_SAMPLING, "seed", "repetition_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
}
_FLAGS = ("do_sample", "return_full_text", "details", "stream", "truncation")
_KNOWN = {*_NAMES, *_FLAGS, *_STOPS, "truncate", "grammar", "adapter_id"}
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
    shape: Callable[[dict[str, Any]], list[Any]] | None = None
    """Makes the answer's entries of vLLM's document; None: the document is the answer."""
    events: Callable[[], Events] | None = None
    """Makes the translator of vLLM's stream; None: the stream passes unchanged."""

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.body.get("stream"))


@dataclass
class Exchange:
    """The requests to vLLM that answer one request of a client."""

    parts: list[Part | Fault]
    """Several for JSON Lines and lists of conversations; a Fault for a line that is wrong."""
    depth: int = 0
    """How many lists around a single answer to remove."""
    has_lines: bool = False
    """Whether a failed part has an entry of its own in the answer."""

    def joined(self, entries: list[Any]) -> Any:
        """Return the answer made of the entries of all parts."""
        value: Any = entries
        for _ in range(self.depth):
            value = value[0]
        return value


def bad_request(message: str, param: str | None = None) -> Fault:
    """Return a fault of status 400."""
    return Fault(400, "bad_request", message, param)


def read(route: str, body: bytes, content_type: str) -> Exchange:
    """Return the exchange of a request.

    Raises:
        Fault: 415 for an unknown content type, 400 for a wrong body.
    """
    kind = media_types.media_type(content_type)
    if kind in _LINES and route not in OPENAI:
        lines = [line for line in body.splitlines() if line.strip()]
        if not lines:
            raise bad_request("The body holds no line.")
        return Exchange([part for line in lines for part in _of_line(line)], has_lines=True)
    if kind == TEXT and route not in OPENAI:
        return Exchange([_hugging_face(media_types.as_text(body, content_type), {})], depth=1)
    if kind != media_types.JSON:
        raise Fault(
            415,
            "unsupported_content_type",
            f"{content_type[:80]!r} is not read here, but {media_types.JSON}; on /invocations also"
            f" {_LINES[0]} and {TEXT}.",
        )
    return _of_document(route, _parsed(body))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON: {error}.") from error


def _of_line(line: bytes) -> list[Part | Fault]:
    try:
        parts = _of_document("/invocations", _parsed(line)).parts
        if len(parts) > 1 or any(isinstance(part, Part) and part.streams for part in parts):
            raise bad_request("A line holds one text or conversation, and no stream.")
    except Fault as fault:
        return [fault]
    return parts


def _of_document(route: str, document: Any) -> Exchange:
    if route in OPENAI:
        if not isinstance(document, dict):
            raise bad_request("The body is not an object.")
        return Exchange([Part(route, document)])
    if isinstance(document, (str, list)):
        document = {"inputs": document}
    if not isinstance(document, dict):
        raise bad_request('Send {"inputs": ..., "parameters": {...}}.', "inputs")
    is_tgis = route in (GENERATE, GENERATE_STREAM)
    if "inputs" not in document:
        keys = {"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES}
        routes = [keys[key] for key in keys if key in document]
        if len(routes) != 1 or is_tgis:
            raise bad_request(f"The body needs inputs, or one of {', '.join(keys)}.", "inputs")
        return Exchange([Part(routes[0], document)])
    others = {key: document[key] for key in document if key not in ("inputs", "parameters")}
    others.pop("options", None)
    given = document.get("parameters") or {}
    if not isinstance(given, dict):
        raise bad_request("parameters is not an object.", "parameters")
    values = {name: value for name, value in {**others, **given}.items() if value is not None}
    inputs = document["inputs"]
    if is_tgis:
        if not isinstance(inputs, str):
            raise bad_request("inputs is not a text.", "inputs")
        values = {"return_full_text": False, **values, "stream": route == GENERATE_STREAM}
        return Exchange([_hugging_face(inputs, values)], depth=2)
    if isinstance(inputs, str) or _is_conversation(inputs):
        return Exchange([_hugging_face(inputs, values)], depth=1)
    if not isinstance(inputs, list) or not inputs or values.get("stream"):
        raise bad_request(
            "inputs is a text, a conversation, or a list of them; only one can be streamed.",
            "inputs",
        )
    if all(isinstance(text, str) for text in inputs):
        return Exchange([_hugging_face(inputs, values)])
    return Exchange([_hugging_face(one, values) for one in inputs])


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and {"role", "content"} <= set(one) for one in value)
    )


def _hugging_face(inputs: Any, values: Mapping[str, Any]) -> Part:
    """Return the request of a text, a list of texts or a conversation. Raises Fault (400)."""
    settings = _settings(values)
    if _is_conversation(inputs):
        continues = inputs[-1]["role"] == "assistant"
        route, prompts = CHAT, [inputs]
        body = {"messages": inputs, "add_generation_prompt": not continues,
                "continue_final_message": continues}  # fmt: skip
    else:
        route, prompts = COMPLETIONS, [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
            raise bad_request("inputs must hold texts or conversations.", "inputs")
        body = {"prompt": prompts}
    if values.get("details") or values.get("stream"):
        logprobs = {"logprobs": True} if route == CHAT else {"logprobs": 0}
        settings |= {**logprobs, "return_token_ids": True}
    if values.get("stream"):
        settings["stream"] = True
        if settings.get("n", 1) > 1:
            raise bad_request("Only one text can be streamed.", "stream")
    shape, events = partial(_entries, prompts, values), partial(Events, prompts[0], values)
    return Part(route, {**body, **settings}, shape, events)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate parameters of Hugging Face's APIs to keys of OpenAI's API.

    Raises:
        Fault: 400 for parameters that are unknown, that vLLM does not have, or that contradict.
    """
    values = {
        name: value for name, value in values.items() if name not in _IDLE or value != _IDLE[name]
    }
    if unknown := [name for name in values if name not in _KNOWN]:
        raise bad_request(
            f"{', '.join(map(repr, unknown))} cannot be given here: vLLM generates this model's"
            f" text (AMPHORA_GENERATION), and takes {', '.join(sorted(_KNOWN))}.",
            unknown[0],
        )
    for name in _FLAGS:
        if not isinstance(values.get(name, False), bool):
            raise bad_request(f"{name} is {values[name]!r}: give true or false.", name)
    stops = [name for name in _STOPS if name in values]
    if len(stops) > 1:
        raise bad_request(f"{' and '.join(stops)} mean the same: give one of them.", stops[1])
    body = {_NAMES[name]: value for name, value in values.items() if name in _NAMES}
    body.setdefault("max_tokens", _DEFAULT_TOKENS)
    samples = values.get("do_sample", any(name in values for name in _SAMPLING))
    temperature = values.get("temperature", 1)
    if isinstance(temperature, (int, float)) and temperature < _GREEDY_BELOW:
        if temperature == 0 and values.get("do_sample"):
            raise bad_request("temperature is 0, and do_sample is true.", "do_sample")
        samples = False
    if not samples:
        body = {name: value for name, value in body.items() if name not in _SAMPLING}
        body["temperature"] = 0.0
        if body.get("n", 1) != 1:
            raise bad_request("num_return_sequences needs do_sample.", "do_sample")
    if stops:
        body |= {"stop": values[stops[0]], "include_stop_str_in_output": True}
    if "truncate" in values or values.get("truncation"):
        cut = {"truncate_prompt_tokens": values.get("truncate", -1), "truncation_side": "left"}
        body |= cut
    if "adapter_id" in values:
        body["model"] = values["adapter_id"]
    if grammar := values.get("grammar"):
        kind, value = (
            (grammar.get("type"), grammar.get("value")) if isinstance(grammar, dict) else ("", "")
        )
        if kind == "json":
            schema = {"name": "grammar", "schema": value}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind == "regex":
            body["structured_outputs"] = {"regex": value}
        else:
            raise bad_request('grammar is {"type": "json" or "regex", "value"}.', "grammar")
    return body


def _entries(
    prompts: Sequence[Any], values: Mapping[str, Any], document: Mapping[str, Any]
) -> list[Any]:
    """Return the answer to each prompt: a list of its texts."""
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    size = len(choices) // len(prompts)
    full = values.get("return_full_text", not values.get("details"))
    answers = []
    for place, prompt in enumerate(prompts):
        entries = []
        for choice in choices[place * size : (place + 1) * size]:
            text = _text(choice)
            entry = {"generated_text": _with_prompt(prompt, text) if full else text}
            if values.get("details"):
                tokens = _tokens(choice, text)
                details = _details(choice, len(tokens), values)
                entry["details"] = {**details, "prefill": [], "tokens": tokens}
            entries.append(entry)
        answers.append(entries)
    return answers


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, or of a chunk's, of either API."""
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def _with_prompt(prompt: Any, text: str) -> Any:
    """Return a prompt with its text; for a conversation, its messages and the assistant's."""
    if isinstance(prompt, str):
        return prompt + text
    if prompt[-1]["role"] != "assistant":
        return [*prompt, {"role": "assistant", "content": text}]
    return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{text}"}]


def _tokens(choice: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """Return TGI's tokens of a choice, or of a chunk, with this text."""
    ids, noted = choice.get("token_ids") or [], choice.get("logprobs") or {}
    if "content" in noted:
        pairs = [(one["token"], one["logprob"]) for one in noted["content"] or ()]
    else:
        pairs = list(zip(noted.get("tokens", ()), noted.get("token_logprobs", ()), strict=True))
    ends = choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None
    tokens = []
    for place, (number, (piece, logprob)) in enumerate(zip(ids, pairs, strict=True)):
        shown = text if len(ids) == 1 and not ends else piece
        special = ends and place == len(ids) - 1
        tokens.append({"id": number, "text": shown, "logprob": logprob, "special": special})
    return tokens


def _details(choice: Mapping[str, Any], count: int, values: Mapping[str, Any]) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    if reason == "stop":
        reason = "stop_sequence" if isinstance(choice.get("stop_reason"), str) else "eos_token"
    return {"finish_reason": reason, "generated_tokens": count, "seed": values.get("seed")}


class Events:
    """Translates chunks of a stream of OpenAI's API to TGI's events, in a given media type."""

    def __init__(self, prompt: Any, values: Mapping[str, Any]) -> None:
        self._prompt = prompt
        self._values = values
        self._rest = b""
        self._text = ""
        self._count = self._prompt_tokens = 0

    def read(self, data: bytes, accept: str) -> bytes:
        """Return the client's bytes that follow from bytes of vLLM's stream.

        Raises:
            Fault: vLLM's stream holds an error.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        written = []
        for line in lines:
            value = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and value != b"[DONE]":
                document = json.loads(value)
                if "error" in document:
                    raise Fault(500, "stream_broken", str(document["error"].get("message")))
                written += [_framed(event, accept) for event in self._events(document)]
        return b"".join(written)

    def _events(self, document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for choice in document["choices"]:
            ids = document.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()
            self._prompt_tokens = self._prompt_tokens or len(ids)
            text = _text(choice)
            self._text += text
            tokens = _tokens(choice, text)
            for place, token in enumerate(tokens, 1):
                self._count += 1
                whole, details = None, None
                if choice.get("finish_reason") and place == len(tokens):
                    full = self._values.get("return_full_text", False)
                    whole = _with_prompt(self._prompt, self._text) if full else self._text
                    details = _details(choice, self._count, self._values)
                    details["input_length"] = self._prompt_tokens
                yield {"index": self._count, "token": token, "generated_text": whole,
                       "details": details}  # fmt: skip


def _framed(event: dict[str, Any], accept: str) -> bytes:
    if accept == TEXT:
        token = event["token"]
        return b"" if token["special"] else str(token["text"]).encode()
    text = json.dumps(event, ensure_ascii=False).encode()
    return text + b"\n" if accept in _LINES else b"data: " + text + b"\n\n"


def written(value: Any, accept: str) -> tuple[bytes, str]:
    """Return a value as JSON, or as JSON Lines if the client accepts them, and its media type."""
    if accept in _LINES and isinstance(value, list):
        return b"".join(json.dumps(v, ensure_ascii=False).encode() + b"\n" for v in value), accept
    return json.dumps(value, ensure_ascii=False).encode(), media_types.JSON


def stream_type(accept: str) -> str:
    """Return the media type of a stream of TGI's events."""
    return accept if accept in (*_LINES, TEXT) else EVENTS
