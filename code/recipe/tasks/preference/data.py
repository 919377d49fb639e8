"""Load preference pairs: a prompt, the chosen answer and the rejected one.

Answers are texts or conversations. The prompt is a column, or the common beginning of both answers:
`chosen` and `rejected` of hh-rlhf are whole dialogues ("Human: ... Assistant: ..."), those of
UltraFeedback are lists of messages with the same first ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out
from recipe.data.column_names import PROMPT
from recipe.data.columns import Selection
from recipe.data.conversations import common_prefix, conversation, messages_in
from recipe.data.files.part import Part
from recipe.data.files.spool import spooled_rows
from recipe.data.held_out import DataSets
from recipe.data.reading import Read, describe_files, read_columns
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.task_table import TASKS

CHOSEN, REJECTED = "chosen", "rejected"
_STATUS = "status"
TIE = "column 'status' says tie: neither answer is the better one"
NO_PROMPT = "there is no prompt, and the answers have no beginning in common"
OTHER_PROMPTS = "the answers are to different prompts"
EMPTY = "an answer is empty"
SAME = "both answers are the same"
_TURN = "\n\nAssistant:"
"""Precedes each answer of a dialogue in one text."""
_MOST_WITHOUT_PROMPT = 0.1
"""With a larger share of rows without a common beginning, the prompt must be in another column."""
_LAST_WORD = re.compile(r"\S*\Z")
_SCHEMA = pa.schema([(name, pa.large_string()) for name in (PROMPT, CHOSEN, REJECTED)])
Message = dict[str, Any]
Triple = tuple[Any, Any, Any]
"""Prompt, chosen and rejected: texts, or lists of messages."""


@dataclass(frozen=True, kw_only=True)
class Preferences(DataSets):
    """Data sets with the columns `prompt`, `chosen` and `rejected`."""

    are_talks: bool
    """Whether the columns hold lists of messages, as JSON, and not texts."""


def load(channels: Mapping[str, Path], settings: DataSettings) -> Preferences:
    """Read and split the preferences of a job's channels.

    Rows with an empty answer, equal answers or no prompt are left out and counted in a note.

    Raises:
        DataError: names the channel, file, row or column that cannot be used, and the remedy.
    """
    notes: list[str] = []
    reading = read_columns(channels, TASKS["preference"], settings, notes)
    kinds: dict[bool, Path] = {}

    def usable(file: Read) -> pa.Table:
        part = file.part
        table, has_talks, left_out = _usable(part, file.columns)
        kinds.setdefault(has_talks, part.path)
        for why, (count, first) in left_out.items():
            notes.append(
                f"{count} of {part.table.num_rows} pairs are not used: {why} (the first: "
                f"{part.where(first)})."
            )
        return table

    tables = reading.converted(usable)
    if len(kinds) > 1:
        raise DataError(
            f"{kinds[True]} has conversations, and {kinds[False]} has texts.",
            "Give answers of one kind in all files.",
        )
    shown = reading.columns.describe()
    shown += "" if PROMPT in reading.columns else "; the prompt is what both answers begin with"
    built, findings = {}, []
    for split, of_split in tables.items():
        rows = built[split] = held_out.data_set(of_split)
        if not len(rows):
            reasons = " ".join(note for note in notes if "not used" in note)
            raise DataError(
                f"The {split} data has no pair that can be used. {reasons}",
                "Give a prompt and two different answers in each row.",
            )
        findings.append(describe_files(reading.files_of(split), f"{len(rows)} pairs", shown))
    uses, rule = held_out.assign_groups(built, PROMPT, settings)
    return Preferences(
        **uses,
        notes=[*notes, *findings, rule.replace("queries", "prompts")],
        are_talks=True in kinds,
    )


def _usable(part: Part, columns: Selection) -> tuple[pa.Table, bool, Mapping[str, tuple[int, int]]]:
    """Return the usable rows (texts, or JSON of messages), whether they are messages, and for each
    reason to leave rows out how many there are, and the first one.

    Raises:
        DataError: rows have different kinds of values, or too many have no prompt.
    """
    roles = [role for role in _SCHEMA.names if role in columns]
    talks = {
        role
        for role in roles
        if any(
            messages_in(value) is not None
            for _, batch in part.batches([columns[role]])
            for value in batch[columns[role]].to_pylist()
        )
    }
    if len(talks - {PROMPT}) == 1:
        raise DataError(
            f"{part.path} has conversations in only one of the columns {columns[CHOSEN]!r} and "
            f"{columns[REJECTED]!r}.",
            "Give both answers as texts, or both as lists of messages.",
        )
    status = columns.get(_STATUS)
    left_out: dict[str, tuple[int, int]] = {}
    prefixed = 0

    def triples() -> Iterator[dict[str, str]]:
        nonlocal prefixed
        for first, batch in part.batches(list(dict.fromkeys(columns.names))):
            for row, cells in enumerate(batch.to_pylist(), first):
                values = {
                    role: _value(part, row, cells[columns[role]], columns[role], role in talks)
                    for role in roles
                }
                prompt, answers = values.get(PROMPT), [values[CHOSEN], values[REJECTED]]
                if talks and CHOSEN not in talks:
                    answers = [[{"role": "assistant", "content": text}] for text in answers]
                parted = (conversation_triple if talks else text_triple)(prompt, *answers)
                if status and cells[status] == "tie":
                    parted = TIE
                if isinstance(parted, str):
                    count, first_such = left_out.get(parted, (0, row))
                    left_out[parted] = count + 1, first_such
                    continue
                if not talks:
                    prefixed += all(answer.startswith(parted[0]) for answer in parted[1:])
                texts = map(json.dumps, parted) if talks else parted
                yield dict(zip(_SCHEMA.names, texts, strict=True))

    table = spooled_rows(_SCHEMA, triples())
    if PROMPT in columns and table.num_rows == prefixed > 0:
        raise DataError(
            f"Every answer of {part.path} begins with its prompt in column {columns[PROMPT]!r}, "
            "which would be read twice.",
            "Remove the column of prompts: what both answers begin with is the prompt.",
        )
    without, _ = left_out.get(NO_PROMPT, (0, 0))
    if PROMPT not in columns and without > _MOST_WITHOUT_PROMPT * part.table.num_rows:
        raise DataError(
            f"{part.path} has no column of prompts that is known by its name, and in {without} of "
            f"{part.table.num_rows} rows the answers have no beginning in common: its columns are "
            f"{', '.join(part.table.column_names)}.",
            "Name the column of prompts in the hyperparameter prompt_column.",
        )
    return table, bool(talks), left_out


def _value(part: Part, row: int, value: Any, column: str, is_talk: bool) -> Any:
    """Return a cell as a text or a list of messages. Raise DataError if it is another kind of
    value."""
    if value is None:
        return None if is_talk else ""
    if is_talk:
        return json.loads(conversation(part, row, value, column))
    if isinstance(value, (list, dict)):
        raise DataError(
            f"{part.where(row)} has no text in column {column!r}, but "
            f"{json.dumps(value, default=str)[:60]}.",
            'Give texts, or messages: [{"role": "assistant", "content": "..."}].',
        )
    return str(value)


def text_triple(prompt: str | None, chosen: str, rejected: str) -> Triple | str:
    """Return a row of texts with its prompt, or the reason why it cannot be used.

    If the prompt is None, it is the common beginning of both answers: up to "Assistant:" in a
    dialogue, up to the end of a word in other texts.
    """
    if not chosen.strip() or not rejected.strip():
        return EMPTY
    if chosen == rejected:
        return SAME
    if prompt is not None:
        return (prompt, chosen, rejected) if prompt.strip() else NO_PROMPT
    shared = chosen[: common_prefix(chosen, rejected)]
    end = shared.rfind(_TURN) + len(_TURN)
    if _TURN not in shared:
        follows = chosen[len(shared) : len(shared) + 1] + rejected[len(shared) : len(shared) + 1]
        ends_in_word = shared[-1:].isalnum() and any(map(str.isalnum, follows))
        end = len((_LAST_WORD.sub("", shared) if ends_in_word else shared).rstrip(" "))
    if not chosen[:end].strip():
        return NO_PROMPT
    if not chosen[end:].strip() or not rejected[end:].strip():
        return EMPTY
    return chosen[:end], chosen[end:], rejected[end:]


def conversation_triple(
    prompt: list[Message] | str | None, chosen: list[Message] | None, rejected: list[Message] | None
) -> Triple | str:
    """Return a row of conversations with its prompt, or the reason why it cannot be used.

    Unless the prompt is a list of messages, it is the common beginning of both conversations. A
    text is added to it as the user's turn if it has none; else one of its turns must contain it.
    """
    if not chosen or not rejected:
        return EMPTY
    if chosen == rejected:
        return SAME
    shared = common_prefix(chosen, rejected)
    if isinstance(prompt, list):
        before = prompt
        shared = len(prompt) if shared >= len(prompt) and chosen[: len(prompt)] == prompt else 0
    else:
        before = chosen[:shared]
        questions = [turn["content"] for turn in before if turn["role"] == "user"]
        text = (prompt or "").strip()
        if text and not questions:
            before = [*before, {"role": "user", "content": prompt}]
        elif text and not any(text in question or question in text for question in questions):
            return OTHER_PROMPTS
    answers = [chosen[shared:], rejected[shared:]]
    if any(answer and answer[0]["role"] != "assistant" for answer in answers):
        return OTHER_PROMPTS
    texts = [
        [turn["content"] for turn in turns if turn["role"] == "assistant"] for turns in answers
    ]
    if not all("".join(contents).strip() for contents in texts):
        return EMPTY
    if all(turn["role"] == "system" for turn in before):
        return NO_PROMPT
    return before, answers[0], answers[1]
