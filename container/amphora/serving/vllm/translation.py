"""Bodies of Hugging Face's and TGI's requests as ones of OpenAI's API, which vLLM answers, and the
answers in their forms. A body of OpenAI's API passes as it is."""

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
_USUAL_TOKENS = 64
_GREEDY_BELOW = 1e-5
"""A temperature, as in the image's own handlers."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_STOPS = ("stop", "stop_sequences", "stop_sequence")
# Parameters of Hugging Face's that OpenAI's API or vLLM has, perhaps by another name.
_SAME = {
    **{name: name for name in (*_SAMPLING, "seed", "repetition_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
}
_FLAGS = ("do_sample", "return_full_text", "details", "stream", "truncation", "watermark")
_OTHERS = (*_FLAGS, *_STOPS, "truncate", "grammar", "best_of", "adapter_id")
# What has no effect in these values, which older clients send.
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
    """Makes the entries of the answer of vLLM's document; None: that is the answer."""
    events: Callable[[], Events] | None = None
    """Makes what turns vLLM's stream into TGI's events; None: it passes as it is."""

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.body.get("stream"))


@dataclass
class Exchange:
    """What a client's request is to vLLM."""

    parts: list[Part | Fault]
    """Several for JSON Lines and lists of conversations. A line that cannot be read is a Fault."""
    join: Callable[[list[Any]], Any] = list
    """Makes the answer's value of the entries of all parts."""
    has_lines: bool = False
    """Whether a part that fails has an entry of its own, beside good ones."""


def read(route: str, body: bytes, content_type: str) -> Exchange:
    """The exchange of a request.

    Raises:
        Fault: 415 for a content type that is not read, 400 for a body that is wrong.
    """
    kind = media_types.media_type(content_type)
    if kind in _LINES and route not in OPENAI:
        texts = [line for line in body.splitlines() if line.strip()]
        if not texts:
            raise Fault(400, "bad_request", "The body holds no line.")
        parts = [part for line in texts for part in _of_line(line)]
        return Exchange(parts, has_lines=True)
    if kind == TEXT and route not in OPENAI:
        text = media_types.as_text(body, content_type)
        return Exchange([_hugging_face(text, {})], join=lambda entries: entries[0])
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
        raise Fault(400, "bad_request", f"The body is not JSON: {error}.") from error


def _of_line(line: bytes) -> list[Part | Fault]:
    try:
        exchange = _of_document("/invocations", _parsed(line))
        if len(exchange.parts) > 1 or any(
            isinstance(p, Part) and p.streams for p in exchange.parts
        ):
            raise Fault(400, "bad_request", "A line holds one text or conversation, and no stream.")
    except Fault as fault:
        return [fault]
    return exchange.parts


def _of_document(route: str, document: Any) -> Exchange:
    if route in OPENAI:
        if not isinstance(document, dict):
            raise Fault(400, "bad_request", "The body is not an object.")
        return Exchange([Part(route, document)])
    if isinstance(document, (str, list)):
        document = {"inputs": document}
    if not isinstance(document, dict):
        raise Fault(400, "bad_request", 'Send {"inputs": ..., "parameters": {...}}.', "inputs")
    if "inputs" not in document:
        keys = {"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES}
        routes = [known for key, known in keys.items() if key in document]
        if len(routes) != 1 or route in (GENERATE, GENERATE_STREAM):
            raise Fault(
                400, "bad_request", f"The body needs inputs, or one of {', '.join(keys)}.", "inputs"
            )
        return Exchange([Part(routes[0], document)])
    beside = {key: document[key] for key in document if key not in ("inputs", "parameters")}
    beside.pop("options", None)
    given = document.get("parameters") or {}
    if not isinstance(given, dict):
        raise Fault(400, "bad_request", "parameters is not an object.", "parameters")
    values = {name: value for name, value in {**beside, **given}.items() if value is not None}
    inputs = document["inputs"]
    if route in (GENERATE, GENERATE_STREAM):
        if not isinstance(inputs, str):
            raise Fault(400, "bad_request", "inputs is not a text.", "inputs")
        values = {"return_full_text": False, **values, "stream": route == GENERATE_STREAM}
        return Exchange([_hugging_face(inputs, values)], join=lambda entries: entries[0][0])
    is_chat = _is_conversation(inputs)
    if isinstance(inputs, str) or is_chat:
        return Exchange([_hugging_face(inputs, values)], join=lambda entries: entries[0])
    if not isinstance(inputs, list) or not inputs or values.get("stream"):
        raise Fault(
            400, "bad_request",
            "inputs is a text, a conversation, or a list of them; only one can be streamed.",
            "inputs",
        )  # fmt: skip
    if all(isinstance(text, str) for text in inputs):
        return Exchange([_hugging_face(inputs, values)])
    return Exchange([_hugging_face(each, values) for each in inputs])


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and {"role", "content"} <= set(one) for one in value)
    )


def _hugging_face(inputs: Any, values: Mapping[str, Any]) -> Part:
    """The request of a text, a list of texts or a conversation. Raises Fault (400)."""
    settings, asked = _settings(values), dict(values)
    texts = [inputs] if isinstance(inputs, str) else inputs
    if _is_conversation(inputs):
        goes_on = inputs[-1]["role"] == "assistant"
        route = CHAT
        body = {"messages": inputs, "add_generation_prompt": not goes_on,
                "continue_final_message": goes_on}  # fmt: skip
        texts = [inputs]
    elif isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        route, body = COMPLETIONS, {"prompt": texts}
    else:
        raise Fault(400, "bad_request", "inputs holds what is no text or conversation.", "inputs")
    if asked.get("details") or asked.get("stream"):
        chosen = {"logprobs": True} if route == CHAT else {"logprobs": 0}
        settings |= {**chosen, "return_token_ids": True}
    if asked.get("stream"):
        settings["stream"] = True
        if settings.get("n", 1) > 1:
            raise Fault(400, "bad_request", "Only one text can be streamed.", "stream")
    events = partial(Events, texts[0], asked)
    return Part(route, {**body, **settings}, partial(_entries, texts, asked), events)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a body of OpenAI's API that parameters of Hugging Face's mean.

    Raises:
        Fault: 400 for parameters that are unknown, that vLLM does not have, or that contradict.
    """
    idle = [name for name, value in _IDLE.items() if name in values and values[name] == value]
    values = {name: value for name, value in values.items() if name not in idle}
    known = (*_SAME, *_OTHERS)
    if unknown := [name for name in values if name not in known]:
        raise Fault(
            400, "bad_request",
            f"{', '.join(map(repr, unknown))} cannot be given here: vLLM writes this model's text"
            f" (AMPHORA_GENERATION), and takes {', '.join(sorted(known))}.",
            unknown[0],
        )  # fmt: skip
    for name in _FLAGS:
        if not isinstance(values.get(name, False), bool) or (
            name == "watermark" and name in values
        ):
            raise Fault(400, "bad_request", f"{name} is {values[name]!r}.", name)
    stops = [name for name in _STOPS if name in values]
    if len(stops) > 1:
        raise Fault(400, "bad_request", f"{' and '.join(stops)} mean the same.", stops[1])
    body = {_SAME[name]: value for name, value in values.items() if name in _SAME}
    body.setdefault("max_tokens", _USUAL_TOKENS)
    samples = values.get("do_sample", any(name in values for name in _SAMPLING))
    temperature = values.get("temperature", 1)
    if isinstance(temperature, (int, float)) and temperature < _GREEDY_BELOW:
        if temperature == 0 and values.get("do_sample"):
            raise Fault(400, "bad_request", "temperature is 0, and do_sample is true.", "do_sample")
        samples = False
    if not samples:
        body = {name: value for name, value in body.items() if name not in _SAMPLING}
        body["temperature"] = 0.0
        if body.get("n", 1) != 1:
            raise Fault(400, "bad_request", "num_return_sequences needs do_sample.", "do_sample")
    if stops:
        body |= {"stop": values[stops[0]], "include_stop_str_in_output": True}
    if "truncate" in values:
        body |= {"truncate_prompt_tokens": values["truncate"], "truncation_side": "left"}
    elif values.get("truncation"):
        body |= {"truncate_prompt_tokens": -1, "truncation_side": "left"}
    if "adapter_id" in values:
        body["model"] = values["adapter_id"]
    if grammar := values.get("grammar"):
        body |= _grammar(grammar)
    return body


def _grammar(grammar: Any) -> dict[str, Any]:
    """TGI's grammar as OpenAI's API and vLLM have it."""
    kind, value = (
        (grammar.get("type"), grammar.get("value")) if isinstance(grammar, dict) else ("",) * 2
    )
    if kind == "json":
        schema = {"name": "grammar", "schema": value}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if kind == "regex":
        return {"structured_outputs": {"regex": value}}
    raise Fault(400, "bad_request", 'grammar is {"type": "json" or "regex", "value"}.', "grammar")


def _entries(
    texts: Sequence[Any], asked: Mapping[str, Any], document: Mapping[str, Any]
) -> list[Any]:
    """The answer to each prompt: a list of its texts."""
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    size = len(choices) // len(texts)
    has_details = asked.get("details")
    full = asked.get("return_full_text", not has_details)
    answers = []
    for place, prompt in enumerate(texts):
        entries = []
        for choice in choices[place * size : (place + 1) * size]:
            text = _text(choice)
            entry = {"generated_text": _with_prompt(prompt, text) if full else text}
            if has_details:
                tokens = _tokens(choice, text)
                entry["details"] = {**_details(choice, len(tokens), asked), "prefill": [],
                                    "tokens": tokens}  # fmt: skip
            entries.append(entry)
        answers.append(entries)
    return answers


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, or of a chunk's, of either API."""
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def _with_prompt(prompt: Any, text: str) -> Any:
    """A prompt and its text; of a conversation all messages, the last one the assistant's."""
    if isinstance(prompt, str):
        return prompt + text
    if prompt[-1]["role"] != "assistant":
        return [*prompt, {"role": "assistant", "content": text}]
    return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{text}"}]


def _tokens(choice: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """TGI's tokens of a choice or a chunk whose text is `text`."""
    ids, noted = choice.get("token_ids") or [], choice.get("logprobs") or {}
    if "content" in noted:
        pairs = [(one["token"], one["logprob"]) for one in noted["content"] or ()]
    else:
        pairs = list(zip(noted.get("tokens", ()), noted.get("token_logprobs", ()), strict=True))
    ends = choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None
    tokens = []
    for place, (number, (piece, logprob)) in enumerate(zip(ids, pairs, strict=True)):
        is_last = place == len(ids) - 1
        own = text if len(ids) == 1 and not ends else piece
        tokens.append({"id": number, "text": own, "logprob": logprob, "special": ends and is_last})
    return tokens


def _details(choice: Mapping[str, Any], count: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    if reason == "stop":
        reason = "stop_sequence" if isinstance(choice.get("stop_reason"), str) else "eos_token"
    return {"finish_reason": reason, "generated_tokens": count, "seed": asked.get("seed")}


class Events:
    """Makes TGI's events of the chunks of a stream of OpenAI's API, in the form of a media type."""

    def __init__(self, prompt: Any, asked: Mapping[str, Any]) -> None:
        self._prompt = prompt
        self._asked = asked
        self._rest = b""
        self._text = ""
        self._count = self._prompt_tokens = 0

    def read(self, data: bytes, accept: str) -> bytes:
        """The bytes for the client that follow from bytes of vLLM's stream.

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
            for place, token in enumerate(tokens):
                self._count += 1
                event: dict[str, Any] = {
                    "index": self._count, "token": token, "generated_text": None, "details": None,
                }  # fmt: skip
                if choice.get("finish_reason") and place == len(tokens) - 1:
                    full = self._asked.get("return_full_text", False)
                    whole = _with_prompt(self._prompt, self._text) if full else self._text
                    details = _details(choice, self._count, self._asked)
                    details["input_length"] = self._prompt_tokens
                    event |= {"generated_text": whole, "details": details}
                yield event


def _framed(event: dict[str, Any], accept: str) -> bytes:
    if accept == TEXT:
        token = event["token"]
        return b"" if token["special"] else str(token["text"]).encode()
    text = json.dumps(event, ensure_ascii=False).encode()
    return text + b"\n" if accept in _LINES else b"data: " + text + b"\n\n"


def written(value: Any, accept: str) -> tuple[bytes, str]:
    """A value as JSON, or as JSON Lines if these are asked for, and its content type."""
    if accept in _LINES and isinstance(value, list):
        return b"".join(json.dumps(v, ensure_ascii=False).encode() + b"\n" for v in value), accept
    return json.dumps(value, ensure_ascii=False).encode(), media_types.JSON


def stream_type(accept: str) -> str:
    """The content type of a stream of TGI's events."""
    return accept if accept in (*_LINES, TEXT) else EVENTS
