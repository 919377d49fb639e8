"""Load sources and targets: documents and summaries, texts and translations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out
from recipe.data.column_names import (
    COMPLETION_NAMES,
    PROMPT_NAMES,
    PROMPT_PARTS,
    SURE_LABELS,
    TEXT,
    plain,
)
from recipe.data.columns import Role, choose
from recipe.data.evidence import WRITER, Evidence, Recognised
from recipe.data.files.part import Part, is_string
from recipe.data.files.spool import spooled
from recipe.data.held_out import DataSets
from recipe.data.layout import channels as layout
from recipe.data.reading import describe, read_parts
from recipe.errors import DataError, Problems
from recipe.settings import DataSettings

SOURCE, TARGET = "source", "target"
SUMMARIES = (
    ("document", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("article", "summary"),
    ("text", "summary"),
    ("article", "abstract"),
    ("description", "abstract"),
    ("report", "summary"),
    ("body", "summary"),
    ("content", "summary"),
    ("news_body", "news_title"),
    ("extract_text", "summary_text"),
    ("transcript", "summary"),
    ("documents", "tldr"),
    ("text", "tldr"),
    ("text", "headline"),
    ("article", "headline"),
    ("text", "abstract"),
    ("email_body", "subject_line"),
)
"""Names of the columns of documents and summaries."""
PAIRS = (
    ("source", "target"),
    ("src", "tgt"),
    ("source_text", "target_text"),
    ("input_text", "target_text"),
    ("text", "target"),
    ("input", "target"),
    ("inputs", "targets"),
    ("inputs", "labels"),
    ("input", "output"),
    ("source", "translation"),
    ("text", "translation"),
    *((prompt, answer) for prompt in PROMPT_NAMES for answer in COMPLETION_NAMES),
)
"""Names of the columns of other sources and targets."""
_TRANSLATION = "translation"
_PARTS = (*PROMPT_PARTS, *SURE_LABELS, TEXT, "instruction", "prefix", "question", "query")
"""Names of columns that belong to a source, or select targets."""
_LANGUAGES = (
    *("source_lang", "src_lang", "source_language", "src_language", "from_lang", "direction"),
    *("target_lang", "tgt_lang", "target_language", "tgt_language", "to_lang", "lang_pair"),
    "language_pair",
)
"""Names of columns with the languages of a row."""
_MOST_LANGUAGES = 1_000


@dataclass(frozen=True, kw_only=True)
class TextPairs(DataSets):
    """Data sets with the columns `source` and `target`."""


def load(channels: Mapping[str, Path], settings: DataSettings) -> TextPairs:
    """Read and split the pairs of a job's channels. A row without either text is not used.

    Raises:
        DataError: names the channel, file or column that cannot be used, and the remedy.
    """
    places = layout.find(channels, settings.dataset_config_name)
    notes = list(places.notes)
    built: dict[str, list[pa.Table]] = {}
    parts: dict[str, list[Part]] = {}
    like: dict[str, str] | None = None
    problems = Problems()
    for split, part in read_parts(places, notes):
        with problems.noted():
            columns = _columns(part, settings, like)
            like = like or columns
            built.setdefault(split, []).append(
                _texts(part, columns[SOURCE], columns[TARGET], notes)
            )
            parts.setdefault(split, []).append(part)
    problems.check()
    sets = {split: held_out.data_set(tables) for split, tables in built.items()}
    for split, rows in sets.items():
        if not len(rows):
            raise DataError(
                f"The {split} data has no row with both texts.", "Give pairs, or leave it out."
            )
    uses, rule = held_out.assign(sets, settings)
    shown = ", ".join(f"{what} column {name!r}" for what, name in (like or {}).items())
    findings = [
        describe(split, of_split, f"{len(sets[split])} rows", shown, (like or {}).values())
        for split, of_split in parts.items()
    ]
    return TextPairs(**uses, found=[*notes, *findings, rule])


def _columns(
    part: Part, given: DataSettings, like: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the columns of the source and of the target.

    Raises:
        DataError: a given column does not exist, or none is known by name.
    """
    known = [*_of_languages(given), *SUMMARIES, *PAIRS]
    names = part.table.column_names
    languages = [name.partition(".")[2] for name in names if name.startswith(f"{_TRANSLATION}.")]
    is_given = given.text_column is not None or given.label_column is not None
    if is_given:
        # A column that is named stands for its own pair only.
        named = (given.text_column, given.label_column)
        known = [
            pair
            for pair in known
            if all(
                column is None or plain(column) == name
                for column, name in zip(named, pair, strict=True)
            )
        ]
    elif languages and not _of_languages(given):
        raise DataError(
            f"{part.path} has translations between {' and '.join(languages)}: which is the source "
            "is not known.",
            f"Give source_lang={languages[0]} and target_lang={languages[-1]}, or the reverse.",
        )
    alternatives = [[Role(SOURCE, (source,), "text_column", parts=_PARTS),
                     Role(TARGET, (target,), "label_column")]
                    for source, target in [*known, ("", "")]]  # fmt: skip
    chosen = choose(part, alternatives, given, like)
    if given.text_column is None:
        _refuse_several_languages(part, chosen[SOURCE])
    return chosen


def _refuse_several_languages(part: Part, source: str) -> None:
    """Raise DataError if rows are of several languages: a job learns one direction."""
    for name in part.table.column_names:
        is_known = plain(name) in _LANGUAGES and is_string(part.table.schema.field(name).type)
        if is_known and len(codes := part.distinct(name, _MOST_LANGUAGES) or ["many"]) != 1:
            raise DataError(
                f"{part.path} has rows of several languages by column {name!r} "
                f"({', '.join(map(str, codes[:3]))} ...), and one direction is trained.",
                "Keep the rows of one direction, with source_lang and target_lang if the model "
                f"needs them; or give text_column={source} if the texts name the language.",
            )


def _of_languages(given: DataSettings) -> list[tuple[str, str]]:
    """Return the names of columns that source_lang and target_lang may stand for.

    They are `translation.en` or `en`, for `en` or `en_XX`.
    """
    if given.source_lang is None or given.target_lang is None:
        return []
    codes = (given.source_lang, given.target_lang)
    forms = dict.fromkeys((codes, (codes[0].split("_")[0], codes[1].split("_")[0])))
    pairs = [(plain(stem + source), plain(stem + target))
             for source, target in forms for stem in (f"{_TRANSLATION}.", "")]  # fmt: skip
    return [pair for pair in pairs if pair[0] != pair[1]]


def _texts(part: Part, source: str, target: str, notes: list[str]) -> pa.Table:
    """Return the rows with both texts; a note counts the others."""
    for name in (source, target):
        if name in part.mixed:
            raise DataError(
                f"{part.path} has texts and other values in column {name!r}: {part.mixed[name]}.",
                "Give texts.",
            )
    schema = pa.schema([(SOURCE, pa.large_string()), (TARGET, pa.large_string())])

    def pairs() -> Iterator[pa.Table]:
        for first, batch in part.batches([source, target]):
            columns = [batch[name].to_pylist() for name in (source, target)]
            for name, cells in zip((source, target), columns, strict=True):
                for at, cell in enumerate(cells):
                    if isinstance(cell, (list, dict)):
                        raise DataError(
                            f"{part.where(first + at)} has no text in column {name!r}, but "
                            f"{str(cell)[:60]}.",
                            "Give texts.",
                        )
            texts = [["" if cell is None else str(cell) for cell in cells] for cells in columns]
            rows = [(a, b) for a, b in zip(*texts, strict=True) if a.strip() and b.strip()]
            both = {SOURCE: [a for a, _ in rows], TARGET: [b for _, b in rows]}
            yield pa.table(both, schema)

    table = spooled(schema, pairs())
    if left_out := part.table.num_rows - table.num_rows:
        notes.append(f"{left_out} rows of {part.path} lack a text and are not used.")
    return table


def recognise_summaries(evidence: Evidence) -> Recognised | None:
    """Return that the first rows hold documents and summaries, for an encoder with a decoder."""
    return _recognised(evidence, SUMMARIES, "documents and summaries")


def recognise_translations(evidence: Evidence) -> Recognised | None:
    """Return that the first rows hold translations, for an encoder with a decoder."""
    if evidence.model != WRITER or evidence.part is None:
        return None
    pairs = _of_languages(evidence.settings)
    if any(evidence.named([source]) and evidence.named([target]) for source, target in pairs):
        return Recognised(reason="source_lang and target_lang name columns")
    if any(plain(name).startswith(f"{_TRANSLATION}.") for name in evidence.part.table.column_names):
        return Recognised(reason=f"column {_TRANSLATION} holds a text in several languages")
    return None


def recognise_others(evidence: Evidence) -> Recognised | None:
    """Return that the first rows hold other texts and what is written for each."""
    if recognise_translations(evidence) or recognise_summaries(evidence):
        return None
    names = [] if evidence.part is None else evidence.part.table.column_names
    if evidence.model == WRITER and len(names) == 1 and is_string(evidence.kind(names[0])):
        return Recognised(
            reason=f"column {names[0]} holds texts, and no column what to write for them",
            certain=False,
            remedy="Add a column target, or start from a decoder (task=causal-lm) or an encoder "
            "(task=masked-lm).",
        )
    return _recognised(evidence, PAIRS, "texts")


def _recognised(
    evidence: Evidence, known: Sequence[tuple[str, str]], what: str
) -> Recognised | None:
    """Return that columns are known as a source and a target; certain for an encoder with a
    decoder, if no labels stand beside.
    """
    is_writer = evidence.model == WRITER
    for names in known if is_writer or known is SUMMARIES else ():
        pair = [evidence.named([name]) for name in names]
        if pair[0] and pair[1] and is_string(evidence.kind(pair[1])):
            reason = f"columns {pair[0]} and {pair[1]} hold {what} to read and write"
            is_labelled = bool(evidence.labels_beside(*pair))
            # A target of few values may be a class, but a summary is a text.
            is_labelled |= known is not SUMMARIES and bool(evidence.classes([pair[1]]))
            is_certain = is_writer and not is_labelled
            reason += "" if is_writer else f", for {WRITER}"
            return Recognised(reason=reason, certain=is_certain)
    return None
