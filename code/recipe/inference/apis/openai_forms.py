"""Answers of OpenAI's API: documents and streams of generated text, and embeddings."""

from __future__ import annotations

import base64
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipe.backend.generation.decoding import LENGTH, Completion
from recipe.backend.generation.options import GenerationSettings
from recipe.backend.requests.payloads import Answers, Document, EventStream, Prepared

_REASONS = {LENGTH: "length"}


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


class ChatChoices:
    """Choices of chat completions."""

    prefix, kind, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, prompt: int) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def first(self, prompt: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


@dataclass
class CompletionChoices:
    """Choices of completions."""

    echoed: Sequence[str] | None
    """The prompts, if they are returned before the generated texts."""
    prefix = "cmpl-"
    kind = chunk = "text_completion"

    def choice(self, text: str, prompt: int) -> dict[str, Any]:
        return {"text": (self.echoed[prompt] if self.echoed is not None else "") + text}

    def first(self, prompt: int) -> dict[str, Any] | None:
        return self.choice("", prompt) if self.echoed is not None else None

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}


@dataclass(frozen=True, kw_only=True)
class TextsForm:
    """Converts generated texts to the API's answer: a document, or a stream of events."""

    body: Mapping[str, Any]
    settings: GenerationSettings
    writer: Any
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self, prediction: Any, prepared: Prepared) -> Any:
        """Return the API's answer of `Answers` of completions, or of an iterator over one."""
        if isinstance(prediction, Iterator):
            return EventStream(self._chunks(prediction, prepared))
        choices: list[dict[str, Any]] = []
        generated = 0
        # Without sampling, one text is returned as all `n` choices.
        copies = self.body.get("n", 1) // self.settings.sequences
        for prompt, texts in enumerate(prediction):
            for text in (text for text in texts for _ in range(copies)):
                shown = text.text[: _first_stop(text.text, self.settings.stop)]
                choice = self.writer.choice(shown, prompt)
                choices.append(_entry(len(choices), choice, _REASONS.get(text.finish, "stop")))
                generated += len(text.tokens)
        body = self._head(self.writer.kind)
        return Document({**body, "choices": choices, "usage": _usage(prepared, generated)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.writer.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": served_name(),
            "system_fingerprint": None,
        }

    def _chunks(self, texts: Iterator[Completion], prepared: Prepared) -> Iterator[Any]:
        copies = self.body.get("n", 1) // self.settings.sequences
        usage = (self.body.get("stream_options") or {}).get("include_usage", False)
        choices: dict[int, ShownText] = {}
        generated = 0

        def chunk(index: int, choice: Mapping[str, Any], reason: str | None = None) -> Any:
            body = self._head(self.writer.chunk)
            entry = _entry(index, choice, reason)
            return {**body, "choices": [entry], **({"usage": None} if usage else {})}

        for written in texts:
            generated += copies
            first = (written.prompt * self.settings.sequences + written.index) * copies
            for index in range(first, first + copies):
                if index not in choices:
                    choices[index] = ShownText(self.settings.stop)
                    if (opening := self.writer.first(written.prompt)) is not None:
                        yield chunk(index, opening)
                state = choices[index]
                if not state.is_over:
                    text = state.show(written.tokens[-1].text, is_last=bool(written.finish))
                    if text:
                        yield chunk(index, self.writer.piece(text))
                if written.finish:
                    reason = _REASONS.get(written.finish, "stop")
                    yield chunk(index, self.writer.piece(""), reason)
        if usage:
            body = self._head(self.writer.chunk)
            yield {**body, "choices": [], "usage": _usage(prepared, generated)}
        yield "[DONE]"


def _entry(index: int, choice: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **choice, "logprobs": None, "finish_reason": reason}


def _usage(prepared: Prepared, generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": prepared.tokens,
        "completion_tokens": generated,
        "total_tokens": prepared.tokens + generated,
    }


@dataclass(frozen=True)
class EmbeddingsForm:
    """Converts vectors to the API's answer."""

    body: Mapping[str, Any]

    def __call__(self, prediction: Answers, prepared: Prepared) -> Document:
        """Return the vectors as lists, or in base64 as little-endian float32."""
        is_packed = self.body.get("encoding_format") == "base64"
        data = [
            {
                "object": "embedding",
                "index": position,
                "embedding": (
                    base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
                    if is_packed
                    else vector
                ),
            }
            for position, vector in enumerate(prediction)
        ]
        usage = {"prompt_tokens": prepared.tokens, "total_tokens": prepared.tokens}
        name = served_name()
        body = {"object": "list", "data": data, "model": name, "usage": usage}
        return Document(body, prediction.truncated)
