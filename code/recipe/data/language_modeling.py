"""Load the documents of a job's channels: texts, prompts with completions, conversations."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import (
    classification,
    held_out,
    labelled_rows,
    text_columns,
    values,
)
from recipe.data.column_names import (
    COMPLETION,
    MESSAGES,
    MESSAGES_NAMES,
    PROMPT,
    TEXT,
    TEXT_NAMES,
    TOKEN_IDS,
    TOOLS,
    plain,
)
from recipe.data.conversations import EXAMPLE, conversation
from recipe.data.evidence import DECODER, ENCODER, FILLER, WRITER, Evidence, Recognised
from recipe.data.files import formats
from recipe.data.files.part import Part, is_string
from recipe.data.files.spool import spooled
from recipe.data.held_out import DataSets
from recipe.data.layout import channels as layout
from recipe.data.layout import shards
from recipe.data.reading import describe, only, read_parts
from recipe.errors import DataError, Problems
from recipe.settings import DataSettings

_PLAIN = (".txt", ".text", ".tokens", ".raw")
_ALPACA = ("instruction", "input", "output")
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
_NAMED = (TEXT, PROMPT, COMPLETION, MESSAGES)
"""The columns that hyperparameters may name."""
_LOOKED_AT = 20


@dataclass(frozen=True, kw_only=True)
class Texts(DataSets):
    """Data sets with the column `text`, or `prompt` and `completion`, or `messages` (conversations
    as JSON), or `input_ids`."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    part: Part
    columns: dict[str, str]
    """The parts of a document, and their columns."""
    tools: str | None = None
    """The column of the tools that conversations may call."""


def load(
    channels: Mapping[str, Path],
    settings: DataSettings,
    kinds: Collection[str] = text_columns.DOCUMENTS,
) -> Texts:
    """Read and split the documents of a job's channels.

    Args:
        kinds: The columns that a document may be made of.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    hosts = shards.of_job()
    is_named = any(getattr(settings, f"{name}_column") for name in _NAMED)
    as_given = is_named or PROMPT not in kinds
    units = functools.partial(_units, sample_by=settings.sample_by, as_given=as_given)
    with hosts.together():
        places = layout.find(channels, settings.dataset_config_name, hosts.sharded)
        _refuse_template(channels)
        notes = [*places.notes]
        parts = read_parts(places, notes, units)
        first = next((part for split, part in parts if split == "train" and hosts.sharded), None)
        local = None
        if first is not None:
            local = text_columns.of_documents(first, settings, None, kinds)
    like = hosts.first(local)
    choose = functools.partial(_chosen, settings, kinds, notes)
    read: dict[str, list[_Read]] = {}
    with hosts.together():
        problems = Problems()
        for split, part in parts:
            with problems.noted():
                chosen = choose(part, like)
                like = like or chosen.columns
                read.setdefault(split, []).append(chosen)
        problems.check()
        built = {
            split: held_out.data_set([_documents(file) for file in files])
            for split, files in read.items()
        }
    for split in set().union(*hosts.each(set(read))) - built.keys():
        assert like is not None
        built[split] = held_out.data_set([_empty(like)])
    findings = [_describe(split, files) for split, files in read.items()]
    uses, rule = held_out.assign(built, settings, None, hosts, places.sharded)
    if hosts.sharded:
        rows = zip(hosts.names, hosts.each(len(uses["train"])), strict=True)
        counts = ", ".join(f"{name} {count}" for name, count in rows)
        findings.append(f"sharded: training documents of each host: {counts}")
    return Texts(**uses, found=[*notes, *findings, rule])


def _refuse_template(channels: Mapping[str, Path]) -> None:
    """Raise DataError if a channel has JumpStart's template, which builds prompts from columns."""
    for folder in channels.values():
        path = folder / "template.json"
        try:
            template = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError:
            continue
        if isinstance(template, dict) and {PROMPT, COMPLETION} <= set(template):
            raise DataError(
                f"{path} is a template of JumpStart, which is not applied.",
                f"Apply it to each row, write columns {PROMPT} and {COMPLETION}, and remove it.",
            )


def _empty(columns_: Mapping[str, str]) -> pa.Table:
    kind = pa.large_list(pa.int64()) if TOKEN_IDS in columns_ else pa.large_string()
    return pa.schema([(name, kind) for name in columns_]).empty_table()


def _units(paths: Sequence[Path], sample_by: str, as_given: bool) -> list[Callable[[], Part]]:
    """Return a call for each file that reads it.

    Args:
        as_given: Whether columns are read unchanged, as hyperparameters name some.
    """

    def read(path: Path) -> Part:
        if path.is_file() and _is_plain(path):
            return formats.read_texts(path, sample_by)
        part = formats.read(path, lone_column=True)
        return part if as_given else _with_alpaca_prompts(part)

    return [functools.partial(read, path) for path in paths]


def _is_plain(path: Path) -> bool:
    """Return whether a file is plain text, not a table.

    Raises:
        DataError: it has no suffix and may be either.
    """
    name = path.name.lower().removesuffix(".gz")
    if Path(name).suffix or not formats.is_delimited(path):
        return name.endswith(_PLAIN)
    if formats.is_structured(path, by_names=True):
        return False
    if formats.is_structured(path):
        raise DataError(
            f"{path} has no suffix, and its lines can be split into equally many cells: it may be "
            "a table or text.",
            f"Rename it to {path.name}.txt if its lines are texts, or to {path.name}.csv.",
        )
    return True


def _with_alpaca_prompts(part: Part) -> Part:
    """Replace Alpaca's columns `instruction` and `input` by prompts of Alpaca's template."""
    names = {plain(name): name for name in reversed(part.table.column_names)}
    if not set(_ALPACA) <= set(names):
        return part
    instruction, given, _ = (names[name] for name in _ALPACA)
    kinds = {name: part.table.schema.field(name).type for name in (instruction, given)}
    if not is_string(kinds[instruction]) or not (
        is_string(kinds[given]) or pa.types.is_null(kinds[given])
    ):
        return part
    schema = pa.schema([(instruction, pa.large_string())])

    def prompts() -> Iterator[pa.Table]:
        for _, batch in part.batches([instruction, given]):
            cells = (batch[name].to_pylist() for name in (instruction, given))
            texts = [
                ALPACA_WITH_INPUT.format(instruction_text or "", text)
                if text
                else ALPACA_WITHOUT_INPUT.format(instruction_text or "")
                for instruction_text, text in zip(*cells, strict=True)
            ]
            yield pa.table([pa.array(texts, pa.large_string())], schema=schema)

    part = part.with_column(instruction, spooled(schema, prompts())[instruction])
    return dataclasses.replace(
        part,
        table=part.table.drop_columns([given]),
        format=f"{part.format}, prompts by Alpaca's template",
    )


def _chosen(
    settings: DataSettings,
    kinds: Collection[str],
    notes: list[str],
    part: Part,
    like: dict[str, str] | None,
) -> _Read:
    chosen = text_columns.of_documents(part, settings, like, kinds)
    if COMPLETION in chosen:
        cells = part.table[chosen[COMPLETION]]
        is_kept = cells.is_valid()
        if is_string(cells.type):
            is_kept = pc.fill_null(pc.match_substring_regex(cells, r"\S"), False)
        part = only(part, is_kept.to_pylist(), "have no completion", notes)
        if not part.table.num_rows:
            raise DataError(
                f"Column {chosen[COMPLETION]!r} of {part.path} has no completion in any row.",
                "Name the column of completions in completion_column.",
            )
    if TEXT in chosen:
        values.check_texts(part, chosen[TEXT])
    tools = next((name for name in part.table.column_names if plain(name) == TOOLS), None)
    return _Read(part=part, columns=chosen, tools=tools if MESSAGES in chosen else None)


def recognise(evidence: Evidence) -> Recognised | None:
    """Return that the first rows hold conversations, prompts with completions, or texts.

    Certain are conversations without answers to prefer, and for a decoder prompts without labels,
    and texts without any other column.
    """
    messages = evidence.named(MESSAGES_NAMES)
    if messages is not None and evidence.part is not None:
        try:
            for row, value in enumerate(evidence.values(messages)[:_LOOKED_AT]):
                conversation(evidence.part, row, value, messages)
        except DataError as error:
            if "struct" not in str(evidence.kind(messages)):
                return None  # a column of texts, say
            reason = error.message.removesuffix(".")
            return Recognised(reason=reason, certain=False, remedy=error.remedy)
        is_half = evidence.named(("chosen.value", "chosen.content")) is not None
        return None if is_half else Recognised(reason=f"column {messages} holds conversations")
    prompts, is_decoder = evidence.prompts, evidence.model == DECODER
    is_asked = evidence.settings.prompt_column is not None
    if evidence.part is not None and prompts is not None and (evidence.model != WRITER or is_asked):
        reason = f"columns {' and '.join(prompts)} hold prompts and completions"
        try:
            part = evidence.part if is_asked else _with_alpaca_prompts(evidence.part)
            text_columns.of_documents(part, evidence.settings)
        except DataError as error:
            reason = f"{reason}; but {error.message.removesuffix('.')}"
            is_certain = is_decoder and not evidence.labels_beside(*prompts)
            return Recognised(reason=reason, certain=is_asked or is_certain, remedy=error.remedy)
        reason += "" if is_decoder else ", for a decoder"
        return Recognised(reason=reason, certain=is_asked or is_decoder)
    return _texts_alone(evidence) if is_decoder else None


def recognise_for_encoders(evidence: Evidence) -> Recognised | None:
    """Return that the first rows hold texts without labels, for an encoder with its head."""
    is_lone = evidence.part is not None and evidence.part.table.num_columns == 1
    is_one = evidence.model == FILLER or (evidence.model == ENCODER and is_lone)
    return _texts_alone(evidence) if is_one else None


def _texts_alone(evidence: Evidence) -> Recognised | None:
    """Return that there are texts to learn; certain if there is no other column."""
    if evidence.part is None:
        return None
    names = evidence.part.table.column_names
    text = evidence.named((*TEXT_NAMES, TOKEN_IDS)) or (names[0] if len(names) == 1 else None)
    if text is None or (text != TOKEN_IDS and not is_string(evidence.kind(text))):
        return None
    labelled = classification.recognise(evidence)
    if labelled is not None and labelled.certain:
        return None
    is_certain = len(names) == 1 and evidence.model != ENCODER
    return Recognised(reason=f"column {text} holds texts, for {evidence.model}", certain=is_certain)


def _documents(read: _Read) -> pa.Table:
    if TOKEN_IDS in read.columns:
        return pa.table({TOKEN_IDS: labelled_rows.token_ids(read.part)})
    part, names = read.part, list(read.columns.values())
    of_columns = [part.table[column] for column in names]
    if MESSAGES not in read.columns and all(
        is_string(values_.type) and not values_.null_count for values_ in of_columns
    ):
        texts = [pc.cast(values_, pa.large_string()) for values_ in of_columns]
        return pa.table(dict(zip(read.columns, texts, strict=True)))

    def documents() -> Iterator[pa.Table]:
        wanted = names if read.tools is None else [*names, read.tools]
        for first, batch in part.batches(wanted):
            tools = None if read.tools is None else batch[read.tools].to_pylist()
            cells_of = {name: batch[column].to_pylist() for name, column in read.columns.items()}
            for name, cells in cells_of.items():
                for at, value in enumerate(cells):
                    if MESSAGES in read.columns:
                        cells[at] = conversation(
                            part, first + at, value, read.columns[name], tools and tools[at]
                        )
                    elif isinstance(value, (list, dict)):
                        raise DataError(
                            f"{part.where(first + at)} has no text in column "
                            f"{read.columns[name]!r}, but {json.dumps(value, default=str)[:60]}.",
                            f"Give texts, or conversations in a column called {MESSAGES}: "
                            f"{EXAMPLE}.",
                        )
                    else:
                        cells[at] = "" if value is None else str(value)
            yield pa.table(cells_of, schema)

    schema = pa.schema([(name, pa.large_string()) for name in read.columns])
    return spooled(schema, documents())


def _describe(split: str, files: list[_Read]) -> str:
    rows = sum(file.part.table.num_rows for file in files)
    read = ", ".join(f"{name} column {column!r}" for name, column in files[0].columns.items())
    columns_read = {column for file in files for column in file.columns.values()}
    columns_read |= {"attention_mask", *(file.tools for file in files if file.tools)}
    return describe(split, [file.part for file in files], f"{rows} rows", read, columns_read)
