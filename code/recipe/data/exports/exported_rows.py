"""Read the rows that tools of annotators and platforms export as samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import SPLIT_COLUMNS, plain_name
from recipe.data.exports import word_rows
from recipe.data.files.part import Part, is_list, is_string, keep_rows
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.spec import normalize_name

_ANSWER, _ANSWERS = "answer", {"accept", "reject", "ignore"}
_WORK = {"Mechanical Turk": ("Input.", "Answer."), "Toloka": ("INPUT:", "OUTPUT:")}
"""How the columns begin that are no description of the work."""
_OF_WORK = ("HITId", "WorkerId", "AssignmentId", "GOLDEN:", "HINT:", "ASSIGNMENT:")
"""How some of those begin that describe it."""
_OF_LABELS = {"id", "node_id", "url", "name", "color", "default", "description"}
"""Keys of a label of GitHub."""
_SPLITS = frozenset(map(normalize_name, SPLIT_COLUMNS))


def find_samples(part: Part, settings: DataSettings, notes: list[str]) -> Part:
    """Return the samples of an export: the rows of Prodigy's that annotators accepted, or their
    answers about one class, without the columns that only its interface needs; the inputs and
    answers of Mechanical Turk's and Toloka's; the names of GitHub's labels; the sentences of words
    in rows. Other parts are returned unchanged, as are Prodigy's exports whose column `answer` a
    hyperparameter names.

    Raises:
        DataError: The answers may be what is learned, as those to the question of one class.
    """
    part = word_rows.gather_sentences(
        _name_labels(_keep_answers(part, settings, notes)), settings, notes
    )
    names = {*part.table.column_names} - {*settings.named_columns, *settings.ignored_columns}
    if _ANSWER not in names or not names & {"_input_hash", "_task_hash", "spans"}:
        return part
    if not is_string(part.table.schema.field(_ANSWER).type):
        return part
    answers = part.table[_ANSWER].to_pylist()
    if not {*answers} - {None} or not {*answers} - {None} <= _ANSWERS:
        return part
    marked = [name for name in ("spans", "accept") if name in part.table.column_names]
    is_text = "label" in names and is_string(part.table.schema.field("label").type)
    is_one_class = is_text and len(part.distinct("label", 1) or ()) == 1
    if is_one_class and not any(any(part.table[name].to_pylist()) for name in marked):
        if {*answers} >= {"accept", "reject"}:
            return _learn_answers(part, names, answers, notes)
        marked = []
    if not marked:
        raise DataError(
            f"{part.path} is an export of Prodigy, with the decision of annotators on each row.",
            "Give label_column=answer missing_labels=ignore to learn the answers. Or keep accepted "
            "rows, by: jq -c 'select(.answer == \"accept\") | del(.answer)' "
            f"{part.path.name} > {part.path.stem}-rows.jsonl, and remove it.",
        )
    kept = keep_rows(part, [answer == "accept" for answer in answers],
                     "were not accepted by annotators (Prodigy's answer)", notes)  # fmt: skip
    interface = {_ANSWER, "tokens"} if "spans" in names else {_ANSWER, "options"}
    return dataclasses.replace(kept, table=kept.table.drop_columns(sorted(interface & names)))


def _learn_answers(
    part: Part, names: Collection[str], answers: Sequence[str], notes: list[str]
) -> Part:
    """Return the rows of an export of Prodigy about one class, with the annotators' answers as
    labels.

    Args:
        names: The columns that no hyperparameter names.
    """
    kept = keep_rows(part, [answer in ("accept", "reject") for answer in answers],
                     "were not decided by annotators (Prodigy's answer)", notes)  # fmt: skip
    one_class = part.table["label"][0].as_py()
    notes.append(f"{part.path}: the answers to Prodigy's question of {one_class!r} are learned.")
    shown = {name for name in names if name.startswith("meta.")} | (
        {"score", "priority"} & {*names}
    )
    index = part.table.column_names.index("label")
    table = kept.table.set_column(index, "label", kept.table[_ANSWER])
    return dataclasses.replace(kept, table=table.drop_columns(sorted({_ANSWER, *shown})))


def _name_labels(part: Part) -> Part:
    """Return a part whose labels are lists of names, where they are GitHub's records of labels."""
    if "labels" not in part.table.column_names:
        return part
    kind = part.table.schema.field("labels").type
    record = kind.value_type if is_list(kind) else kind
    keys = {field.name for field in record} if pa.types.is_struct(record) else set()
    if "name" not in keys or keys - _OF_LABELS or not is_string(record.field("name").type):
        return part
    cells = part.table["labels"].to_pylist()
    names = [[(label or {}).get("name") for label in cell or ()] for cell in cells]
    if not is_list(kind) or not all(map(all, names)):
        return part
    index = part.table.column_names.index("labels")
    table = part.table.set_column(index, "labels", pa.array(names, pa.list_(pa.string())))
    return dataclasses.replace(part, table=table)


def _keep_answers(part: Part, settings: DataSettings, notes: list[str]) -> Part:
    """Return the inputs and answers of an export of Mechanical Turk or Toloka, without the columns
    that describe the work, unless hyperparameters name these, or they belong to samples."""
    names = part.table.column_names
    named = {*settings.named_columns, *settings.ignored_columns}
    for work, prefixes in _WORK.items():
        is_told = any(name.startswith(_OF_WORK) for name in names)
        if is_told and all(any(name.startswith(p) for name in names) for p in prefixes):
            left = [
                name
                for name in names
                if not name.startswith(prefixes) and name not in named
                and not {plain_name(name), normalize_name(name)} & _SPLITS
            ]  # fmt: skip
            notes.append(f"{part.path} is an export of {work}; not read: {', '.join(left)}.")
            return dataclasses.replace(part, table=part.table.drop_columns(left))
    return part
