"""Make prompts and conversations of columns: by the templates of Alpaca and JumpStart, of lists of
messages, and with a system prompt."""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import values
from recipe.data.column_names import COMPLETION, MESSAGES, PROMPT, SYSTEM, TOOLS
from recipe.data.column_settings import NOTHING
from recipe.data.conversations import read_conversation
from recipe.data.files.part import Part, is_list, is_string
from recipe.data.files.spool import spooled_column
from recipe.data.reading import ReadFile
from recipe.errors import DataError, join_names

INPUT = "input"
"""Alpaca's column of an instruction's input."""
_TEXTS = (PROMPT, COMPLETION)
TEMPLATE = "template.json"
"""JumpStart's file with a template of prompts and completions."""
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{}\n\n### Response:"
)
"""The prompts of Stanford Alpaca."""


@dataclass(frozen=True)
class JumpStartTemplate:
    """A template of JumpStart: texts with `{column}` for the cells of a row."""

    path: Path
    pieces: Mapping[str, Sequence[tuple[str, str | None]]]
    """For the prompt and the completion: texts, and the column that follows each, if any."""

    def fill(self, part: Part) -> Part:
        """Return the prompts and completions of a file's rows.

        Raises:
            DataError: The file lacks a column of the template, or has lists in it.
        """
        named = [name for pieces in self.pieces.values() for _, name in pieces]
        names = list(dict.fromkeys(name for name in named if name is not None))
        if missing := [name for name in names if name not in part.table.column_names]:
            raise DataError(
                f"{self.path} names the columns {join_names(missing)}, which {part.path} lacks: "
                f"its columns are {', '.join(part.table.column_names)}.",
                "Give the template and the columns the same names, or remove the template.",
            )
        for name in names:
            part = part.with_column(name, values.texts(part, name))

        def texts(pieces: Sequence[tuple[str, str | None]]) -> Iterator[list[str]]:
            for _, batch in part.batches(names):
                yield [
                    "".join(before + ("" if name is None else row[name]) for before, name in pieces)
                    for row in batch.to_pylist()
                ]

        columns = {
            role: spooled_column(pa.large_string(), texts(pieces))
            for role, pieces in self.pieces.items()
        }
        kind = f"{part.format}, prompts by {TEMPLATE}"
        return dataclasses.replace(part, table=pa.table(columns), format=kind)


def read_templates(folders: Iterable[Path]) -> dict[Path, JumpStartTemplate]:
    """Return the templates of JumpStart in the folders of channels.

    Raises:
        DataError: A template cannot be read.
    """
    templates = {}
    for path in (folder / TEMPLATE for folder in folders):
        if not path.is_file():
            continue
        try:
            texts = json.loads(path.read_text(encoding="utf-8"))
            parsed = {role: [*string.Formatter().parse(texts[role])] for role in _TEXTS}
            others = [name for name in texts if name not in parsed]
        except (ValueError, TypeError, LookupError):
            parsed, others = {}, []
        pieces = [piece for some in parsed.values() for piece in some]
        is_plain = all(name != "" and not spec and not how for _, name, spec, how in pieces)
        if others or not is_plain or not any(name for _, name, *_ in parsed.get(COMPLETION, ())):
            raise DataError(
                f"{path} is not a template of JumpStart.",
                'Write it as {"prompt": "...{instruction}...", "completion": "{response}"}, with '
                "the names of columns, or remove it.",
            )
        templates[path.parent] = JumpStartTemplate(
            path,
            {role: [(text, name) for text, name, *_ in some] for role, some in parsed.items()},
        )
    return templates


def fill_alpaca(read: ReadFile, is_chat: bool = False) -> ReadFile:
    """Return a file with Stanford Alpaca's prompts of its instructions and inputs.

    Args:
        is_chat: Whether they are turns of conversations: an input after a line end.

    Raises:
        DataError: They are not texts.
    """
    columns = read.columns
    for name in (columns[PROMPT], columns[INPUT]):
        kind = read.part.table.schema.field(name).type
        if not (is_string(kind) or pa.types.is_null(kind)):
            raise DataError(
                f"Column {name!r} of {read.part.path} is of type {kind}, and a prompt by "
                "Alpaca's template takes texts.",
                "Write it as texts, or name a column of whole prompts: prompt_column=... "
                "completion_column=...",
            )
    both, alone = ("{}\n{}", "{}") if is_chat else (ALPACA_WITH_INPUT, ALPACA_WITHOUT_INPUT)
    prompts = (
        [
            both.format(instruction or "", given) if given else alone.format(instruction or "")
            for instruction, given in zip(*batch.to_pydict().values(), strict=True)
        ]
        for _, batch in read.part.batches([columns[PROMPT], columns[INPUT]])
    )
    part = read.part.with_column(columns[PROMPT], spooled_column(pa.large_string(), prompts))
    kind = part.format if is_chat else f"{part.format}, prompts by Alpaca's template"
    return dataclasses.replace(read, part=dataclasses.replace(part, format=kind))


def is_conversational(read: ReadFile) -> bool:
    """Return whether the rows of a file are conversations: a column of them, prompts or completions
    that are lists of messages, or that have a system prompt or tools."""
    part, columns = read.part, read.columns
    texts = [columns[role] for role in (PROMPT, COMPLETION) if role in columns]
    if MESSAGES in columns or any(is_list(part.table.schema.field(name).type) for name in texts):
        return True
    extra = [columns[role] for role in (SYSTEM, TOOLS) if role in columns]
    batches = (batch for _, batch in part.batches(extra)) if extra else ()
    return any(
        (cell.strip() if isinstance(cell, str) else cell) not in NOTHING
        for batch in batches
        for row in batch.to_pylist()
        for cell in row.values()
    )


def conversations(read: ReadFile) -> pa.ChunkedArray:
    """Return the conversations of a file as JSON.

    A prompt and a completion are joined; of the turns in a prompt, none is learned. An input
    follows its instruction after a line end.
    """
    part = read.part
    roles = (MESSAGES, PROMPT, INPUT, COMPLETION, SYSTEM, TOOLS)
    columns = {role: read.columns[role] for role in roles if role in read.columns}
    shown = columns.get(MESSAGES) or columns[COMPLETION]

    def talks() -> Iterator[list[str]]:
        for first, batch in part.batches([*dict.fromkeys(columns.values())]):
            made = []
            for number, row in enumerate(batch.to_pylist(), first):
                cells = {role: row[name] for role, name in columns.items()}
                messages, before = cells.get(MESSAGES), 0
                if MESSAGES not in columns:
                    prompt = cells[PROMPT]
                    if given := cells.get(INPUT):
                        prompt = f"{prompt or ''}\n{given}".lstrip("\n")
                    earlier = _as_messages(prompt, "user")
                    messages, before = (
                        [*earlier, *_as_messages(cells[COMPLETION], "assistant")], len(earlier),
                    )  # fmt: skip
                made.append(
                    read_conversation(
                        part, number, messages, shown, cells.get(TOOLS), cells.get(SYSTEM), before
                    )
                )
            yield made

    return spooled_column(pa.large_string(), talks())


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list):
        return value
    return [] if value is None or value == "" else [{"role": role, "content": str(value)}]
