"""Answers of OpenAI's API: generated texts and vectors as its documents and streams."""

from __future__ import annotations

import base64
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipe.backend.generation.decoding import LENGTH, Event, Token
from recipe.backend.generation.options import GenerationSettings
from recipe.backend.requests.payloads import Answers, Document, EventStream, Request

_REASONS = {LENGTH: "length"}


def served_name(environ: Mapping[str, str] = os.environ) -> str:
    """The model's own name: AMPHORA_MODEL_NAME, else HF_MODEL_ID, else `model`."""
    return environ.get("AMPHORA_MODEL_NAME") or environ.get("HF_MODEL_ID") or "model"


@dataclass
class ShownText:
    """How much of a text may be shown: a stop text never is, nor what may become one."""

    stops: tuple[str, ...]
    held: str = ""
    size: int = 0
    """Characters that have been shown."""
    is_over: bool = False
    is_cut: bool = False
    """Whether a stop text has been written."""

    def show(self, piece: str, *, is_last: bool) -> str:
        """What can be shown now that `piece` has been written."""
        self.held += piece
        cut = _before(self.held, self.stops)
        if cut < len(self.held) or is_last:
            self.is_over, self.is_cut = True, cut < len(self.held)
            shown, self.held = self.held[:cut], ""
            self.size += len(shown)
            return shown
        safe = len(self.held)
        for stop in self.stops:
            for size in range(1, min(len(stop), len(self.held) + 1)):
                if self.held.endswith(stop[:size]):
                    safe = min(safe, len(self.held) - size)
        shown, self.held = self.held[:safe], self.held[safe:]
        self.size += len(shown)
        return shown


def _before(text: str, stops: Sequence[str]) -> int:
    """Where the first stop text begins; the text's length if there is none."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places, default=len(text))


def _noted(token: Token) -> dict[str, Any]:
    """Return a token of a chat's log-probabilities."""
    data = token.text.encode() if "\ufffd" not in token.text else token.data
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": None if data is None else list(data),
    }


def _name(token: Token) -> str:
    """Return the name of a token in a completion's log-probabilities."""
    if token.data is None:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


class ChatChoices:
    """Choices of chat completions."""

    prefix, kind, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, tokens: Sequence[Token] | None, prompt: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(tokens)}

    def first(self, prompt: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}

    def piece(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": self._logprobs(tokens)}

    def last(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = [
            {**_noted(token), "top_logprobs": [_noted(likely) for likely in token.likeliest]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


@dataclass
class CompletionChoices:
    """Choices of completions."""

    echoed: Sequence[str] | None
    """The prompts, if they are to stand before their texts."""
    prefix = "cmpl-"
    kind = chunk = "text_completion"

    def choice(self, text: str, tokens: Sequence[Token] | None, prompt: int) -> dict[str, Any]:
        before = self.echoed[prompt] if self.echoed is not None else ""
        return {"text": before + text, "logprobs": self._logprobs(tokens)}

    def first(self, prompt: int) -> dict[str, Any] | None:
        return self.choice("", None, prompt) if self.echoed is not None else None

    def piece(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(tokens)}

    def last(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        likeliest: list[dict[str, float | None]] = []
        for token in tokens:
            # Of several tokens with one text, the likeliest; and the token itself, always.
            names: dict[str, float | None] = {}
            for likely in token.likeliest:
                names.setdefault(_name(likely), likely.logprob)
            likeliest.append({**names, _name(token): token.logprob})
        return {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": likeliest,
            "text_offset": [token.start for token in tokens],
        }


@dataclass(frozen=True, kw_only=True)
class TextsForm:
    """Makes the API's answer of generated texts: a document, or a stream of events."""

    body: Mapping[str, Any]
    settings: GenerationSettings
    writer: Any
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self, prediction: Any, request: Request) -> Any:
        """`Answers` of lists of `Written`, or an iterator over events, in the API's form."""
        if isinstance(prediction, Iterator):
            return EventStream(self._chunks(prediction, request))
        choices: list[dict[str, Any]] = []
        generated = 0
        # Without sampling one text stands for as many as the body asks for.
        copies = self.body.get("n", 1) // self.settings.sequences
        for prompt, texts in enumerate(prediction):
            for text in [own for own in texts for _ in range(copies)]:
                cut = _before(text.text, self.settings.stop)
                shown = text.text[:cut]
                tokens = self._noted(text.tokens, cut if cut < len(text.text) else None)
                choice = self.writer.choice(shown, tokens, prompt)
                reason = {"finish_reason": _REASONS.get(text.finish, "stop")}
                choices.append({"index": len(choices), **choice, **reason})
                generated += len(text.tokens)
        body = self._head(self.writer.kind, request)
        return Document({**body, "choices": choices, "usage": _usage(request, generated)})

    def _noted(self, tokens: Sequence[Token], size: int | None) -> list[Token] | None:
        """Tokens that begin among the first `size` characters of their text (None: all of them),
        without special ones; None if the request asks for no log-probabilities."""
        if self.settings.logprobs is None:
            return None
        return [
            token
            for token in tokens
            if not token.is_special and (size is None or token.start < size)
        ]

    def _head(self, kind: str, request: Request) -> dict[str, Any]:
        return {
            "id": self.writer.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": served_name(),
            "system_fingerprint": None,
        }

    def _chunks(self, events: Iterator[Event], request: Request) -> Iterator[Any]:
        copies = self.body.get("n", 1) // self.settings.sequences
        usage = (self.body.get("stream_options") or {}).get("include_usage", False)
        choices: dict[int, ShownText] = {}
        noted: dict[int, list[Token]] = {}
        generated = 0

        def chunk(index: int, choice: Mapping[str, Any], reason: str | None = None) -> Any:
            body = self._head(self.writer.chunk, request)
            entry = {"index": index, **choice, "finish_reason": reason}
            return {**body, "choices": [entry], **({"usage": None} if usage else {})}

        for event in events:
            generated += copies
            written = event.written
            first = (written.prompt * self.settings.sequences + written.place) * copies
            for index in range(first, first + copies):
                if index not in choices:
                    choices[index] = ShownText(self.settings.stop)
                    if (opening := self.writer.first(written.prompt)) is not None:
                        yield chunk(index, opening)
                state = choices[index]
                noted.setdefault(index, []).append(written.tokens[-1])
                if not state.is_over:
                    text = state.show(event.text, is_last=bool(written.finish))
                    size = None if state.is_over and not state.is_cut else state.size
                    tokens = self._noted(noted[index], size)
                    if text or (state.is_over and tokens):
                        yield chunk(index, self.writer.piece(text, tokens))
                        if size is not None:
                            noted[index] = [one for one in noted[index] if one.start >= size]
                if written.finish:
                    reason = _REASONS.get(written.finish, "stop")
                    yield chunk(index, self.writer.last(), reason)
        if usage:
            body = self._head(self.writer.chunk, request)
            yield {**body, "choices": [], "usage": _usage(request, generated)}
        yield "[DONE]"


def _usage(request: Request, generated: int) -> dict[str, int]:
    prompts = sum(map(len, request.token_ids or []))
    return {
        "prompt_tokens": prompts,
        "completion_tokens": generated,
        "total_tokens": prompts + generated,
    }


@dataclass(frozen=True)
class EmbeddingsForm:
    """Makes the API's answer of vectors."""

    body: Mapping[str, Any]

    def __call__(self, prediction: Answers, request: Request) -> Document:
        """The vectors as lists, or packed in base64 as little-endian float32."""
        is_packed = self.body.get("encoding_format") == "base64"
        data = [
            {
                "object": "embedding",
                "index": place,
                "embedding": (
                    base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
                    if is_packed
                    else vector
                ),
            }
            for place, vector in enumerate(prediction)
        ]
        count = sum(map(len, request.token_ids or []))
        usage = {"prompt_tokens": count, "total_tokens": count}
        name = served_name()
        body = {"object": "list", "data": data, "model": name, "usage": usage}
        return Document(body, prediction.truncated)
