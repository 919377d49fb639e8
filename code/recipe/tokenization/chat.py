"""Tokenise conversations by a chat template, and mark the assistant's tokens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipe.console import say
from recipe.data.conversations import LEARNING_KEYS
from recipe.errors import RowError
from recipe.spec import CONTEXT, PARTS_OF_SAMPLES
from recipe.tokenization.encoding import Encoder

SIMPLE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""The template of tokenizers without one: a line with the role, then the content. The assistant's
turns end with the end token."""
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
    """Add a simple chat template to a tokenizer without one; it is saved with the tokenizer."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE
        say("chat template: a simple one (`role:`, then the content), since the tokenizer has none")


@dataclass(frozen=True)
class Written:
    """A conversation rendered by its chat template, in pieces that are encoded separately, as a
    prompt is in serving."""

    parts: list[tuple[str, bool]]
    """Each piece, and whether it is learned."""
    is_guessed: bool


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
            "Correct the row or remove it.",
        ) from error


def write(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
) -> list[Written | Conversation]:
    """Return a conversation as its chat template writes it; the assistant's turns are learned.

    The template's generation marks decide which tokens are learned; without them, a turn is the
    text that follows the prompt rendered before it. A turn is learned as the template writes it
    when it is the last one. If the template rewrites it once others follow (without its thoughts,
    for example), the later turns are in a separate document. If no turn follows its prompt, all
    tokens are learned. A turn of weight 0, as in OpenAI's fine-tuning, or with train False is not
    learned.

    Args:
        tools: The tools that the assistant may call.

    Raises:
        jinja2.TemplateError: The template refuses these messages, or ignores tools or their calls.
    """
    render: Any = tokenizer.apply_chat_template
    if tools:
        render = functools.partial(render, tools=list(tools))
    chains = _chains(render, messages)
    is_whole = bool(chains) and chains[-1].last == len(messages) - 1
    text = chains[-1].text if is_whole else _written(render, messages)
    if tools and _written(tokenizer.apply_chat_template, messages) == text:
        raise TemplateError("it ignores tools")
    _check_all_read(render, messages, text)
    is_muted = any(map(_is_muted, messages))
    if not is_muted and _MARKS.search(str(tokenizer.chat_template)):
        spans = [(chain.first, chain.last + 1) for chain in chains]
        # One chain is all of the conversation, in which the marks may also show other turns.
        spans = spans if len(spans) > 1 else [(0, len(messages))]
        marked: list[Written | Conversation] = []
        for start, end in spans:
            encoded = render(
                list(messages[:end]), return_dict=True, return_assistant_tokens_mask=True
            )
            learned = [bool(mark) for mark in encoded["assistant_masks"]]
            if start:
                turns = list(messages[:start])
                prompt = render(turns, return_dict=True, add_generation_prompt=True)
                both = zip(encoded["input_ids"], prompt["input_ids"], strict=False)
                before = sum(1 for _ in itertools.takewhile(lambda ids: ids[0] == ids[1], both))
                learned[:before] = [False] * before
            marked.append(Conversation(encoded["input_ids"], learned))
        return marked
    if chains:
        return [Written(chain.parts, is_guessed=False) for chain in chains]
    has_answer = any(turn["role"] == "assistant" and not _is_muted(turn) for turn in messages)
    if has_answer and is_muted:
        raise TemplateError(
            "it does not mark the assistant's tokens, and some turns are not to be learned "
            "(weight 0, train False)"
        )
    return [Written([(text, has_answer)], has_answer)]


def turns_to_learn(messages: Sequence[Message]) -> int:
    """Count the assistant's turns without those that are marked as not to be learned."""
    return sum(turn["role"] == "assistant" and not _is_muted(turn) for turn in messages)


def _check_all_read(render: Any, messages: Sequence[Message], text: str) -> None:
    """Raise TemplateError if the template ignores a call, thoughts or a whole turn, on which the
    learned answers depend.

    Args:
        text: The conversation as the template writes it.
    """
    keys = dict.fromkeys(key for turn in messages for key in turn if key != "role")
    for key in filter(lambda key: PARTS_OF_SAMPLES.get(key) == CONTEXT, keys):
        without = [{name: turn[name] for name in turn if name != key} for turn in messages]
        if _written(render, without) == text:
            raise TemplateError(f"it ignores {key}")
    for number, turn in enumerate(messages):
        if turn["role"] == "assistant" or turn["content"].strip() in text:
            continue
        try:
            is_ignored = _written(render, [*messages[:number], *messages[number + 1 :]]) == text
        except (TemplateError, IndexError):  # the rest is not a conversation
            is_ignored = False
        if is_ignored:
            raise TemplateError(f"it ignores message {number} (from 0) of the role {turn['role']}")


def encode_conversations(
    encoder: Encoder, talks: Sequence[Written | Conversation]
) -> list[Conversation]:
    """Return tokenized conversations; all pieces are encoded together, on all cores.

    The token that ends a turn is learned even if the template's marks exclude it. If the last turn
    has none, the tokenizer's end token is added.

    Args:
        encoder: The encoder of the tokenizer that rendered them, without special tokens.
    """
    pieces = [text for talk in talks if isinstance(talk, Written) for text, _ in talk.parts]
    rows = iter(encoder.rows(pieces)[0] if pieces else [])
    ends = EndTokens(encoder.tokenizer)
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
        encoded.append(ends.closed(talk))
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

    def closed(self, talk: Conversation) -> Conversation:
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
            return Conversation(ids, marks, talk.is_guessed)
        return Conversation([*ids[: last + 1], end], [*marks[: last + 1], True], talk.is_guessed)


@dataclass
class _Chain:
    """Consecutive turns of the assistant that later prompts repeat unchanged."""

    first: int
    last: int
    """The numbers of its first and last learned message."""
    text: str
    parts: list[tuple[str, bool]]


def _chains(render: Any, messages: Sequence[Message]) -> list[_Chain]:
    """Return the assistant's turns that begin with the prompt rendered before them."""
    chains: list[_Chain] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            answered = _written(render, messages[: number + 1])
            # transformers renders no prompt for an empty conversation: use the text before the
            # first turn.
            content = message["content"] or answered
            prompt = (
                answered.partition(content)[0]
                if number == 0
                else _written(render, messages[:number], add_generation_prompt=True)
            )
        except TemplateError:
            _written(render, messages)  # refuses the whole conversation, or only this prompt
            continue
        if not answered.startswith(prompt):
            continue
        if not chains or not prompt.startswith(chains[-1].text):
            chains.append(_Chain(number, number, "", []))
        chain = chains[-1]
        chain.parts += [
            (prompt[len(chain.text) :], False),
            (answered[len(prompt) :], not _is_muted(message)),
        ]
        chain.last, chain.text = number, answered
    return chains


def _is_muted(message: Message) -> bool:
    return 0 in map(message.get, LEARNING_KEYS)


def _written(render: Any, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    return str(render(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt))
