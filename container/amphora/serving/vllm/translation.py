"""Translates requests of Hugging Face's and TGI's APIs to OpenAI's API, which vLLM answers, and its
answers to generated texts (`amphora.serving.api.canonical`). Bodies of OpenAI's API pass
unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amphora.serving.api.canonical import (
    END,
    STOPPED,
    AnyRequest,
    Generate,
    ModelTraits,
    Passed,
    is_conversation,
)
from amphora.serving.protocol.media_types import Fault, bad_request
from amphora.serving.protocol.routes import CHAT, COMPLETIONS, RESPONSES

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "n", "stop",
            "frequency_penalty", "max_tokens", "min_tokens", "model", "truncate_prompt_tokens",
            "structured_outputs")  # fmt: skip
"""Keys of OpenAI's API and of vLLM's extension of it, to which parameters are translated."""
TRAITS = ModelTraits(
    passed={"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES}, settings=SETTINGS
)


@dataclass(frozen=True, kw_only=True)
class VllmRequest:
    """One request to vLLM."""

    route: str
    body: dict[str, Any]
    request: Generate | Passed

    @classmethod
    def from_request(cls, request: AnyRequest) -> VllmRequest:
        """Translate a request. Raise Fault: 400 for conversations among other prompts, 415 for an
        image."""
        if isinstance(request, Passed):
            return cls(route=request.route, body=request.body, request=request)
        if not isinstance(request, Generate):
            raise Fault(415, "unsupported_content_type", "The model reads texts alone.")
        settings = {"max_tokens": request.usual_tokens, **request.settings}
        chats = [prompt for prompt in request.prompts if is_conversation(prompt)]
        if not chats:
            body = {"prompt": list(request.prompts), **settings}
            if settings.get("return_token_ids"):
                body["logprobs"] = 0
            return cls(route=COMPLETIONS, body=body, request=request)
        if len(request.prompts) > 1:
            raise bad_request(
                "Send several conversations as application/jsonlines, one in each line.", "inputs"
            )
        continues = chats[0][-1]["role"] == "assistant"
        body = {
            "messages": chats[0], "add_generation_prompt": not continues,
            "continue_final_message": continues, **settings,
        }  # fmt: skip
        if settings.get("return_token_ids"):
            body["logprobs"] = True
        return cls(route=CHAT, body=body, request=request)

    def prediction(self, document: dict[str, Any]) -> Any:
        """Return the generated texts of vLLM's answer; an answer that passes unchanged."""
        if isinstance(self.request, Passed):
            return document
        choices = sorted(document["choices"], key=lambda choice: choice["index"])
        size = len(choices) // len(self.request.prompts)
        texts = [self._text(choice) for choice in choices]
        return {"entries": [texts[start : start + size] for start in range(0, len(texts), size)]}

    def _text(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        text = _text_of(choice)
        has_tokens = self.body.get("return_token_ids")
        tokens = _tokens(choice, text) if has_tokens else []
        return {"text": text, "finish": _finish(choice), "tokens": tokens}


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
        self._prompt_tokens = 0

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
                    finish = _finish(choice) if index == len(tokens) else ""
                    texts.append(
                        {"text": self._text, "finish": finish, "tokens": [token],
                         "prompt_tokens": self._prompt_tokens}
                    )  # fmt: skip
        return texts
