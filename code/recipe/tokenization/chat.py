"""Tokenize conversations by a chat template, and mark the assistant's tokens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipe.errors import RowError
from recipe.tokenization.chat_template import Message, Template, is_context, is_muted
from recipe.tokenization.encoding import Encoder

THOUGHT_TAGS = re.compile(r"</?think>|\[/?THINK\]")
"""What separates thoughts from the rest of a content; templates may write them otherwise."""
_WORDS = re.compile(r"\w+")
_SHOWN = 60


@dataclass(frozen=True)
class TokenizedConversation:
    """A conversation in tokens."""

    ids: list[int]
    learned: list[bool]
    """Whether each token is the assistant's."""


@dataclass
class Written:
    """A conversation rendered by its chat template, in pieces that are encoded separately, as a
    prompt is in serving."""

    parts: list[tuple[str, bool]] = field(default_factory=list)
    """Each piece, and whether it is learned."""
    text: str = ""
    """All pieces."""
    opened_thoughts: int = 0
    """The learned turns that lack the end of the prompt that serving writes for them."""

    def add(self, text: str, spans: Sequence[tuple[int, int]]) -> None:
        """Append what a longer text adds; the characters of some spans are learned."""
        end = len(self.text)
        for first, last in spans:
            self.parts += [(text[end:first], False), (text[first:last], True)]
            end = last
        self.parts.append((text[end:], False))
        self.parts = [part for part in self.parts if part[0]]
        self.text = text


@contextlib.contextmanager
def row_named(row: int) -> Iterator[None]:
    """Add the row's number to errors of the chat template.

    Raises:
        RowError: The template refuses the row.
    """
    try:
        yield
    except TemplateError as error:
        raise RowError(
            row,
            f"The tokenizer's chat template refuses the conversation of {{row}}: {error}",
            "Correct the row or remove it, or give a model whose chat template takes it.",
        ) from error


def write(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    is_all_learned: bool = False,
) -> list[Written]:
    """Return a conversation as its chat template writes it; the assistant's turns are learned.

    A turn is the text that follows the prompt rendered before it, or what the template's generation
    marks cover of this. A turn is learned as the template writes it when it is the last one. If the
    template rewrites it once others follow (without its thoughts, for example), the later turns are
    in a separate document. If the generation prompt begins what the turn does not have, such as a
    thought, the turn is what follows the messages before it. A turn of weight 0, as in OpenAI's
    fine-tuning, or with train False is not learned.

    Args:
        tools: The tools that the assistant may call.
        is_all_learned: Whether the other messages are learned, too.

    Raises:
        jinja2.TemplateError: The template refuses these messages, ignores tools or a part of a
            message, or drops what a learned turn consists of.
    """
    template = Template(tokenizer, tools)
    messages, whole = template.readable(messages)
    if tools and not Template(tokenizer).changes(messages, whole):
        raise TemplateError("it ignores tools")
    if is_all_learned:
        for number, message in enumerate(messages):
            _check_learned(number, message, whole)
        template.check_all_read(messages, whole, whole)
        return [Written([(whole, True)], whole)]
    documents: list[Written] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or is_muted(message):
            continue
        turns = messages[: number + 1]
        rendered = whole if turns == messages else template.render(turns)
        text, start, is_opened = template.document(turns, rendered)
        if not documents or not text[:start].startswith(documents[-1].text):
            documents.append(Written())
        spans = [(start, len(text))]
        if template.has_marks:
            moved = len(text) - len(rendered)
            spans = [
                (max(start, first + moved), last + moved)
                for first, last in template.marks(turns)
                if last + moved > start
            ]
        _check_learned(number, message, "".join(text[first:last] for first, last in spans))
        documents[-1].add(text, spans)
        documents[-1].opened_thoughts += is_opened
    template.check_all_read(messages, whole, "".join(written.text for written in documents))
    return documents or [Written([(whole, False)], whole)]


def turns_to_learn(messages: Sequence[Message]) -> int:
    """Count the assistant's turns without those that are marked as not to be learned."""
    return sum(turn["role"] == "assistant" and not is_muted(turn) for turn in messages)


def _check_learned(number: int, message: Message, learned: str) -> None:
    """Raise TemplateError if the learned text lacks a part of a learned turn: of its content, its
    thoughts or its calls."""
    if message["role"] != "assistant" or is_muted(message):
        return
    content = message["content"].strip()
    parts = [("content", text) for text in THOUGHT_TAGS.split(content) if content not in learned]
    parts += [
        (key, value) for key, value in message.items()
        if is_context(key) and isinstance(value, str)
    ]  # fmt: skip
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        # Templates escape these in several ways: words are compared.
        words = _WORDS.findall(" ".join(_texts(arguments)))
        parts += [("tool_calls", text) for text in (call["function"]["name"], *words)]
    for key, value in parts:
        text = value.strip()
        if text not in learned and json.dumps(text)[1:-1] not in learned:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            raise TemplateError(
                f"it drops {shown!r} of the {key} of message {number} (from 0), which the "
                "assistant would learn"
            )


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _texts(item)


def encode_conversations(encoder: Encoder, talks: Sequence[Written]) -> list[TokenizedConversation]:
    """Return tokenized conversations; all pieces are encoded together, on all cores.

    The token that ends a turn is learned even if the template's marks exclude it. If the last turn
    has none, the tokenizer's end token is added.

    Args:
        encoder: The encoder of the tokenizer that rendered them, without special tokens.
    """
    pieces = [text for talk in talks for text, _ in talk.parts]
    rows = iter(encoder.rows(pieces)[0] if pieces else [])
    ends = EndTokens(encoder.tokenizer)
    encoded = []
    for talk in talks:
        ids: list[int] = []
        learned: list[bool] = []
        its_rows = itertools.islice(rows, len(talk.parts))
        for (_, is_learned), added in zip(talk.parts, its_rows, strict=True):
            ids += added
            learned += [is_learned] * len(added)
        encoded.append(ends.closed(TokenizedConversation(ids, learned)))
    return encoded


class EndTokens:
    """The tokens that can end an answer: the end token, and special tokens of a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {number for number, token in added.items() if token.special}
        self._special -= {tokenizer.unk_token_id, tokenizer.mask_token_id}
        if tokenizer.eos_token_id is not None:
            self._special.add(tokenizer.eos_token_id)
        self._is_blank = functools.lru_cache(maxsize=None)(
            lambda token: not str(tokenizer.decode([token])).strip()
        )

    def end_token(self, ids: Sequence[int]) -> int | None:
        """Return the token that ends an answer, maybe before white space, or None."""
        for token in reversed(ids[-3:]):
            if token in self._special:
                return int(token)
            if not self._is_blank(token):
                return None
        return None

    def closed(self, talk: TokenizedConversation) -> TokenizedConversation:
        """Return a conversation in which the end of each turn is learned, and the last turn has
        one."""
        ids, learned = talk.ids, np.array(talk.learned, bool)
        if not learned.any():
            return talk
        for after in np.flatnonzero(learned[:-1] & ~learned[1:]) + 1:
            has_end = self.end_token(ids[max(0, after - 3) : after]) is not None
            learned[after] = ids[after] in self._special and not has_end
        last = int(np.flatnonzero(learned)[-1])
        marks = learned.tolist()
        end = self._tokenizer.eos_token_id
        if end is None or self.end_token(ids[max(0, last - 2) : last + 1]) is not None:
            return TokenizedConversation(ids, marks)
        return TokenizedConversation([*ids[: last + 1], end], [*marks[: last + 1], True])
