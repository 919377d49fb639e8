"""Prompts of an evaluation with the answers of the data, and what a model answers to them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from recipe.backend.generation.prompts import TooLong
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.loading import wrap_model
from recipe.backend.requests.payloads import Request
from recipe.data.column_names import COMPLETION, MESSAGES, PROMPT
from recipe.models import lora
from recipe.tasks.causal_lm.serve import Generator
from recipe.tokenization import chat_template
from recipe.tokenization.chat import THOUGHT_TAGS
from recipe.tokenization.chat_template import Message, Template

_AFTER_THOUGHTS = "</think>"
"""What a model writes before it is not compared."""


@dataclass(frozen=True, kw_only=True)
class PromptAnswer:
    """A prompt of the data and its answer."""

    row: int
    """Its number in the split."""
    prompt: str | Sequence[Message]
    """A text, or the messages before the last turn of the assistant."""
    answer: str
    """The completion, or the content of that turn; without one, its calls of tools."""
    turn: Message = field(default_factory=dict)
    """That turn; empty for a text."""
    tools: Sequence[Message] = ()

    @property
    def shown(self) -> str:
        """Return the prompt as a report shows it."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{one['role']}: {one['content']}" for one in self.prompt)


def read_exchanges(split: Dataset, rows: Sequence[int]) -> list[PromptAnswer]:
    """Return the prompts and answers of rows of `language_modeling.Texts`. Conversations in which
    the assistant answers nothing are left out."""
    exchanges = []
    for row, cells in zip(rows, split.select(rows), strict=True):
        if MESSAGES not in cells:
            made = PromptAnswer(row=row, prompt=cells[PROMPT], answer=cells[COMPLETION].strip())
            exchanges.append(made)
            continue
        talk = json.loads(cells[MESSAGES])
        talk = talk if isinstance(talk, dict) else {"messages": talk, "tools": ()}
        messages = talk["messages"]
        turns = range(len(messages) - 1, 0, -1)
        last = next((number for number in turns if messages[number]["role"] == "assistant"), 0)
        if last:
            turn = messages[last]
            answer = turn["content"].rpartition(_AFTER_THOUGHTS)[2].strip()
            calls = (json.dumps(call["function"]) for call in turn.get("tool_calls") or ())
            answer = answer or "\n".join(calls)
            exchanges.append(
                PromptAnswer(
                    row=row, prompt=messages[:last], answer=answer, turn=turn, tools=talk["tools"]
                )
            )
    return exchanges


def written_turn(exchange: PromptAnswer, tokenizer: Any) -> str:
    """Return the turn of the assistant as the chat template writes it, without special tokens."""
    template = Template(tokenizer, exchange.tools)
    messages, text = template.readable([*exchange.prompt, exchange.turn])
    whole, start, _ = template.document(messages, text)
    prompt = template.render(messages[:-1], add_generation_prompt=True)
    # The generation prompt may open a thought that the turn does not have.
    opened = (tag.start() for tag in THOUGHT_TAGS.finditer(prompt))
    start = max([start, *(end for end in opened if whole.startswith(prompt[:end]))])
    ids = tokenizer(whole[start:], add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


@contextlib.contextmanager
def served(model: Any, tokenizer: Any) -> Iterator[Generator]:
    """Answer requests by a model in memory as its server will; afterwards it is as it was."""
    inner = lora.bare(model)
    was_training, settings = inner.training, inner.generation_config
    inner.eval()
    try:
        loaded: LoadedModel = wrap_model(inner, tokenizer, int(tokenizer.model_max_length))
        yield Generator.wrap(loaded)
    finally:
        inner.generation_config = settings
        inner.train(was_training)


def answer_prompts(
    model: Any, tokenizer: Any, exchanges: Sequence[PromptAnswer], most: int
) -> Mapping[int, str]:
    """Return the answers of a model, chosen greedily, by the rows of their prompts; prompts that
    leave no room have none.

    Args:
        most: The most tokens of an answer.
    """
    if any(not isinstance(exchange.prompt, str) for exchange in exchanges):
        chat_template.see_to_template(tokenizer)
    with served(model, tokenizer) as generator:
        prepared: dict[int, Request] = {}
        for exchange in exchanges:
            request = Request(
                inputs=[_input_of(exchange, tokenizer)], parameters={"temperature": 0},
                usual_tokens=most, continues=False,
            )  # fmt: skip
            with contextlib.suppress(TooLong):
                prepared[exchange.row] = generator.prepare(request)
        predicted = generator.predict([*prepared.values()])
    texts = [answers["entries"][0][0]["text"] for answers in predicted]
    cut = [text.rpartition(_AFTER_THOUGHTS)[2].strip() for text in texts]
    return dict(zip(prepared, cut, strict=True))


def _input_of(exchange: PromptAnswer, tokenizer: Any) -> Any:
    """Return what a request would have. The server's own code renders no tools: token ids."""
    if not exchange.tools or isinstance(exchange.prompt, str):
        return exchange.prompt
    template = Template(tokenizer, exchange.tools)
    messages, _ = template.readable(exchange.prompt)
    text = template.render(messages, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
