"""Render conversations by a tokenizer's chat template, as training and serving see them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from recipe.console import say
from recipe.data.conversations import LEARNING_KEYS
from recipe.errors import HyperparameterError
from recipe.spec import CONTEXT, PARTS_OF_SAMPLES

SIMPLE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""The template of tokenizers without one: a line with the role, then the content. The assistant's
turns end with the end token."""
_MARKS = re.compile(r"{%-?\s*generation\b")
_CONVERSATION = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that are no settings."""
Message = dict[str, Any]


def see_to_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a simple chat template to a tokenizer without one; it is saved with the tokenizer."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE
        say("chat template: a simple one (`role:`, then the content), since the tokenizer has none")


def set_variables(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any]) -> None:
    """Make values the defaults of a chat template's variables: a request may give others.

    The template itself sets them, so that whatever serves the saved model applies them.

    Raises:
        HyperparameterError: The template does not read a variable of this name.
    """
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates or ""]
    unread = [
        name for name in values
        if name in _CONVERSATION or not name.isidentifier()
        or not any(re.search(rf"\b{name}\b", text) for text in texts)
    ]  # fmt: skip
    if unread:
        raise HyperparameterError(
            f"Hyperparameter chat_template_kwargs has the keys {', '.join(unread)}, which the "
            "model's chat template does not read as settings.",
            "Leave them out, or give a model whose chat template reads them.",
        )
    head = "".join(
        f"{{% set {name} = {name} if {name} is defined else {value!r} %}}\n"
        for name, value in values.items()
    )
    tokenizer.chat_template = (
        {name: head + text for name, text in templates.items()}
        if isinstance(templates, dict)
        else head + texts[0]
    )


def is_muted(message: Message) -> bool:
    """Return whether a turn of the assistant is marked as not to be learned."""
    return 0 in map(message.get, LEARNING_KEYS)


def is_context(key: str) -> bool:
    """Return whether a key of a message is a part of what the model sees."""
    return key != "role" and PARTS_OF_SAMPLES.get(key) == CONTEXT


class Template:
    """Renders conversations by a tokenizer's chat template. All errors are TemplateErrors."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message] = ()) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools) or None
        self.has_marks = _MARKS.search(str(tokenizer.chat_template)) is not None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation."""
        render: Any = self._tokenizer.apply_chat_template
        with self._refusals():
            return str(
                render(
                    list(messages),
                    tools=self._tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )

    def marks(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Return the spans of the text that the template marks as the assistant's."""
        render: Any = render_jinja_template
        with self._refusals():
            _, spans = render(
                [list(messages)],
                tools=self._tools,
                chat_template=self._tokenizer.get_chat_template(tools=self._tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        return list(spans[0])

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def changes(self, messages: Sequence[Message], text: str) -> bool:
        """Return whether the template writes other messages than those of a text, or refuses
        them."""
        try:
            return self.render(messages) != text
        except TemplateError:
            return True

    def readable(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
        """Return messages with the arguments of calls as the template reads them, objects or JSON,
        and their text."""
        calls = [call for turn in messages for call in turn.get("tool_calls") or ()]
        values = [call["function"]["arguments"] for call in calls]
        try:
            text = self.render(messages)
        except TemplateError:
            if not calls:
                raise
        else:
            # A template that takes JSON may write an object as Python does.
            if not any(str(value) in text for value in values if str(value) != _as_json(value)):
                return messages, text
        as_json = [
            {**turn, "tool_calls": [
                {**call, "function": {
                    **call["function"], "arguments": _as_json(call["function"]["arguments"])}}
                for call in turn["tool_calls"]
            ]} if turn.get("tool_calls") else turn
            for turn in messages
        ]  # fmt: skip
        return as_json, self.render(as_json)

    def document(self, messages: Sequence[Message], text: str) -> tuple[str, int, bool]:
        """Return the prompt that serving writes before the last message, followed by this message;
        where the message begins; and whether it does not have the end of that prompt.

        Args:
            text: The messages as the template writes them.

        Raises:
            TemplateError: The messages before it are written otherwise once it follows.
        """
        earlier = messages[:-1]
        if not earlier:
            # transformers renders no prompt for an empty conversation.
            marked = self.render([{"role": "assistant", "content": "\0"}]).partition("\0")[0]
            pairs = zip(marked, text, strict=False)
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            return text, sum(1 for _ in equal), False
        prompt = self.render(earlier, add_generation_prompt=True)
        if text.startswith(prompt):
            return text, len(prompt), False
        start = self.render(earlier)
        if text.startswith(start) and earlier[-1]["content"].strip() in start:
            return text, len(start), True
        # The template may repeat neither the system's message nor earlier thoughts.
        request = [{"role": "user", "content": "-"}]
        with contextlib.suppress(TemplateError):
            start = self.render(request, add_generation_prompt=True)
            other = self.render([*request, messages[-1]])
            turn = other[len(start) :]
            if other.startswith(start) and text.endswith(turn):
                return prompt + turn, len(prompt), False
        raise TemplateError(
            f"it writes the messages before message {len(earlier)} (from 0), of the assistant, "
            "otherwise once it follows; train_on_prompt=True learns the whole text"
        )

    def check_all_read(self, messages: Sequence[Message], text: str, learned: str) -> None:
        """Raise TemplateError if the template ignores a call, thoughts or a content, on which the
        learned answers depend.

        Args:
            text: The text of the conversation.
            learned: The texts of its documents.
        """
        keys = dict.fromkeys(
            key for turn in messages for key, value in turn.items()
            # Thoughts of earlier turns are left out by design; `_check_learned` checks the others.
            if is_context(key) and not (turn["role"] == "assistant" and isinstance(value, str))
        )  # fmt: skip
        for key in keys:
            without = [{name: turn[name] for name in turn if name != key} for turn in messages]
            if not self.changes(without, text):
                raise TemplateError(f"it ignores {key}")
        for number, turn in enumerate(messages):
            if turn["role"] == "assistant" or turn["content"].strip() in learned:
                continue
            other = {**turn, "content": "-"}
            if not self.changes([*messages[:number], other, *messages[number + 1 :]], text):
                raise TemplateError(
                    f"it ignores message {number} (from 0) of the role {turn['role']}"
                )


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
