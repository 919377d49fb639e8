"""Match the columns of a file with the roles of a task's forms, by the names that users and specs
give."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa  # type: ignore[import-untyped]

from recipe import column_words
from recipe.column_words import words_of
from recipe.data.column_settings import (
    NOTHING,
    holds_long_texts,
    is_beside_responses,
    is_category,
    is_flag,
    is_identifier,
    labels_spans,
    sample_cells,
    split_names,
)
from recipe.data.files.part import UNTAGGED, Part, is_list
from recipe.settings import COLUMN_SETTINGS, DataSettings
from recipe.spec import (
    IDENTIFIERS,
    PARTS_OF_SAMPLES,
    CellKind,
    Column,
    Form,
    TaskSpec,
    name_stem,
    normalize_name,
)
from recipe.task_table import names_target

PAIRED = "text_pair_column"
_RECORDS = {CellKind.ARTICLES: "qas", CellKind.TURNS: "parts"}
"""Kinds of records, and a key that they have."""
_SHARED = ("text_column", PAIRED, "label_column")
"""Hyperparameters that name columns of several tasks."""


@dataclass(frozen=True, kw_only=True)
class ColumnMatch:
    """The columns of a file that can have each role of a form."""

    form: Form
    given: Mapping[str, Sequence[str]]
    """The columns that hyperparameters name."""
    columns: Mapping[str, Sequence[str]]

    @property
    def missing(self) -> list[Column]:
        """Return the roles that have no column."""
        return [c for c in self.form.columns if not (c.is_optional or self.columns[c.role])]

    @property
    def ambiguous(self) -> list[Column]:
        """Return the roles that have several columns."""
        return [
            column
            for column in self.form.columns
            if len(self.columns[column.role]) > 1
            and not (column.is_repeated or column.role in self.given)
        ]


def match_forms(
    part: Part, spec: TaskSpec, settings: DataSettings, is_detection: bool
) -> list[ColumnMatch]:
    """Return what each form of a task finds in a file, without forms that hyperparameters of other
    tasks choose."""
    codes = (settings.source_lang, settings.target_lang)
    matches = []
    for form in spec.forms:
        if is_detection and form.needs_task:
            continue
        if is_detection and [column.kind for column in form.columns] == [CellKind.TEXT]:
            # It would leave out columns that may belong to the sample.
            alone = {*map(normalize_name, (*form.columns[0].names, *form.extras)), *IDENTIFIERS}
            others = [
                name
                for name in part.table.column_names
                if alone.isdisjoint(map(normalize_name, (name, name.partition(":")[0])))
                and not _is_aside(part, name, spec.name == "causal-lm")
            ]
            if any(has_values(part, name) for name in others):
                continue
        if (match := match_form(part, form, settings, is_detection)) is None:
            continue
        # Hyperparameters of several tasks choose this one only if it knows the names they give.
        if (
            not is_detection
            or spec.owns_settings
            or all(
                match.form[role].setting not in _SHARED
                or set(map(normalize_name, names)) <= known_names(match.form[role], codes, True)[0]
                for role, names in match.given.items()
            )
        ):
            matches.append(match)
    return matches


def _is_aside(part: Part, name: str, of_corpus: bool) -> bool:
    """Return whether a column describes a text by its name, and holds neither classes nor texts.

    Args:
        of_corpus: Whether texts are continued, whose classes are not learned.
    """
    if (
        normalize_name(name) in PARTS_OF_SAMPLES
        or names_target(name)
        or not (is_identifier(name) or column_words.ends_in(name, column_words.METADATA))
    ):
        return False
    is_learned = is_flag(part, name) or is_category(part, name)
    is_learned = is_learned and len(part.distinct(name, 1) or "ab") > 1
    return not (is_learned and not of_corpus) and not holds_long_texts(part, name)


def _given_columns(part: Part, form: Form, settings: DataSettings) -> dict[str, list[str]] | None:
    """Return the columns that hyperparameters name for the roles of a form; None if they name
    columns of roles that it does not have."""
    roles = {column.setting: column.role for column in form.columns if column.setting}
    pair = roles.get(PAIRED)
    given: dict[str, list[str]] = {}
    for key in COLUMN_SETTINGS:
        if not (value := getattr(settings, key)):
            continue
        if key not in roles:
            return None
        names = split_names(part, value)
        if key == "text_column" and len(names) == 2 and pair is not None:
            given[pair] = [names.pop()]
        if len(names) > 1 and not form[roles[key]].is_list:
            return None
        given[roles[key]] = names
    for role, names in settings.columns_by_role.items():
        if role not in form.roles or (len(names) > 1 and not form[role].is_repeated):
            return None
        given[role] = [*names]
    is_half = roles.get("text_column") in given and pair is not None and pair not in given
    if is_half and (form.is_pair or "text_pair" in form.roles):
        return None  # one text was named, not two
    return given


def match_form(
    part: Part, form: Form, settings: DataSettings, is_detection: bool
) -> ColumnMatch | None:
    """Return the columns that can have each role of a form: those that hyperparameters name, or
    those with known names; None if hyperparameters name columns of roles that it does not have."""
    given = _given_columns(part, form, settings)
    if given is None:
        return None
    taken = {*itertools.chain(*given.values()), *settings.ignored_columns}
    codes = settings.source_lang, settings.target_lang
    taken |= {n for n in part.table.column_names if is_beside_responses(n, part.table.column_names)}
    free = [field for field in part.table.schema if field.name not in taken]
    if form.pairs:
        names_here = {*map(normalize_name, part.table.column_names)} - {
            *map(normalize_name, settings.ignored_columns)
        }
        form = max(
            _forms_of_pairs(form),
            key=lambda paired: sum(
                not names_here.isdisjoint(known_names(column, codes, True)[0])
                for column in paired.columns[:2]
            ),
        )
    columns: dict[str, Sequence[str]] = {}
    similar: set[str] = set()
    """Roles whose columns are only like the known names."""
    for column in form.columns:
        hits = given.get(column.role, [])
        # A column whose type says that it labels spans needs no task to be found.
        is_by_name = is_detection and column.kind is not CellKind.SPANS
        for known in () if hits else known_names(column, codes, is_by_name):
            hits = hits or [
                field.name
                for field in free
                if (
                    ((key := normalize_name(field.name)) in known and not column.is_numbered)
                    or (column.is_repeated and key != name_stem(field.name) in known)
                )
                and _may_hold(part, field, column, is_detection)
            ]
        if not hits:
            hits = [f.name for f in free if column.is_like(f.name) and not is_list(f.type)]
            if column.is_target and column.kind is not CellKind.TEXT:  # no class for all rows
                hits = [name for name in hits if len(part.distinct(name, 1) or "ab") > 1]
                hits = [name for name in hits if not (is_detection and labels_spans(part, name))]
            similar.add(column.role)
        if column.is_heading and not hits:
            hits = [field.name for field in free if _heads(field.name, part.table.column_names)]
        is_free = column.is_optional and not column.is_content
        columns[column.role] = hits[:1] if is_free else hits
    likelier = {
        role: _likelier(role, names, columns, role in similar)
        for role, names in columns.items()
        if len(names) > 1 and role not in given and not form[role].is_repeated
    }
    return ColumnMatch(form=form, given=given, columns={**columns, **likelier})


def _may_hold(part: Part, field: pa.Field, column: Column, is_detection: bool) -> bool:
    """Return whether a column with a known name may have a role by its type."""
    if _RECORDS.get(column.kind, "") not in str(field.type):
        return False
    if column.kind in (CellKind.TEXTS, CellKind.TOKEN_IDS):
        return is_list(field.type)
    if not is_detection:
        return True
    if field.name == "candidates" and not is_list(field.type):  # or one person's name
        return str(next(iter(sample_cells(part, field.name)), "")).startswith("[")
    if column.kind is CellKind.SPANS and normalize_name(field.name) in column.names:
        return True
    if column.is_target and column.kind in (CellKind.SPANS, CellKind.ANY):
        return labels_spans(part, field.name) is (column.kind is CellKind.SPANS)
    return not (is_list(field.type) and column.kind is CellKind.TEXT)


def _heads(name: str, names: Sequence[str]) -> bool:
    """Return whether a column heads another one by their names: `Review Title`, `Review Text`, or
    `Judul`, `Isi Berita`; a title of a thing, or above a review of it, does not."""
    *qualifiers, noun = words_of(name)
    if noun not in column_words.TITLES or not column_words.THINGS.isdisjoint(qualifiers):
        return False
    return any(
        words_of(other)[-1] in column_words.BODIES
        or (qualifiers and words_of(other)[:-1] == qualifiers
            and words_of(other)[-1] in column_words.TEXTS)
        for other in names
        if other != name and ("." in other) == ("." in name)
    )  # fmt: skip


def _likelier(
    role: str, names: Sequence[str], columns: Mapping[str, Sequence[str]], are_similar: bool
) -> Sequence[str]:
    """Return the columns that are left for a role without those that have another one by their
    names: `note` is a label beside `commentaire`, and `email` an address beside `description`."""
    others = {some[0] for other, some in columns.items() if len(some) == 1 and other != role}
    if are_similar:
        names = [name for name in names if name not in others] or names
        names = [name for name in names if words_of(name)[0] not in column_words.DATES] or names
    if role == "label" and (exact := [name for name in names if is_label(name)]):
        same = [name for name in names if words_of(name)[-1] in column_words.LABELLED]
        names = exact if len(same) == len(exact) else names
    described = column_words.METADATA | column_words.STATES | column_words.RECORDS
    return [name for name in names if not column_words.ends_in(name, described)] or names


def is_label(name: str) -> bool:
    """Return whether a column is called label, in any language."""
    names = normalize_name(name), column_words.plain_word(name)
    return not column_words.LABELLED.isdisjoint(names)


@functools.cache
def _forms_of_pairs(form: Form) -> Sequence[Form]:
    return [form.with_pair(pair) for pair in form.pairs]


@functools.cache
def known_names(
    column: Column, codes: tuple[str | None, str | None], is_detection: bool
) -> Sequence[frozenset[str]]:
    """Return the normalized names of a column; first those that count on their own.

    Args:
        codes: The hyperparameters source_lang and target_lang. `en` stands for `en_XX`, too.
    """
    full = codes[0] or "", codes[1] or ""
    known = []
    for names in [column.names] if is_detection else [column.names, column.names_of_task]:
        expanded = [name for name in names if "{" not in name]
        for source, target in {full, (full[0].split("_")[0], full[1].split("_")[0])}:
            if source and target and source != target:
                values = {"source_lang": source, "target_lang": target}
                expanded += [name.format(**values) for name in names if "{" in name]
        known.append(frozenset(map(normalize_name, expanded)))
    return known


def has_values(part: Part, name: str, none: Collection[str] = (), has_empty: bool = False) -> bool:
    """Return whether a column has a value.

    Args:
        none: Texts that mean "no value".
        has_empty: Whether an empty list is one.
    """
    cells = (cell for _, batch in part.batches([name]) for cell in batch[name].to_pylist())
    return any(
        any(item != UNTAGGED for item in cell) or (has_empty and not cell)
        if isinstance(cell, list)
        else (cell.strip() if isinstance(cell, str) else cell) not in NOTHING
        and str(cell).strip() not in none
        for cell in cells
    )
