"""Conversations as public data has them (OpenAI's messages, ShareGPT's) to messages of a role and a
text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recipe.data.columns import SCRIPT
from recipe.data.files.part import Part
from recipe.errors import DataError, listed

EXAMPLE = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
_SHAREGPT: Mapping[str, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""What ShareGPT's `from` says, and the role that it is."""
_ROLES: Mapping[str, str] = {
    **{name: name for name in ("developer", "function", "ipython", "context", "document")},
    **_SHAREGPT,
}
Message = dict[str, Any]


def conversation(part: Part, row: int, value: Any, column: str) -> str:
    """A conversation as JSON, without the keys that a message does not use.

    Raises:
        DataError: it is none, or a message has no text or a role that is not known.
    """
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        messages = None
    is_one = isinstance(messages, list) and messages
    if not is_one or not all(isinstance(message, dict) for message in messages):
        raise DataError(
            f"{part.where(row)} has no conversation in column {column!r}, but "
            f"{json.dumps(value, default=str)[:80]}.",
            f"Write it as {EXAMPLE}.",
        )
    where = f"{part.where(row)}, column {column!r}, message"
    return json.dumps([_turn(f"{where} {at}", each) for at, each in enumerate(messages)])


def _turn(where: str, message: Message) -> Message:
    is_sharegpt = message.get("role") is None and message.get("from") is not None
    keys, roles = (("from", "value"), _SHAREGPT) if is_sharegpt else (("role", "content"), _ROLES)
    said, content = (message.get(key) for key in keys)
    role = roles.get(said) if isinstance(said, str) else None
    if role is None:
        what = f"no {keys[0]!r}" if said is None else f"the {keys[0]} {said!r}, which is not known"
        raise DataError(
            f"{where} (from 0) has {what}.",
            f"Write each as in {EXAMPLE}; known are {listed(list(roles))}.",
        )
    others = {key: each for key, each in message.items() if key not in keys and each is not None}
    return {"role": role, "content": _text(f"{where} ({said}, from 0)", keys[1], content), **others}


def _text(where: str, key: str, content: Any) -> str:
    """What is said: a text, or OpenAI's parts of text put together as they stand."""
    if isinstance(content, str):
        return content
    if content is None:
        raise DataError(
            f"{where} has no {key} (null), as the call of a tool has none.",
            "Write what is said as a text, or remove the row.",
        )
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = kind if kind not in (None, "text") else json.dumps(part, default=str)[:60]
            raise DataError(
                f"{where} has a part that is no text in its {key}: {shown}.",
                SCRIPT if kind not in (None, "text") else f"Write each as in {EXAMPLE}.",
            )
        texts.append(part["text"])
    return "".join(texts)
