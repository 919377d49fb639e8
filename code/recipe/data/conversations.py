"""Convert conversations of public data (OpenAI's messages, ShareGPT's, Capybara's) to messages of a
role and a text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from recipe.data.column_settings import NOTHING
from recipe.data.columns import SCRIPT
from recipe.data.files.part import Part
from recipe.errors import DataError, join_names
from recipe.spec import LEARNED_PARTS, PARTS_OF_SAMPLES

EXAMPLE = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
_SHAREGPT: Mapping[str, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""ShareGPT's values of `from`, and their roles."""
_ROLES: Mapping[str, str] = {
    **{name: name for name in ("developer", "function", "ipython", "context", "document")},
    **_SHAREGPT,
}
_EXCHANGE = {"input": "user", "output": "assistant"}
_PARTS = ("reasoning", "text", "tool_call")
"""LLaMA-Factory's types of parts, in the order in which chat templates write them."""
LEARNING_KEYS = ("train", "weight")
"""Keys of an assistant's turn that are false or 0 if it is not learned."""
Message = dict[str, Any]


def read_conversation(
    part: Part,
    row: int,
    value: Any,
    column: str,
    tools: Any = None,
    system: Any = None,
    muted: int = 0,
) -> str:
    """Return a conversation as JSON, without the keys that a message does not use.

    Args:
        value: A list of messages, or its JSON.
        tools: The tools that the assistant may call: a list, or its JSON. With tools the JSON is an
            object of `messages` and `tools`, without them the list of messages.
        system: The content of a first message of the system.
        muted: The first messages from which nothing is learned.

    Raises:
        DataError: The value is not a conversation, a message has no text or an unknown role, or
            tools or their calls cannot be read.
    """
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        messages = None
    is_list = isinstance(messages, list) and bool(messages)
    if not is_list or not all(isinstance(item, dict) for item in messages):
        raise DataError(
            f"{part.where(row)} has no conversation in column {column!r}, but "
            f"{json.dumps(value, default=str)[:80]}.",
            f"Write it as {EXAMPLE}.",
        )
    messages = [turn for item in messages for turn in _exchange(item)]
    where = f"{part.where(row)}, column {column!r}, message"
    turns = [_turn(f"{where} {index}", message) for index, message in enumerate(messages)]
    for turn in turns[:muted]:
        if turn["role"] == "assistant":
            turn["train"] = False
    if system not in NOTHING:
        first = _turn(f"{part.where(row)}, system", {"role": "system", "content": system})
        if turns[0]["role"] == "system" and turns[0] != first:
            raise DataError(
                f"{part.where(row)} has two system prompts: {first['content'][:60]!r} and "
                f"{turns[0]['content'][:60]!r}.",
                "Keep one of them.",
            )
        turns = [first, *turns[turns[0]["role"] == "system" :]]
    tools = _objects(f"{part.where(row)}, tools", tools) if tools not in (None, "", []) else []
    return json.dumps({"messages": turns, "tools": tools} if tools else turns)


def _exchange(item: Message) -> list[Message]:
    """Return an exchange `{"input", "output"}`, as in Capybara, as two messages; others as they
    are."""
    if {key for key, value in item.items() if value is not None} != {*_EXCHANGE}:
        return [item]
    return [{"role": role, "content": item[key]} for key, role in _EXCHANGE.items()]


def _turn(where: str, message: Message) -> Message:
    message = _as_openais(where, message)
    is_sharegpt = message.get("role") is None and message.get("from") is not None
    keys, roles = (("from", "value"), _SHAREGPT) if is_sharegpt else (("role", "content"), _ROLES)
    speaker, content = (message.get(key) for key in keys)
    role = roles.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        what = (
            f"no {keys[0]!r}"
            if speaker is None
            else f"the {keys[0]} {speaker!r}, which is not known"
        )
        raise DataError(
            f"{where} (from 0) has {what}.",
            f"Write each as in {EXAMPLE}; known are {join_names(list(roles))}.",
        )
    others = {key: other for key, other in message.items() if key not in keys and other is not None}
    where = f"{where} ({speaker}, from 0)"
    for key, value in others.items():
        if PARTS_OF_SAMPLES.get(key) != LEARNED_PARTS or value in NOTHING:
            continue
        is_read = key in LEARNING_KEYS and value in (0, 1)
        if not is_read or (value and role != "assistant"):
            raise DataError(
                f"{where} marks what is learned by {key}={json.dumps(value, default=str)}, which "
                "is not supported.",
                'Give "train": false in turns of the assistant that are not learned, and split one '
                f"that is learned in part. Remove {key!r} from the others.",
            )
    if role == "assistant" and (calls := others.get("tool_calls")):
        # Chat templates read arguments as objects.
        others["tool_calls"] = []
        for call in _objects(where, calls):
            function = call.get("function")
            given = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(given, str):
                with contextlib.suppress(ValueError, RecursionError):
                    given = json.loads(given)
            if not isinstance(function, dict) or not isinstance(given, dict):
                shown = json.dumps(call, default=str)[:80]
                raise DataError(
                    f"{where} has a tool call that cannot be read: {shown}.",
                    'Write each as {"type": "function", "function": {"name": "...", "arguments": '
                    "{...}}}.",
                )
            called = {"type": "function", **call, "function": {**function, "arguments": given}}
            others["tool_calls"].append(called)
        content = "" if content is None else content
    if content is None:
        raise DataError(
            f"{where} has no {keys[1]} (null), and calls no tool.",
            "Write the content as a text, or remove the row.",
        )
    texts = [content] if isinstance(content, str) else []
    for part in content if isinstance(content, list) else [content] * (not texts):
        # OpenAI's text parts are joined unchanged; Bedrock's and Gemini's have no type.
        kind = part.get("type") if isinstance(part, dict) else None
        is_bedrocks = isinstance(part, dict) and [
            key for key, value in part.items() if value is not None
        ] == ["text"]
        if not (kind == "text" or is_bedrocks) or not isinstance(part.get("text"), str):
            shown = kind if kind not in (None, "text") else json.dumps(part, default=str)[:60]
            raise DataError(
                f"{where} has a part that is not a text in its {keys[1]}: {shown}.",
                SCRIPT if kind not in (None, "text") else f"Write each as in {EXAMPLE}.",
            )
        texts.append(part["text"])
    return {"role": role, "content": "".join(texts), **others}


def _as_openais(where: str, message: Message) -> Message:
    """Return a message as OpenAI's API has it, if its calls of tools or its parts are those of
    ShareGPT, Gemini or LLaMA-Factory."""
    if message.get("from") == "function_call" and message.get("role") is None:
        calls = _called(f"{where} (function_call, from 0)", [message.get("value")])
        return {**message, "from": None, "value": None, "role": "assistant", "tool_calls": calls}
    content = message.get("content")
    if content is None and message.get("parts") is not None:
        return {**message, "parts": None, "content": message["parts"]}
    parts = content if isinstance(content, list) else []
    if not parts or any(not isinstance(p, dict) or {*p} != {"type", "value"} for p in parts):
        return message
    held = {kind: [p["value"] for p in parts if p["type"] == kind] for kind in _PARTS}
    kinds = [kind for kind, some in held.items() for _ in some]
    if kinds != [isinstance(part["value"], str) and part["type"] for part in parts]:
        return message
    texts = [{"type": "text", "text": text} for text in held["text"]] or ""
    more = {"reasoning_content": "".join(held["reasoning"])} if held["reasoning"] else {}
    more |= {"tool_calls": _called(where, held["tool_call"])} if held["tool_call"] else {}
    if any(message.get(key) not in NOTHING for key in more):
        return message
    return {**message, "content": texts, **more}


def _called(where: str, values: Sequence[Any]) -> str:
    """Return calls, each the JSON of a name and arguments or of a list of these, as the JSON of
    `tool_calls`."""
    calls: list[Any] = []
    for value in values:
        read = None
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            read = json.loads(value)
        calls += read if isinstance(read, list) and read else [read]
    if not all(isinstance(one, dict) and {*one} == {"name", "arguments"} for one in calls):
        raise DataError(
            f"{where} has a tool call that cannot be read: {json.dumps(values, default=str)[:80]}.",
            'Write it as the JSON of a name and arguments: {"name": "...", "arguments": {...}}.',
        )
    return json.dumps([{"type": "function", "function": call} for call in calls])


def _objects(where: str, value: Any) -> list[dict[str, Any]]:
    """Return tools, or calls of tools: a list of objects, or its JSON."""
    is_text = isinstance(value, str)
    try:
        objects = json.loads(value) if is_text else value
    except (ValueError, RecursionError):
        objects = None
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise DataError(
            f"{where}: {json.dumps(value, default=str)[:80]} is not a list of objects.",
            "Write tools and tool_calls as lists of objects, as OpenAI's API has them.",
        )
    if not is_text and _has_null(objects):
        raise DataError(
            f"{where}: tools or arguments have null values, which also stand for keys that only"
            " other rows have.",
            "Write the column of tools, and each call's arguments, as a text of JSON.",
        )
    return objects


def _has_null(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, parts))
