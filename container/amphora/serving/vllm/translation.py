"""Translates requests of Hugging Face's and TGI's APIs to OpenAI's API, which vLLM answers, and its
answers to generated texts (`amphora.serving.api.canonical`). Bodies of OpenAI's API pass
unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from amphora.serving.api.canonical import END, STOPPED, ApiRequest, ModelTraits, is_conversation
from amphora.serving.protocol.media_types import Fault, bad_request
from amphora.serving.protocol.routes import CHAT, COMPLETIONS, RESPONSES

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "n", "stop",
            "frequency_penalty", "max_tokens", "min_tokens", "model", "truncate_prompt_tokens",
            "structured_outputs")  # fmt: skip
"""Keys of OpenAI's API and of vLLM's extension of it, to which parameters are translated."""
TRAITS = ModelTraits(
    passed={"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES}, settings=SETTINGS
)


def translate(request: ApiRequest) -> tuple[str, Mapping[str, Any]]:
    """Return the route and the body of a request to vLLM. Raise Fault: 400 for conversations among
    other prompts, 415 for an image."""
    if request.route:
        return request.route, request.parameters
    if not request.generates:
        raise Fault(415, "unsupported_content_type", "The model reads texts alone.")
    settings = {"max_tokens": request.usual_tokens, **request.parameters}
    chats = [prompt for prompt in request.inputs if is_conversation(prompt)]
    has_tokens = settings.get("return_token_ids")
    if not chats:
        logprobs = {"logprobs": 0} if has_tokens else {}
        return COMPLETIONS, {"prompt": list(request.inputs), **settings, **logprobs}
    if len(request.inputs) > 1:
        raise bad_request(
            "Send several conversations as application/jsonlines, one in each line.", "inputs"
        )
    continues = chats[0][-1]["role"] == "assistant"
    return CHAT, {
        "messages": chats[0], "add_generation_prompt": not continues,
        "continue_final_message": continues, **settings,
        **({"logprobs": True} if has_tokens else {}),
    }  # fmt: skip


def prediction_of(request: ApiRequest, document: dict[str, Any]) -> dict[str, Any]:
    """Return the generated texts of vLLM's answer; an answer that passes unchanged."""
    if request.route:
        return document
    texts = []
    for choice in sorted(document["choices"], key=lambda choice: choice["index"]):
        text = _text_of(choice)
        tokens = _tokens(choice, text) if request.parameters.get("return_token_ids") else []
        texts.append({"text": text, "finish": _finish(choice), "tokens": tokens})
    size = len(texts) // len(request.inputs)
    entries = [texts[start : start + size] for start in range(0, len(texts), size)]
    return {"entries": entries, "single": request.single}


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, or of a chunk, of either API."""
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def _finish(choice: Mapping[str, Any]) -> str:
    reason = choice.get("finish_reason") or ""
    if reason == "stop":
        return STOPPED if isinstance(choice.get("stop_reason"), str) else END
    return str(reason)


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


class Chunks:
    """Reads chunks of a stream of OpenAI's API as the text that they add up to."""

    def __init__(self) -> None:
        self._rest = b""
        self._text = ""
        self._prompt_tokens = self._generated = 0

    def read(self, data: bytes) -> list[dict[str, Any]]:
        """Return the text after each token in some bytes of vLLM's stream. Raises Fault for an
        error in it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        texts: list[dict[str, Any]] = []
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
                added = _text_of(choice)
                self._text += added
                tokens = _tokens(choice, added)
                for index, token in enumerate(tokens, 1):
                    self._generated += 1
                    finish = _finish(choice) if index == len(tokens) else ""
                    texts.append(
                        {"text": self._text, "finish": finish, "tokens": [token],
                         "prompt_tokens": self._prompt_tokens, "generated": self._generated}
                    )  # fmt: skip
        return texts
