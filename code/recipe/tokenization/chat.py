"""Tokenise conversations by a chat template, and mark the assistant's tokens."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipe.console import say
from recipe.data.conversations import common_prefix
from recipe.errors import DataError
from recipe.tokenization.encoding import Encoder

SIMPLE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""The template of tokenizers without one: a line with the role, then the content. The assistant's
turns end with the end token."""
_RESTED_ON = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Parts of the assistant's turns that templates may ignore."""
_MARKS = re.compile(r"{%-?\s*generation\b")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A conversation in tokens."""

    ids: list[int]
    learned: list[bool]
    """Whether each token is the assistant's."""
    is_guessed: bool = False
    """Whether the template does not mark the assistant's tokens, so that all are learned."""


def see_to_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a chat template a simple one, which is saved with it."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE
        say("chat template: a simple one (`role:`, what is said), as the tokenizer has none")


@dataclass(frozen=True)
class Written:
    """A conversation rendered by its chat template, in pieces that are encoded separately, as a
    prompt is in serving."""

    parts: list[tuple[str, bool]]
    """Each piece, and whether it is learned."""
    is_guessed: bool


@contextlib.contextmanager
def row_named(row: int) -> Iterator[None]:
    """Name the row, from 0, if the chat template refuses it.

    Raises:
        DataError: it does.
    """
    try:
        yield
    except TemplateError as error:
        raise DataError(
            f"The tokenizer's chat template refuses the conversation of row {row} (from 0): "
            f"{error}",
            "Correct the row or remove it.",
        ) from error


def write(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    first: int = 0,
    tools: Sequence[Message] = (),
) -> Written | Conversation:
    """Return a conversation as its chat template writes it; the assistant's turns are learned.

    The template's generation marks decide which tokens are learned; without them, a turn is what is
    added to the prompt that the template makes for it. A turn that the template writes differently
    once others follow (without its thoughts, for example) is not learned; if that leaves none, all
    are. A turn of weight 0, as in OpenAI's fine-tuning, or with train False is not learned.

    Args:
        tokenizer: It has the template.
        messages: The conversation.
        first: The number of the first turn that may be learned; those before it are its prompt.
        tools: The tools that the assistant may call.

    Raises:
        jinja2.TemplateError: The template refuses these messages, or ignores tools or their calls.
    """
    marked: Any = tokenizer
    if tools:
        marked = _WithTools(tokenizer, tools)
    _check_tools(tokenizer, messages, tools)
    is_muted = any(map(_is_muted, messages))
    if not is_muted and _MARKS.search(str(tokenizer.chat_template)):
        encoded = marked.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True
        )
        learned = [bool(mark) for mark in encoded["assistant_masks"]]
        if first:
            prompt = marked.apply_chat_template(
                list(messages[:first]), return_dict=True, add_generation_prompt=True
            )
            before = common_prefix(encoded["input_ids"], prompt["input_ids"])
            learned[:before] = [False] * before
        return Conversation(encoded["input_ids"], learned)
    parts = _parts(marked, messages, first)
    has_answer = any(turn["role"] == "assistant" and not _is_muted(turn) for turn in messages)
    is_guessed = has_answer and not any(learned for _, learned in parts)
    if is_guessed and is_muted:
        raise TemplateError(
            "it does not tell whose the tokens are, and some turns are not to be learned (weight "
            "0, train False)"
        )
    return Written([(text, is_guessed or learned) for text, learned in parts], is_guessed)


@dataclass(frozen=True)
class _WithTools:
    """A tokenizer whose chat template gets tools."""

    tokenizer: Any
    tools: Sequence[Message]

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, tools=list(self.tools), **options)


def _check_tools(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message]) -> None:
    """Raise TemplateError if the template ignores tools, a call or thoughts: the answers would be
    learned without what they rest on."""
    keys = [key for key in _RESTED_ON if any(key in turn for turn in messages)]
    if not tools and not keys:
        return
    with_tools = _WithTools(tokenizer, tools) if tools else tokenizer
    text = _written(with_tools, messages)
    for key in keys:
        without = [{name: turn[name] for name in turn if name != key} for turn in messages]
        if _written(with_tools, without) == text:
            raise TemplateError(f"it ignores {key}")
    if tools and _written(tokenizer, messages) == text:
        raise TemplateError("it ignores tools")


def in_tokens(encoder: Encoder, talks: Sequence[Written | Conversation]) -> list[Conversation]:
    """Return conversations in tokens, of which all pieces are encoded together, on all cores.

    Args:
        encoder: Of the tokenizer that wrote them, without special tokens.
        talks: One at least.
    """
    pieces = [text for talk in talks if isinstance(talk, Written) for text, _ in talk.parts]
    rows = iter(encoder.rows(pieces)[0] if pieces else [])
    encoded = []
    for talk in talks:
        if isinstance(talk, Written):
            ids: list[int] = []
            learned: list[bool] = []
            its_rows = itertools.islice(rows, len(talk.parts))
            for (_, is_learned), added in zip(talk.parts, its_rows, strict=True):
                ids += added
                learned += [is_learned] * len(added)
            talk = Conversation(ids, learned, talk.is_guessed)
        encoded.append(talk)
    return encoded


def _parts(tokenizer: Any, messages: Sequence[Message], first: int) -> list[tuple[str, bool]]:
    """Return the conversation's text in pieces, and whether each is the assistant's."""
    whole = _written(tokenizer, messages)
    parts = []
    done = 0
    for number, message in enumerate(messages):
        # Before the first turn there is no prompt, and transformers refuses to write one.
        if message["role"] != "assistant" or number < max(1, first):
            continue
        is_last = number + 1 == len(messages)
        try:
            prompt = _written(tokenizer, messages[:number], add_generation_prompt=True)
            answered = whole if is_last else _written(tokenizer, messages[: number + 1])
        except TemplateError:
            continue  # no prompt comes before this turn
        if done <= len(prompt) and answered.startswith(prompt) and whole.startswith(answered):
            parts += [
                (whole[done : len(prompt)], False),
                (whole[len(prompt) : len(answered)], not _is_muted(message)),
            ]
            done = len(answered)
    return [*parts, (whole[done:], False)]


def _is_muted(message: Message) -> bool:
    return message.get("weight") == 0 or message.get("train") is False


def _written(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
) -> str:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return str(text)
