"""The prompts of a request: texts and conversations as tokens that fit into a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from recipe.backend import bounds, turns
from recipe.backend.bounds import Bound
from recipe.backend.generation import options
from recipe.backend.generation.gathering import TokenizedInput
from recipe.backend.generation.options import GenerationSettings
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.parameters import are_ids
from recipe.backend.requests.payloads import BadRequest, Request, a_text, is_conversation
from recipe.backend.saved.weights import embeddings_of

_MESSAGE_BYTES = 32
"""The cost of a message, apart from its content."""


class TooLong(BadRequest):
    """A prompt, or a prompt and the text to generate, exceeds the model's positions."""

    code = "context_length_exceeded"


@dataclass(frozen=True)
class Prompt(TokenizedInput):
    """A prompt of a request, ready for the model to continue."""

    settings: GenerationSettings
    new: int
    """The most tokens to generate."""
    is_chat: bool
    continues: bool
    """Whether the generated text continues the prompt's text, instead of answering it."""


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of requests."""

    loaded: LoadedModel
    stop: tuple[str, ...] = ()
    """The stop texts of the model's generation_config."""

    def prepare(self, request: Request) -> Request:
        """Return a request with its prompts; sizes are the most tokens of each and its text. Raise
        BadRequest if parameters or inputs are wrong, or do not fit into the model."""
        settings = options.settings_of(request.parameters, request.usual_tokens)
        if request.streams and (len(request.inputs) != 1 or settings.sequences > 1):
            raise BadRequest(
                "Only one text can be streamed: send one prompt, and no num_return_sequences (n)."
            )
        settings = replace(settings, stop=(*settings.stop, *self.stop))
        sources = request.read(a_prompt)
        count = len(sources)
        bounds.hold(Bound.ROWS, count)
        reason = f"{count:,} prompts x {settings.sequences:,} texts x the new tokens of each"
        written = count * settings.sequences * (settings.max_new_tokens or 1)
        bounds.hold(Bound.WRITTEN, written, reason)
        prompts: list[Prompt] = []
        read = written = 0
        for index, source in enumerate(sources):
            prompts.append(self._prompt(source, index, settings, may_continue=request.continues))
            read += len(prompts[-1].ids)
            written += settings.sequences * prompts[-1].new
            bounds.hold(Bound.READ, read)
            bounds.hold(Bound.WRITTEN, written, reason)
            turns.pause()
        sizes = [len(prompt.ids) + prompt.new for prompt in prompts]
        if (top := settings.logprobs) is not None:
            scored = settings.sequences * sum(sizes)
            bounds.hold(Bound.READ, scored)
            bounds.hold(Bound.ANSWER, scored * (3 + 2 * top), f"{scored:,} tokens x {3 + 2 * top}")
        return replace(request, values=sources, sizes=sizes, tokens=read, work=prompts)

    def _prompt(
        self, source: Any, index: int, settings: GenerationSettings, *, may_continue: bool
    ) -> Prompt:
        """Return the prompt of a text, token ids or a conversation, whose final message of the
        assistant it may continue. Raise BadRequest if it cannot be read, or does not fit."""
        tokenizer: Any = self.loaded.tokenizer
        limit, more = self.loaded.max_length, ""
        is_chat = not isinstance(source, str) and not are_ids(source)
        continues = bool(source)
        if are_ids(source):
            ids, size = list(source), embeddings_of(self.loaded.model)
            if max(ids) >= size:
                raise BadRequest(f"Token id {max(ids)} is not one of the model's {size} tokens.")
        else:
            if is_chat:
                continues = may_continue and source[-1]["role"] == "assistant"
                source = self._templated(source, continues=continues)
            # A very long text need not be read whole to be refused.
            text = bounds.beginning(tokenizer, source, limit)
            more = "" if text is source else "more than "
            ids = tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"]
        if not ids:
            if tokenizer.bos_token_id is None:
                raise BadRequest("A prompt is empty, and the model has no token to begin with.")
            ids = [tokenizer.bos_token_id]
        length, new = len(ids), settings.max_new_tokens
        if new is None:
            new = max(1, min(settings.usual_tokens, limit - length))
        if more or length + new > limit:
            room = f"at most {limit - length} can follow" if length < limit else "none can follow"
            wish = "" if settings.max_new_tokens is None else f" {new} are to follow,"
            raise TooLong(
                f"The prompt has {more}{length} tokens,{wish} and the model has {limit}"
                f" positions: {room}. Shorten the prompt or ask for less."
            )
        return Prompt(index, ids, settings, new, is_chat, continues)

    def _templated(self, messages: Sequence[dict[str, Any]], *, continues: bool) -> str:
        """Return a conversation as rendered by the chat template. Raise BadRequest if there is
        none, or it refuses the messages or ignores one of them."""
        if not self.loaded.tokenizer.chat_template:
            raise BadRequest(
                "The model's tokenizer has no chat template, so a conversation cannot be written as"
                " a prompt. Send a prompt, or save a chat template with the model."
            )
        sizes = [bounds.size_of(message["content"]) + _MESSAGE_BYTES for message in messages]
        bounds.hold(Bound.TEXT, sum(sizes), f"a conversation of {len(messages):,} messages")

        def text_of(conversation: Sequence[dict[str, Any]]) -> str:
            return str(
                self.loaded.tokenizer.apply_chat_template(
                    [dict(message) for message in conversation], tokenize=False,
                    add_generation_prompt=not continues, continue_final_message=continues,
                )
            )  # fmt: skip

        try:
            text = text_of(messages)
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"The model's chat template refuses the messages: {error}") from error

        def is_read(position: int, **otherwise: str) -> bool:
            """Return whether the text changes with a part of a message."""
            other = [*messages]
            other[position] = {**messages[position], **otherwise}
            try:
                return text_of(other) != text
            except (TemplateError, TypeError, ValueError):
                return True

        for index, message in enumerate(messages):
            turns.pause()
            if message["content"].strip() not in text and not is_read(index, content="-"):
                raise BadRequest(
                    f"The model's chat template ignores messages[{index}], of role"
                    f" {message['role']!r}. Remove it, or give it a role that the template reads."
                )
        return text


def a_prompt(value: Any) -> Any:
    """Return a text, token ids, or a conversation with the contents of its messages as texts.
    Raise BadRequest for other values."""
    if are_ids(value):
        return value
    if not is_conversation(value):
        return a_text(value)
    messages = []
    for message in value:
        parts = message["content"]
        if not isinstance(parts, list):
            parts = [{"type": "text", "text": parts}]
        kept = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in kept if isinstance(part.get("text"), str)]
        if len(texts) < len(parts):
            raise BadRequest(
                "The content of a message must be a text, or a list of"
                ' {"type": "text", "text": "..."}: this model reads neither images nor sounds.'
            )
        messages.append({**message, "content": "\n".join(texts)})
    return messages
