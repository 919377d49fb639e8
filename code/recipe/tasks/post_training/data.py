"""Read preference pairs, judged completions and prompts into TRL's dataset formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out, prompt_forms, values
from recipe.data.column_names import ADDRESS, COMPLETION, LABEL, MESSAGES, PROMPT
from recipe.data.column_settings import verdicts_in
from recipe.data.conversations import read_conversation
from recipe.data.files.part import Part, is_list
from recipe.data.held_out import DataSets
from recipe.data.reading import ReadFile, read_columns
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.spec import COMPLETION_NAMES, TaskSpec, normalize_name

ANSWER, CHOSEN, REJECTED, MARGIN = "answer", "chosen", "rejected", "margin"
_ROLES = {MESSAGES: "user", PROMPT: "user"}
_ROLES |= dict.fromkeys((CHOSEN, REJECTED, COMPLETION), "assistant")
"""The columns of texts or messages, and whose message a text among messages is."""
_ANSWERS = frozenset(map(normalize_name, (*COMPLETION_NAMES, "ground_truth", LABEL)))
_SHOWN = 5
_Verdicts = tuple[frozenset[str], frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class Preferences(DataSets):
    """Data sets whose columns prompt, chosen, rejected and completion hold texts, or lists of
    messages, and label a bool."""


def load(channels: Mapping[str, Path], settings: DataSettings, spec: TaskSpec) -> Preferences:
    """Read and split the rows of a job's channels.

    Raises:
        DataError: names the files and lines of rows without a pair, with two equal answers, or
            that cannot be read, and the remedy.
    """
    notes: list[str] = []
    reading = read_columns(channels, spec, settings, notes)
    are_chats = any(_holds_messages(read) for read in reading.files)
    keeps_all = spec.name == "grpo"  # a reward function may take any column
    verdicts = _verdicts(reading.files)
    tables = reading.converted(lambda read: _table(read, verdicts, are_chats, keeps_all, settings))
    uses, lines = held_out.build(
        reading, tables, settings, "rows", lambda table: f"{table.num_rows} rows"
    )
    kind = "conversations, by the chat template" if are_chats else "plain texts, as they are"
    return Preferences(**uses, notes=[*notes, *lines, f"format: {kind}"])


def _holds_messages(read: ReadFile) -> bool:
    """Return whether a column has lists of messages, or their JSON."""
    for role in _ROLES.keys() & read.columns.columns.keys():
        cells = read.part.table[read.columns[role]]
        if is_list(cells.type) or any(map(_are_messages, cells.slice(0, 100).to_pylist())):
            return True
    return False


def _are_messages(cell: Any) -> bool:
    """Return whether a cell is the JSON of a conversation. Answers may be other JSON."""
    listed = values.container(cell) if isinstance(cell, str) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    return isinstance(first, dict) and not {"role", "from"}.isdisjoint(first)


def _verdicts(files: Sequence[ReadFile]) -> _Verdicts:
    """Return the words for good and for bad answers in all files.

    Raises:
        DataError: the files mix words of several kinds, such as 0 and 1 with -1 and 1.
    """
    labelled = [read for read in files if LABEL in read.columns]
    files_by_words = {verdicts_in(read.part, read.columns[LABEL]): read for read in labelled}
    if None in files_by_words or not files_by_words:
        return frozenset(values.TRUE), frozenset(values.FALSE)
    cells = (cell for read in labelled for cell in read.part.distinct(read.columns[LABEL], 9) or ())
    words = {str(cell).strip().lower() for cell in cells}
    for both in files_by_words:
        if both and words <= both[0] | both[1]:
            return both
    shown = " and ".join(f"{read.part.path}" for read in files_by_words.values())
    raise DataError(
        f"{shown} judge answers by different words: {', '.join(sorted(words))}.",
        "Write true or false in all files.",
    )


def _table(
    read: ReadFile, verdicts: _Verdicts, are_chats: bool, keeps_all: bool, settings: DataSettings
) -> pa.Table:
    """Return the rows of a file, checked."""
    columns = {role: names[0] for role, names in read.columns.columns.items()}
    if columns.pop(prompt_forms.INPUT, None):
        read = prompt_forms.fill_alpaca(read, are_chats)
    part = read.part
    good, bad = verdicts
    rows: list[dict[str, Any]] = []
    faults: dict[str, list[str]] = {}
    for first, batch in part.batches([*dict.fromkeys(columns.values())]):
        for number, cells in enumerate(batch.to_pylist(), first):
            given = {role: cells[name] for role, name in columns.items()}
            row, fault = _row(part, number, given, columns, are_chats)
            if not fault and LABEL in row:
                word = str(row[LABEL]).strip().lower()
                row[LABEL] = word in good
                if word not in good | bad:
                    fault = f"have no label of true and false, but {word[:20]!r}"
            rows.append(row)
            if fault:
                faults.setdefault(fault, []).append(part.where(number))
    if faults:
        listed = "; ".join(
            f"{len(where)} rows {fault}, such as {', '.join(where[:_SHOWN])}"
            for fault, where in faults.items()
        )
        raise DataError(f"{part.path}: {listed}.", "Correct these rows, or remove them.")
    table = pa.Table.from_pylist(rows)
    if keeps_all:
        taken = {*columns.values(), *settings.ignored_columns, *table.column_names}
        for name in (name for name in part.table.column_names if name not in taken):
            is_answer = ANSWER not in table.column_names and normalize_name(name) in _ANSWERS
            table = table.append_column(ANSWER if is_answer else name, part.table[name])
    return table.append_column(ADDRESS, part.addresses())


def _row(
    part: Part, number: int, given: dict[str, Any], columns: Mapping[str, str], are_chats: bool
) -> tuple[dict[str, Any], str]:
    """Return a row in TRL's format, and what is wrong with it; empty if nothing is."""
    row: dict[str, Any] = {}
    for role, cell in given.items():
        if role not in _ROLES:
            row[role] = cell
            continue
        is_empty = not (cell.strip() if isinstance(cell, str) else cell)
        if is_empty:
            return dict.fromkeys(given), f"have no {role}"
        if are_chats:
            row[role] = _messages(part, number, cell, _ROLES[role], columns[role])
        elif role == MESSAGES or not isinstance(cell, str) or _are_messages(cell):
            return dict.fromkeys(given), f"have no text as {role}"
        else:
            row[role] = cell
    if talk := row.pop(MESSAGES, None):
        row |= {PROMPT: talk} if CHOSEN in row else {PROMPT: talk[:-1], COMPLETION: talk[-1:]}
    if CHOSEN in row and row[CHOSEN] == row[REJECTED]:
        return row, "have equal chosen and rejected answers"
    ends = [row[role][-1] for role in (CHOSEN, REJECTED, COMPLETION) if are_chats and role in row]
    if row.get(PROMPT) == []:
        return row, "have no prompt"
    if any(one["role"] != "assistant" or not one["content"].strip() for one in ends):
        return row, "have no text of the assistant at the end of an answer"
    if are_chats and CHOSEN in row:
        row |= _answers(row)
        prompt, first = row[PROMPT], {row[role][0]["role"] for role in (CHOSEN, REJECTED)}
        if not prompt or (talk and talk[: len(prompt)] != prompt) or "user" in first:
            return row, "have chosen and rejected answers to different prompts"
        if talk and prompt[-1]["role"] == "assistant":
            return row, "have a conversation that ends with an answer, and others to choose from"
    return row, ""


def _messages(part: Part, number: int, cell: Any, role: str, column: str) -> list[dict[str, str]]:
    """Return the messages of a cell, of which a text is one."""
    is_text = isinstance(cell, str) and not _are_messages(cell)
    listed = [{"role": role, "content": cell}] if is_text else cell
    listed = [listed] if isinstance(listed, dict) else listed
    messages = json.loads(read_conversation(part, number, listed, column))
    for message in messages:
        if others := sorted(message.keys() - {"role", "content"}):
            raise DataError(
                f"{part.where(number)} has a message with {', '.join(others)} in column "
                f"{column!r}, and post-training reads texts only.",
                "Remove these keys or rows; task=causal-lm learns calls of tools.",
            )
    return list(messages)


def _answers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompt and answers of a pair. If the answers are whole conversations, which begin
    with the prompt, their common beginning is the prompt."""
    chosen, rejected = row[CHOSEN], row[REJECTED]
    if chosen[0]["role"] == "assistant" and PROMPT in row:
        return {}
    last = min(len(chosen), len(rejected)) - 1
    count = next((n for n in range(last) if chosen[n] != rejected[n]), last)
    return {PROMPT: chosen[:count], CHOSEN: chosen[count:], REJECTED: rejected[count:]}


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a row that a model reads."""
    for role in (role for role in _ROLES if role in row):
        cell = row[role]
        yield cell if isinstance(cell, str) else "\n".join(one["content"] for one in cell)
