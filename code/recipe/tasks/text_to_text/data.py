"""Load sources and targets: documents and summaries, texts and translations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import held_out, values
from recipe.data.column_names import ADDRESS, SOURCE, TARGET, plain_name
from recipe.data.files.part import is_string, keep_rows
from recipe.data.held_out import DataSets
from recipe.data.reading import ReadFile, read_columns
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.task_table import TASKS

_LANGUAGES = (
    *("source_lang", "src_lang", "source_language", "src_language", "from_lang", "direction"),
    *("target_lang", "tgt_lang", "target_language", "tgt_language", "to_lang", "lang_pair"),
    "language_pair",
)
"""Names of columns with the languages of a row."""
_MOST_LANGUAGES = 1_000


def load(channels: Mapping[str, Path], settings: DataSettings) -> DataSets:
    """Read and split the pairs of a job's channels. A row without either text is not used.

    Returns:
        Data sets with the columns `source` and `target`.

    Raises:
        DataError: names the channel, file or column that cannot be used, and the remedy.
    """
    notes: list[str] = []
    spec = TASKS[settings.task or "text2text-generation"]
    reading = read_columns(channels, spec, settings, notes)
    checks_languages = settings.text_column is None
    tables = reading.converted(lambda file: _texts(file, checks_languages, notes))
    uses, findings = held_out.build(
        reading, tables, settings, "row with both texts", lambda rows: f"{len(rows)} rows"
    )
    return DataSets(**uses, notes=[*notes, *findings])


def _texts(file: ReadFile, checks_languages: bool, notes: list[str]) -> pa.Table:
    """Return the rows with both texts; a note counts the others."""
    part, source, target = file.part, file.columns[SOURCE], file.columns[TARGET]
    for field in part.table.schema if checks_languages else ():
        if plain_name(field.name) in _LANGUAGES and is_string(field.type):
            codes = part.distinct(field.name, _MOST_LANGUAGES) or ["many"]
            if len(codes) != 1:
                raise DataError(
                    f"{part.path} has rows of several languages by column {field.name!r} "
                    f"({', '.join(map(str, codes[:3]))} ...), but only one direction is trained.",
                    "Keep the rows of one direction, with source_lang and target_lang if the "
                    f"model needs them; or give text_column={source} if the texts name the "
                    "language.",
                )
    both = [values.texts(part, column) for column in (source, target)]
    are_there = pc.and_(*map(values.has_text, both))
    part = keep_rows(part, are_there.to_pylist(), "lack a text", notes)
    return pa.table({
        SOURCE: values.texts(part, source),
        TARGET: values.texts(part, target),
        ADDRESS: part.addresses(),
    })  # fmt: skip
