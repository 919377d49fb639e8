"""Tools in conversations: trained as the chat template writes them, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from recipe.data import language_modeling
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from recipe.task_table import TASKS
from recipe.tokenization import chat
from tests.support.causal_kit import make_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' +"
    " m['role'] + ' ' + m['content'] }}{% for call in m.tool_calls %}{{ call.function.name + ' ' +"
    " call.function.arguments | tojson }}{% endfor %}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}]


def talk(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "paint", "arguments": arguments}}
    return [
        {"role": "user", "content": "paint it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "it is red"},
    ]


def read(folder: Path, *rows: dict[str, Any]) -> list[Any]:
    """The conversations of the training channel, as they are kept."""
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for channel, lines in {"train": rows, "validation": [{"messages": plain}]}.items():
        (folder / channel).mkdir(parents=True)
        (folder / channel / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    channels = {name: folder / name for name in ("train", "validation")}
    texts = language_modeling.load(channels, Hyperparameters(), TASKS["causal-lm"])
    assert "not read" not in "\n".join(texts.notes), "of which tools are a part"
    return [json.loads(text) for text in texts.train["messages"]]


def test_calls_and_tools_are_learned_as_the_template_writes_them(tmp_path: Path) -> None:
    """Of the assistant's turns alone; whether they come as objects or as JSON."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    kept = read(
        tmp_path,
        {"messages": talk({"colour": "red"}), "tools": TOOLS},
        {"messages": talk({"colour": "red"})},
    )
    (as_json,) = read(
        tmp_path / "json", {"messages": talk('{"colour": "red"}'), "tools": json.dumps(TOOLS)}
    )
    assert sorted(kept, key=len) == [as_json, as_json["messages"]]
    (written,) = chat.write(tokenizer, **as_json)
    assert isinstance(written, chat.Written)
    text = "".join(part for part, _ in written.parts)
    assert text == tokenizer.apply_chat_template(as_json["messages"], tools=TOOLS, tokenize=False)
    assert [part for part, is_learned in written.parts if is_learned] == [
        'paint {"colour": "red"}</s>', "it is red</s>"
    ]  # fmt: skip


@pytest.mark.parametrize("ignored", ["tools", "tool_calls"])
def test_a_template_that_ignores_them_is_refused(ignored: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(ignored, "nothing")
    with pytest.raises(TemplateError, match=f"it ignores {ignored}"):
        chat.write(tokenizer, [{**one, "content": one["content"] or ""} for one in talk({"a": 1})],
                   tools=TOOLS)  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "ignored"),
    [
        ({"role": "user", "content": "see", "images": ["a.png"]}, "images"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "content": "so", "reasoning_content": "as"}, "reasoning_content"),
        ({"role": "system", "content": "be kind"}, "message 2 .* of the role system"),
    ],
)
def test_a_template_that_ignores_a_part_of_a_turn_is_refused(
    turn: dict[str, Any], ignored: str
) -> None:
    tokenizer = make_tokenizer()
    skip = "{% for m in messages if m['role'] != 'system' %}"
    tokenizer.chat_template = TEMPLATE.replace("{% for m in messages %}", skip)
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chat.write(tokenizer, [*plain, *plain])
    with pytest.raises(TemplateError, match=f"it ignores {ignored}"):
        chat.write(tokenizer, [*plain, turn, *plain])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"messages": talk({"a": 1})}, {"messages": talk({"b": 1})}], "null values"),
        ([{"messages": talk("red")}], "a tool call that cannot be read"),
        ([{"messages": talk({"a": 1}), "tools": "paint"}], "not a list of objects"),
    ],
)
def test_what_may_be_misread_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], words: str
) -> None:
    """Keys that only other rows have come as nulls, for example."""
    with pytest.raises(DataError, match=words):
        read(tmp_path, *rows)
