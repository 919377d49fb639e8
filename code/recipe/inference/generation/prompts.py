"""The prompts of a request: texts and conversations as tokens that fit into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from recipe.inference import bounds, turns
from recipe.inference.bounds import Bound
from recipe.inference.generation import options
from recipe.inference.generation.options import CUT, GenerationSettings
from recipe.inference.loaded_model import LoadedModel
from recipe.inference.payloads import (
    BadRequest,
    Request,
    TokenIds,
    a_text,
    check_ids,
    is_conversation,
)
from recipe.inference.saved.weights import embeddings_of
from recipe.tokenization.encoding import ending

_MESSAGE_BYTES = 32
"""What a message costs beside its content."""


class TooLong(BadRequest):
    """A prompt and what is to be generated after it have more tokens than the model has positions;
    or the prompt has by itself."""

    code = "context_length_exceeded"


class NoTemplate(BadRequest):
    """The model's tokenizer knows no form for a conversation."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a request, ready for the model to continue."""

    owner: Request
    place: int
    ids: list[int]
    settings: GenerationSettings
    new: int
    """The most tokens to generate."""

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return not isinstance(self.owner.texts[self.place], (str, TokenIds))

    @property
    def goes_on(self) -> bool:
        """Whether what is written goes on with a text, and is not an answer to it."""
        source = self.owner.texts[self.place]
        is_text = isinstance(source, (str, TokenIds))
        return bool(source) if is_text else _continues(self.owner, source)


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of requests."""

    loaded: LoadedModel
    stop: tuple[str, ...] = ()
    """What ends every text, by the model's own settings."""

    @property
    def has_template(self) -> bool:
        """Whether conversations can be answered."""
        return bool(self.loaded.tokenizer.chat_template)

    def of(self, request: Request) -> list[Prompt]:
        """The request's prompts, which are made once and kept with it."""
        if request.prepared is None:
            settings = request.settings
            if settings is None:
                settings = options.settings_of(request.parameters)
            if request.streams and request.settings is None:
                if len(request.texts) != 1:
                    raise BadRequest(f"{len(request.texts)} texts cannot be streamed. Send one.")
                if settings.sequences > 1:
                    raise BadRequest(
                        "Only one text can be streamed, and num_return_sequences is more."
                    )
            if self.stop:
                if settings.num_beams > 1:
                    raise BadRequest(
                        "The model's generation_config.json has stop_strings, which do not go with"
                        " num_beams."
                    )
                settings = replace(settings, stop=(*settings.stop, *self.stop))
            if settings.num_beams > 1 and request.streams:
                raise BadRequest(
                    "Beams are known when all is written: num_beams cannot be streamed."
                )
            size = embeddings_of(self.loaded.model)
            if unknown := [token for token, _ in settings.logit_bias if token >= size]:
                raise BadRequest(f"logit_bias names {unknown}, and the model has {size} tokens.")
            request.read(a_prompt, self.loaded.columns)
            cut: list[int] = []
            count, rows = len(request.texts), max(settings.sequences, settings.num_beams)
            bounds.hold(Bound.ROWS, count)
            read, written = 0, count * rows * (settings.max_new_tokens or 1)
            reason = f"{count:,} prompts x {rows:,} texts or beams x the new tokens of each"
            bounds.hold(Bound.WRITTEN, written, reason)
            prepared: list[Prompt] = []
            written = 0
            for place in range(count):
                prepared.append(self._prompt(request, place, settings, cut))
                read += len(prepared[-1].ids)
                written += rows * prepared[-1].new
                bounds.hold(Bound.READ, read)
                bounds.hold(Bound.WRITTEN, written, reason)
                turns.pause()
            request.prepared = prepared
            request.token_ids = [prompt.ids for prompt in request.prepared]
            request.truncated = cut
        prompts: list[Prompt] = request.prepared
        return prompts

    def _prompt(
        self, request: Request, place: int, settings: GenerationSettings, cut: list[int]
    ) -> Prompt:
        """A request's prompt in tokens, the text of a conversation made by the chat template; its
        place is added to `cut` if it is too long as a whole.

        Raises:
            BadRequest: It cannot be made, or does not fit.
        """
        tokenizer: Any = self.loaded.tokenizer
        source = request.texts[place]
        if isinstance(source, TokenIds):
            ids = list(check_ids(source, embeddings_of(self.loaded.model)))
            kept, new = self._fit(len(ids), settings, is_whole=True)
            if kept < len(ids):
                cut.append(place)
            return Prompt(request, place, ids[-kept:], settings, new)
        specials = isinstance(source, str)
        if not specials:
            if not self.has_template:
                raise NoTemplate(
                    "The model's tokenizer has no chat template, so that it cannot be told who says"
                    " what. Send a prompt, or save a chat template with the model."
                )
            source = self._templated(source, continues=_continues(request, source))
        # Of megabytes only the end can count.
        tail = ending(tokenizer, source, self.loaded.max_length, Bound.TEXT.most)
        bounds.hold_text(tail)
        ids = tokenizer(tail, add_special_tokens=specials, verbose=False)["input_ids"]
        if not ids:
            if tokenizer.bos_token_id is None:
                raise BadRequest("A prompt is empty, and the model has no token to begin with.")
            ids = [tokenizer.bos_token_id]
        kept, new = self._fit(len(ids), settings, is_whole=tail is source)
        if kept < len(ids):
            cut.append(place)
            limits = {"truncation": True, "max_length": kept, "add_special_tokens": specials}
            ids = tokenizer(tail, verbose=False, **limits)["input_ids"]
        return Prompt(request, place, ids, settings, new)

    def _templated(self, messages: Sequence[dict[str, Any]], *, continues: bool) -> str:
        """The text that the chat template makes of a conversation.

        Raises:
            BadRequest: It refuses the messages, or leaves out what one of them says.
        """

        sizes = [bounds.size_of(message["content"]) + _MESSAGE_BYTES for message in messages]
        bounds.hold(Bound.TEXT, sum(sizes), f"a conversation of {len(messages):,} messages")

        def text_of(said: Sequence[dict[str, Any]]) -> str:
            return str(
                self.loaded.tokenizer.apply_chat_template(
                    [dict(message) for message in said], tokenize=False,
                    add_generation_prompt=not continues, continue_final_message=continues,
                )
            )  # fmt: skip

        try:
            text = text_of(messages)
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"The model's chat template refuses the messages: {error}") from error

        def is_read(place: int, **otherwise: str) -> bool:
            """Whether the template looks at a part of a message: it makes another text of it if
            that part is another one."""
            other = [*messages[:place], {**messages[place], **otherwise}, *messages[place + 1 :]]
            try:
                return text_of(other) != text
            except (TemplateError, TypeError, ValueError):
                return True

        for place, message in enumerate(messages):
            turns.pause()
            if "name" in message and not is_read(place, name=f"{message['name']}-"):
                raise BadRequest(
                    f"The model's chat template leaves out the name of messages[{place}]: the model"
                    " would not read it. Leave it out, or say it in the content.",
                    f"messages[{place}]",
                )
            if message["content"].strip() not in text and not is_read(place, content="-"):
                raise BadRequest(
                    f"The model's chat template leaves out messages[{place}], of role"
                    f" {message['role']!r}: the model would not read it. Leave it out, or say it in"
                    " a message of a role that the template knows."
                )
        return text

    def _fit(self, length: int, settings: GenerationSettings, *, is_whole: bool) -> tuple[int, int]:
        """How many tokens of a prompt are kept, counted from its end, and how many may follow.

        What is to follow never takes more than half of the positions from a prompt.
        """
        limit = self.loaded.max_length
        if settings.truncate is not None:
            length, is_whole = min(length, settings.truncate), True
        new_tokens = settings.max_new_tokens
        if new_tokens is None and settings.max_length is not None:
            new_tokens = settings.max_length - length
            if new_tokens < 1 and length < limit:
                raise TooLong(
                    f"max_length is {settings.max_length}, and the prompt has {length} tokens"
                    " already. Give max_new_tokens instead."
                )
        cuts = settings.long_prompts == CUT
        least = min(options.DEFAULT_NEW_TOKENS, limit // 2) if cuts else 1
        new = new_tokens
        if new is None:
            new = min(settings.default_new_tokens, max(limit - length, least))
        if length + new <= limit:
            return length, max(new, 1)
        if not cuts or new > limit // 2:
            more = "" if is_whole else "more than "
            room = f"at most {limit - length} can follow" if length < limit else "none can follow"
            wish = "" if new_tokens is None else f" {new} are to follow,"
            raise TooLong(
                f"The prompt has {more}{length} tokens,{wish} and the model has {limit}"
                f" positions: {room}. Shorten the prompt or ask for less."
            )
        return limit - max(new, 1), max(new, 1)


def _continues(request: Request, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the assistant's last message is gone on with: as pipelines do, and OpenAI's API does
    not."""
    return request.form is None and messages[-1]["role"] == "assistant"


def a_prompt(value: Any) -> Any:
    """A text, or a conversation: a list of `{"role", "content"}`, its contents made texts.

    Raises:
        BadRequest: It is neither.
    """
    if isinstance(value, TokenIds):
        return value
    if not is_conversation(value):
        return a_text(value)
    messages = []
    for message in value:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [
            part.get("text")
            for part in parts
            if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise BadRequest(
                "The content of a message must be a text, or a list of"
                ' {"type": "text", "text": "..."}: this model reads neither images nor sounds.'
            )
        messages.append({**message, "content": "\n".join(map(str, texts))})
    return messages
