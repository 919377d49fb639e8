"""Load the documents of a job's channels: texts, prompts with completions, conversations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out, prompt_forms, values
from recipe.data.column_names import (
    ADDRESS,
    COMPLETION,
    MESSAGES,
    PROMPT,
    TEXT,
    TOKEN_IDS,
)
from recipe.data.files import formats
from recipe.data.files.part import HeaderHint, Part, is_string, keep_rows
from recipe.data.held_out import DataSets
from recipe.data.layout import shards
from recipe.data.prompt_forms import INPUT, JumpStartTemplate
from recipe.data.reading import ReadFile, describe_files, read_columns
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.spec import TaskSpec

_PLAIN = (".txt", ".text", ".tokens", ".raw")
_CHECKED_ROWS, _MOST_SEEN = 1_000, 0.9
_ROLES = (TEXT, PROMPT, COMPLETION, MESSAGES, TOKEN_IDS)


@dataclass(frozen=True, kw_only=True)
class Texts(DataSets):
    """Data sets with the column `text`, or `prompt` and `completion`, or `messages` (conversations
    as JSON), or `input_ids`."""


def load(channels: Mapping[str, Path], settings: DataSettings, spec: TaskSpec) -> Texts:
    """Read and split the documents of a job's channels.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    hosts, notes = shards.job_hosts(), list[str]()
    with hosts.together():
        templates = prompt_forms.read_templates(channels.values())
    read = functools.partial(
        _read, sample_by=settings.sample_by, header=settings.names_in_header, templates=templates
    )
    reading = read_columns(channels, spec, settings, notes, read, hosts=hosts)
    are_chats = any(hosts.gather(any(map(prompt_forms.is_conversational, reading.files))))
    roles = [MESSAGES] if are_chats else [role for role in _ROLES if role in reading.columns]
    with hosts.together():
        files = [_usable(file, notes, are_chats) for file in reading.files]
        built = {
            split: held_out.data_set(
                [
                    _documents(file, are_chats).append_column(ADDRESS, file.part.addresses())
                    for file in files
                    if file.split == split
                ]
            )
            for split in reading.splits
        }
    for split in set().union(*hosts.gather(set(reading.splits))) - built.keys():
        kind = pa.large_list(pa.int64()) if TOKEN_IDS in roles else pa.large_string()
        built[split] = held_out.data_set(
            [pa.schema([(name, kind) for name in roles]).empty_table()]
        )
    findings = [
        describe_files(
            [file for file in files if file.split == split],
            f"{sum(file.part.table.num_rows for file in files if file.split == split)} rows",
            more_read=("attention_mask",),
        )
        for split in reading.splits
    ]
    uses, rule = held_out.assign(built, reading, settings, None, hosts)
    if hosts.sharded:
        counts = zip(hosts.names, hosts.gather(len(uses["train"])), strict=True)
        shown = ", ".join(f"{name} {count}" for name, count in counts)
        findings.append(f"sharded: training documents of each host: {shown}")
    return Texts(**uses, notes=[*notes, *findings, rule])


def _read(
    path: Path, sample_by: str, header: HeaderHint, templates: Mapping[Path, JumpStartTemplate]
) -> Part:
    """Return the rows of a table, or the texts of a plain text file."""
    name = path.name.lower().removesuffix(".gz")
    is_plain = path.is_file() and name.endswith(_PLAIN)
    if path.is_file() and not Path(name).suffix and formats.is_delimited(path):
        is_plain = not formats.is_structured(path, by_names=True)
        if is_plain and formats.is_structured(path):
            raise DataError(
                f"{path} has no suffix, and its lines can be split into equally many cells: it may "
                "be a table or text.",
                f"Rename it to {path.name}.txt if its lines are texts, or to {path.name}.csv.",
            )
    elif is_plain and formats.is_delimited(path) and formats.is_structured(path, by_names=True):
        stem = name.rpartition(".")[0]
        raise DataError(
            f"{path} names columns in its first line, but files that end with "
            f"{', '.join(_PLAIN)} are read as plain texts.",
            f"Rename it to {stem}.csv, or remove that line.",
        )
    part = (
        formats.read_texts(path, sample_by)
        if is_plain
        else formats.read(path, lone_column=True, header=header)
    )
    folders = [folder for folder in path.parents if folder in templates]
    return templates[folders[0]].fill(part) if folders else part


def _usable(read: ReadFile, notes: list[str], are_chats: bool) -> ReadFile:
    """Return a file with Alpaca's prompts filled in, without rows that have no completion."""
    columns = read.columns
    if INPUT in columns and not are_chats:
        read = prompt_forms.fill_alpaca(read)
    if PROMPT in columns:
        prompts_read = read.part.table[columns[PROMPT]].slice(0, _CHECKED_ROWS).to_pylist()
        texts_read = [text for text in prompts_read if isinstance(text, str) and text]
        if texts_read and all(isinstance(values.container(text), list) for text in texts_read):
            raise DataError(
                f"Column {columns[PROMPT]!r} of {read.part.path} holds lists, written as strings, "
                f"such as {texts_read[0][:60]!r}.",
                "Write prompts as texts, or conversations in a column called messages.",
            )
    if COMPLETION in columns:
        cells = read.part.table[columns[COMPLETION]]
        is_kept = values.has_text(cells) if is_string(cells.type) else cells.is_valid()
        part = keep_rows(read.part, is_kept.to_pylist(), "have no completion", notes)
        if PROMPT in columns:
            prompt = columns[PROMPT]
            completion = columns[COMPLETION]
            rows = part.table.select([prompt, completion]).slice(0, _CHECKED_ROWS).to_pylist()
            texts = [(str(row[prompt]).rstrip(), str(row[completion]).strip()) for row in rows]
            seen = sum(text.endswith(answer) for text, answer in texts if answer)
            if seen > _MOST_SEEN * len(rows):
                raise DataError(
                    f"The prompts in column {prompt!r} of {part.path} end with the completions "
                    f"in column {completion!r} ({seen} of the first {len(rows)} rows): the model "
                    "would see the answers.",
                    f"Give task=causal-lm text_column={prompt} (and no prompt_column or "
                    "completion_column) to learn the whole text, or name the column of the "
                    "prompts without the completions in prompt_column.",
                )
            is_text = is_string(part.table.schema.field(prompt).type)
            if empty := values.empty_texts(part, prompt) if is_text else 0:
                notes.append(
                    f"{empty} rows of {part.path} have no prompt in column {columns[PROMPT]!r}: "
                    "their completions are learned without one."
                )
        if not part.table.num_rows:
            raise DataError(
                f"Column {columns[COMPLETION]!r} of {part.path} has no completion in any row.",
                "Name the column of completions in completion_column.",
            )
        return dataclasses.replace(read, part=part)
    if TEXT in columns:
        values.check_texts(read.part, columns[TEXT])
    return read


def _documents(read: ReadFile, are_chats: bool) -> pa.Table:
    part, chosen = read.part, read.columns
    if TOKEN_IDS in chosen:
        return pa.table({TOKEN_IDS: values.token_ids(part, chosen[TOKEN_IDS])})
    if are_chats:
        return pa.table({MESSAGES: prompt_forms.conversations(read)})
    roles = [role for role in _ROLES if role in chosen]
    return pa.table({role: values.texts(part, chosen[role]) for role in roles})
