"""Chat templates that drop, rewrite or demand parts of a conversation: each turn of the assistant
is learned once, after the prompt that serving writes, or the row is refused."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from jinja2 import TemplateError

from recipe.data.conversations import read_conversation
from recipe.data.files.part import Part
from recipe.errors import HyperparameterError
from recipe.tokenization import chat, chat_template, documents
from tests.support import causal_kit

MESSAGE_START = "{% for m in messages %}<{{ m.role }}>"
"""The beginning of a message."""
PROMPT = "{% endfor %}{% if add_generation_prompt %}<assistant>"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATES = {
    "cuts thoughts": MESSAGE_START + "{{ m.content.split('</think>')[-1] }};" + PROMPT + "{% endif %}",
    "drops texts": MESSAGE_START + "{% if m.content is not string %}{{ m.content }}{% endif %};" + PROMPT
    + "{% endif %}",
    "opens thoughts": TOOLS + MESSAGE_START + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }};" + PROMPT + "<think>{% endif %}",
    "needs calls": TOOLS + MESSAGE_START + "{% if m.role == 'assistant' and not m.content %}{{ m.tool_calls"
    "[0].function.name + ' ' + m.tool_calls[0].function.arguments | tojson }}{% endif %}"
    "{{ m.content }};" + PROMPT + "{% endif %}",
    "joins arguments": TOOLS + MESSAGE_START + "{% for c in m.tool_calls %}{{ c.type + c.function.name + "
    "c.function.arguments }}{% endfor %}{{ m.content }};" + PROMPT + "{% endif %}",
    "prints arguments": TOOLS + MESSAGE_START + "{% for c in m.tool_calls %}{{ c.function.name }} {{ "
    "c.function.arguments }}{% endfor %}{{ m.content }};" + PROMPT + "{% endif %}",
    "system before the last": "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "{{ messages[0].content }}|{% endif %}{{ m.content }};" + PROMPT + "{% endif %}",
    "forgets thoughts of calls": TOOLS + MESSAGE_START + "{% if m.reasoning_content and (loop.last or "
    "messages[-1].role == 'tool') %}({{ m.reasoning_content }}){% endif %}{% for c in m.tool_calls "
    "%}{{ c.function | tojson }}{% endfor %}{{ m.content }};" + PROMPT + "{% endif %}",
    "marks without thoughts": MESSAGE_START + "{{ m.reasoning_content }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}"
    + PROMPT + "{% endif %}",
}  # fmt: skip
USER = {"role": "user", "content": "why?"}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}


def says(content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


CALL = says(None, tool_calls=[{"function": {"name": "paint", "arguments": {"colour": "réd"}}}])
RESULT = {"role": "tool", "content": "done"}


def written(template: str, messages: list[Any], *tools: Any, **options: Any) -> list[chat.Written]:
    tokenizer = causal_kit.make_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    part = Part(path=Path("a.jsonl"), format="jsonl", table=pa.table({"messages": [""]}))
    talk = json.loads(read_conversation(part, 0, messages, "messages", list(tools)))
    talk = talk if isinstance(talk, dict) else {"messages": talk}
    return chat.write(tokenizer, **talk, **options)


def shown(talk: chat.Written) -> str:
    assert "".join(text for text, _ in talk.parts) == talk.text
    return "".join(f"[{text}]" if learned else text for text, learned in talk.parts)


SCHEMA = json.dumps([TOOL])
CALLED = f"{SCHEMA}<user>why?;<assistant>"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("opens thoughts", [USER, says("so")], ["<user>why?;[<assistant>so;]"]),
        ("opens thoughts", [USER, says("so", reasoning_content="hm")],
         ["<user>why?;<assistant><think>[hm</think>so;]"]),
        ("opens thoughts", [USER, says("so", reasoning_content="hm"), USER, says("no")],
         ["<user>why?;<assistant><think>[hm</think>so;]<user>why?;[<assistant>no;]"]),
        ("opens thoughts", [USER, says("so"), USER, says("no"), TOOL],
         [f"{SCHEMA}<user>why?;[<assistant>so;]<user>why?;[<assistant>no;]"]),
        ("needs calls", [USER, CALL, RESULT, says("red"), TOOL],
         [f'{CALLED}[paint {{"colour": "réd"}};]<tool>done;<assistant>[red;]']),
        ("joins arguments", [USER, CALL, RESULT, says("red"), TOOL],
         [f'{CALLED}[functionpaint{{"colour": "réd"}};]<tool>done;<assistant>[red;]']),
        ("prints arguments", [USER, CALL, RESULT, says("red"), TOOL],
         [f'{CALLED}[paint {{"colour": "réd"}};]<tool>done;<assistant>[red;]']),
        ("system before the last", [{"role": "system", "content": "be kind"}, USER, says("so"),
                                    USER, says("no")],
         ["<user>be kind|why?;<assistant>[so;]",
          "<user>why?;<assistant>so;<user>be kind|why?;<assistant>[no;]"]),
        ("forgets thoughts of calls",
         [USER, {**CALL, "reasoning_content": "hm"}, RESULT, says("red", reasoning_content="ah"),
          TOOL],
         [f'{CALLED}[(hm){{"name": "paint", "arguments": {{"colour": "réd"}}}};]<tool>done;'
          '<assistant>[(ah)red;]']),
        ("marks without thoughts", [USER, says("so"), USER, says("no", weight=0)],
         ["<user>why?;<assistant>[so;]"]),
    ],
)  # fmt: skip
def test_each_turn_is_learned_once_after_the_prompt_of_serving(
    template: str, messages: list[Any], expected: list[str]
) -> None:
    tools = [messages.pop()] if messages[-1] is TOOL else []
    assert [shown(talk) for talk in written(template, messages, *tools)] == expected


@pytest.mark.parametrize(
    ("template", "messages", "dropped"),
    [
        ("cuts thoughts", [USER, says("<think>\nhm\n</think>\n\nso")],
         "'hm' of the content of message 1"),
        ("drops texts", [USER, says("so")], "'so' of the content of message 1"),
        ("needs calls", [USER, {**CALL, "content": "well"}, RESULT, says("red"), TOOL],
         "of the tool_calls of message 1"),
        ("cuts thoughts", [USER, says("so", reasoning_content="hm")],
         "'hm' of the reasoning_content of message 1"),
        ("marks without thoughts", [USER, says("so", reasoning_content="hm")],
         "'hm' of the reasoning_content of message 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_all_learned", [False, True])
def test_a_row_is_refused_if_what_a_turn_would_learn_is_dropped(
    template: str, messages: list[Any], dropped: str, is_all_learned: bool
) -> None:
    messages = list(messages)
    tools = [messages.pop()] if messages[-1] is TOOL else []
    if is_all_learned and template.startswith("marks"):
        assert written(template, messages, is_all_learned=True)  # the marks do not matter
        return
    with pytest.raises(TemplateError, match=dropped):
        written(template, messages, *tools, is_all_learned=is_all_learned)


def test_all_of_a_conversation_is_learned_only_on_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = causal_kit.make_tokenizer()
    tokenizer.chat_template = TEMPLATES["opens thoughts"]
    split = datasets.Dataset.from_dict({"messages": [json.dumps([USER, says("so")])] * 2})
    made = documents.tokenize_split("train", split, tokenizer, 64, None)
    assert causal_kit.show_learned(tokenizer, made) == "<user>why?;[<assistant>so;</s>]"
    lines = capsys.readouterr().out
    assert "2 of 2 assistant turns are learned" in lines
    assert "what 2 learned turns do not have" in lines
    made = documents.tokenize_split("train", split, tokenizer, 64, None, is_all_learned=True)
    assert causal_kit.show_learned(tokenizer, made) == "<[user>why?;<assistant>so;</s>]"
    pairs = datasets.Dataset.from_dict({"prompt": ["one:"], "completion": ["two"]})
    made = documents.tokenize_split("train", pairs, tokenizer, 64, None, is_all_learned=True)
    assert causal_kit.show_learned(tokenizer, made) == "o[ne:two</s>]"


def test_variables_of_a_template_become_its_defaults() -> None:
    tokenizer = causal_kit.make_tokenizer()
    tokenizer.chat_template = (
        "{{ style | default('plain') }}{% for m in messages %}{% if thinks is not defined or thinks"
        " %}<think>{% endif %}{{ m.content }}{% endfor %}{{ rules }}"
    )
    render: Any = tokenizer.apply_chat_template
    assert render([USER], tokenize=False) == "plain<think>why?"
    rules = {"a": [None, True, "%} }} é\"'\n"]}
    chat_template.set_variables(tokenizer, {"thinks": False, "style": "terse", "rules": rules})
    assert render([USER], tokenize=False) == f"tersewhy?{rules}"
    assert render([USER], tokenize=False, thinks=True, rules="") == "terse<think>why?"
    chat_template.set_variables(tokenizer, {"style": "long"})
    assert render([USER], tokenize=False, rules="") == "longwhy?"
    for name in ("thinking", "messages", "a-b"):
        with pytest.raises(HyperparameterError, match=f"has the keys {name}, which"):
            chat_template.set_variables(tokenizer, {name: 1})
