"""Conversations to token ids by a chat template, and which of them the assistant says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipe.console import say
from recipe.data.kinds.preferences import alike

SIMPLE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""The template where a tokenizer has none: a line with the role, then what is said; the
assistant's turns end with the end token."""
_MARKS = re.compile(r"{%-?\s*generation\b")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A conversation in tokens."""

    ids: list[int]
    learned: list[bool]
    """For each token whether it is the assistant's."""
    is_guessed: bool = False
    """Whether the template does not tell whose the tokens are; all are learned then."""


def see_to_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give `tokenizer` a simple chat template, which is saved with it, where it has none."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE
        say("chat template: a simple one (`role:`, what is said), as the tokenizer has none")


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], first: int = 0
) -> Conversation:
    """A conversation as its chat template writes it; the assistant's turns are learned.

    Whose a token is, the template's own generation marks tell; without them, a turn is what is
    added to the prompt that the template makes for it. A turn that the template writes otherwise
    once others follow (without its thoughts, say) is not learned; where that leaves none, all is.

    Args:
        first: The number of the first turn that may be learned; those before it are its prompt.

    Raises:
        jinja2.TemplateError: the template refuses these messages.
    """
    marked: Any = tokenizer
    if _MARKS.search(str(tokenizer.chat_template)):
        encoded = marked.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True
        )
        learned = [bool(mark) for mark in encoded["assistant_masks"]]
        if first:
            prompt = marked.apply_chat_template(
                list(messages[:first]), return_dict=True, add_generation_prompt=True
            )
            before = alike(encoded["input_ids"], prompt["input_ids"])
            learned[:before] = [False] * before
        return Conversation(encoded["input_ids"], learned)
    parts = _parts(tokenizer, messages, first)
    has_answer = any(message["role"] == "assistant" for message in messages)
    is_guessed = has_answer and not any(learned for _, learned in parts)
    ids: list[int] = []
    learned = []
    for text, is_learned in parts:
        # Apart, as a prompt is encoded that is to be answered.
        added = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids += added
        learned += [is_learned or is_guessed] * len(added)
    return Conversation(ids, learned, is_guessed)


def _parts(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], first: int
) -> list[tuple[str, bool]]:
    """The conversation's text in pieces, and whether each is the assistant's."""
    whole = _written(tokenizer, messages)
    parts = []
    done = 0
    for number, message in enumerate(messages):
        # Before the first turn there is no prompt, and transformers refuses to write one.
        if message["role"] != "assistant" or number < max(1, first):
            continue
        try:
            prompt = _written(tokenizer, messages[:number], add_generation_prompt=True)
            answered = _written(tokenizer, messages[: number + 1])
        except TemplateError:
            continue  # no prompt comes before this turn
        if done <= len(prompt) and answered.startswith(prompt) and whole.startswith(answered):
            parts += [
                (whole[done : len(prompt)], False),
                (whole[len(prompt) : len(answered)], True),
            ]
            done = len(answered)
    return [*parts, (whole[done:], False)]


def _written(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
) -> str:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return str(text)
