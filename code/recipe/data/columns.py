"""Choose the column of each role of a task, by names alone.

Hyperparameters name columns, and other columns are found by the names that the task's spec lists.
Nothing depends on what the cells hold. A column that belongs to a sample by its name and would not
be read ends the job: a part of a sample that is silently left out makes a wrong model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from recipe.data.column_settings import (
    NOTHING,
    ColumnsError,
    check_named,
    examples,
    is_flag,
    is_identifier,
    languages,
    may_be_text,
    named_settings,
    naming_lines,
    quoted,
    several_candidates,
    split_names,
    takes_pairs,
)
from recipe.data.files.part import UNTAGGED, Part, is_list, is_string
from recipe.errors import DataError
from recipe.settings import COLUMN_SETTINGS, DataSettings
from recipe.spec import (
    CHOSEN_NAMES,
    DESCRIPTIONS,
    HEADS_OF_TEXTS,
    IDENTIFIERS,
    PREFERENCES,
    REJECTED_NAMES,
    TEXTS_OF_SAMPLES,
    Column,
    Form,
    Kind,
    TaskSpec,
    normalized,
    stem,
)
from recipe.task_table import TASKS, names_of_samples

_SHARED = ("text_column", "text_pair_column", "label_column")
"""Hyperparameters that name columns of several tasks."""
_WORDS = re.compile(r"[\s_.-]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_DERIVED = {
    *("label", "annot", "clean", "cleaned", "processed", "preprocessed", "normalized", "tidy"),
    *("lemmatized", "tokenized", "raw", "meta"),
    *("num", "n", "number", "total", "count", "is", "has"),
}
"""Words in names of columns that repeat, count or describe others."""
_MADE_BY_TOOLS = (Kind.TOKEN_IDS, Kind.ARTICLES)
"""Kinds of columns that are always known by name."""
_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
SCRIPT = (
    "Train a model of images and texts by a script of your own (TRL's SFTTrainer; "
    "docs/TRAINING.md, Your own script), or remove these rows."
)
"""The remedy for conversations that hold more than text."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The columns of a file that are read, by their roles."""

    form: Form
    columns: Mapping[str, tuple[str, ...]]

    def __contains__(self, role: str) -> bool:
        return role in self.columns

    def __getitem__(self, role: str) -> str:
        return self.columns[role][0]

    def get(self, role: str) -> str | None:
        """Return the column of an optional role."""
        return self.columns[role][0] if role in self.columns else None

    @property
    def names(self) -> list[str]:
        """Return all columns that are read."""
        return [name for names in self.columns.values() for name in names]

    def describe(self) -> str:
        """Return the roles and their columns, for the log: `text 'review', label 'stars'`."""
        return ", ".join(
            f"{role} {' and '.join(map(repr, names))}" for role, names in self.columns.items()
        )

    def lacking(
        self, part: Part, none: Collection[str] = (), has_empty: bool = False
    ) -> Sequence[str]:
        """Return the columns of inputs, or those of targets, if a file has no value in them.

        Unlabelled test data lacks the targets, and a file of its labels the inputs.

        Args:
            none: Labels that mean "no label".
            has_empty: Whether an empty list is a target, as of a text without entities.
        """
        present = {*part.table.column_names}
        for is_target in (True, False):
            columns = {
                name: column
                for column in self.form.columns
                if column.is_target is is_target and column.is_content
                for name in self.columns.get(column.role, ())
            }
            if columns and not any(
                _has_values(
                    part,
                    name,
                    none if is_target and column.kind is not Kind.TEXT else (),
                    is_target and has_empty,
                )
                for name, column in columns.items()
                if name in present
            ):
                return list(columns)
        return ()


@dataclass(frozen=True, kw_only=True)
class _Match:
    """The columns of a file that can have each role of a form."""

    form: Form
    given: Mapping[str, Sequence[str]]
    """The columns that hyperparameters name."""
    columns: Mapping[str, Sequence[str]]

    @property
    def names(self) -> set[str]:
        return {*itertools.chain(*self.columns.values())}

    @property
    def missing(self) -> list[Column]:
        return [c for c in self.form.columns if not (c.is_optional or self.columns[c.role])]

    @property
    def ambiguous(self) -> list[Column]:
        return [
            column
            for column in self.form.columns
            if len(self.columns[column.role]) > 1
            and not (column.is_repeated or column.role in self.given)
        ]


def select(
    part: Part,
    spec: TaskSpec,
    settings: DataSettings,
    training: Selection | None = None,
    is_detection: bool = False,
    is_trained: bool = True,
) -> Selection:
    """Return the columns of the first form of a task that a file has.

    Args:
        training: The columns of the training data: other files must have the same.
        is_trained: Whether its rows are trained on. If they are only scored, columns that the
            training data lacks are left out.
        is_detection: Leave out what counts only if the hyperparameter `task` is given.

    Raises:
        DataError: a column that is named does not exist; a role has no column or several; or a
            column that belongs to a sample would not be read. The remedy has the line to give.
    """
    if training is not None and not spec.mixes_forms:
        same = _same_columns(part, training)
        if is_trained and (repeated := _match(part, same.form, settings, False)) is not None:
            _check_unread(part, spec, repeated, same, settings, is_first=False)
        return same
    check_named(part, settings)
    _check_preferences(part, settings)
    codes, matches = (settings.source_lang, settings.target_lang), []
    for form in spec.forms:
        if is_detection and form.needs_task:
            continue
        if is_detection and [column.kind for column in form.columns] == [Kind.TEXT]:
            # It would leave out columns that may belong to the sample.
            others = [
                name
                for name in part.table.column_names
                if normalized(name) not in map(normalized, form.columns[0].names)
                and normalized(name.partition(":")[0]) not in IDENTIFIERS
            ]
            if any(_has_values(part, name) for name in others):
                continue
        if (match := _match(part, form, settings, is_detection)) is None:
            continue
        # Hyperparameters of several tasks choose this one only if it knows the names they give.
        if (
            not is_detection
            or spec.owns_settings
            or all(
                form[role].setting not in _SHARED
                or set(map(normalized, names)) <= _known_names(form[role], codes, True)[0]
                for role, names in match.given.items()
            )
        ):
            matches.append(match)
    complete = [match for match in matches if not match.missing]
    for match in (match for match in complete if not match.ambiguous):
        columns = {role: tuple(names) for role, names in match.columns.items() if names}
        selection = Selection(form=match.form, columns=columns)
        try:
            _check_unread(part, spec, match, selection, settings)
            _check_weak_names(part, spec, match, selection, settings)
        except ColumnsError:
            if complete[0].ambiguous:
                break
            raise
        return selection
    if complete:
        candidates = {column: complete[0].columns[column.role] for column in complete[0].ambiguous}
        raise several_candidates(part, spec, candidates, settings)
    raise _no_candidate(part, spec, settings, matches)


def _check_preferences(part: Part, settings: DataSettings) -> None:
    """Raise DataError if a file has preference pairs, unless the user names the columns to read."""
    columns = {normalized(name): name for name in part.table.column_names}
    ignored = set(map(normalized, settings.ignored_columns))
    pair = [
        columns[known]
        for names in (CHOSEN_NAMES, REJECTED_NAMES)
        for known in sorted({*map(normalized, names)} & {*columns} - ignored)[:1]
    ]
    if len(pair) == 2 and not settings.named_columns:
        raise DataError(
            f"{part.path} has the columns {pair[0]!r} and {pair[1]!r}, preference pairs, which no "
            "task of the recipe reads.",
            f"{PREFERENCES} To learn from other columns, name these in hyperparameters.",
        )


def _same_columns(part: Part, training: Selection) -> Selection:
    columns: dict[str, tuple[str, ...]] = {}
    lacking: list[str] = []
    for role, names in training.columns.items():
        present = tuple(name for name in names if name in part.table.column_names)
        if present != names and not training.form[role].is_optional:
            lacking += [name for name in names if name not in present]
        if present:
            columns[role] = present
    if lacking:
        raise ColumnsError(
            f"{part.path} lacks {' and '.join(map(repr, lacking))}, read in the training data: its "
            f"columns are {', '.join(part.table.column_names)}.",
            [],
            "Give the columns the same names in all files, or leave this file out.",
        )
    return dataclasses.replace(training, columns=columns)


def _match(part: Part, form: Form, settings: DataSettings, is_detection: bool) -> _Match | None:
    """Return the columns that can have each role of a form: those that hyperparameters name, or
    those with known names; None if hyperparameters name columns of roles that it does not have."""
    roles = {column.setting: column.role for column in form.columns if column.setting}
    pair = roles.get("text_pair_column")
    given: dict[str, list[str]] = {}
    for key in COLUMN_SETTINGS:
        value = getattr(settings, key)
        if not value:
            continue
        if key not in roles:
            return None
        names = split_names(part, value)
        if key == "text_column" and len(names) == 2 and pair is not None:
            given[pair] = [names.pop()]
        if len(names) > 1 and not form[roles[key]].is_list:
            return None
        given[roles[key]] = names
    for role, name in settings.columns_by_role.items():
        if role not in form.roles:
            return None
        given[role] = [name]
    is_half = roles.get("text_column") in given and pair is not None and pair not in given
    if is_half and form.is_pair:
        return None  # one text was named, not two
    taken = {*itertools.chain(*given.values()), *settings.ignored_columns}
    codes = settings.source_lang, settings.target_lang
    columns: dict[str, Sequence[str]] = {}
    for column in form.columns:
        hits = given.get(column.role, [])
        for known in () if hits else _known_names(column, codes, is_detection):
            hits = hits or [
                field.name
                for field in part.table.schema
                if field.name not in taken
                and (
                    (normalized(field.name) in known and not column.is_numbered)
                    or (column.is_repeated and normalized(field.name) != stem(field.name) in known)
                )
                and (is_list(field.type) or column.kind not in (Kind.TEXTS, Kind.TOKEN_IDS))
                and (column.kind is not Kind.ARTICLES or "qas" in str(field.type))
            ]
        is_free = column.is_optional and not column.is_content
        columns[column.role] = hits[:1] if is_free else hits
    return _Match(form=form, given=given, columns=columns)


@functools.cache
def _known_names(
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
        known.append(frozenset(map(normalized, expanded)))
    return known


def _no_candidate(
    part: Part, spec: TaskSpec, settings: DataSettings, matches: Sequence[_Match]
) -> DataError:
    """Return the refusal of a file that has no form of a task, by the form that lacks least."""
    if not matches:
        return ColumnsError(
            f"{spec.name} has no form of data with all the columns that are named: "
            f"{named_settings(settings)}.",
            [],
            "Leave some out; docs/DATA.md lists the columns of each task.",
            len(settings.named_columns) + 1,
            is_near=False,
        )

    def proposed(match: _Match) -> list[str]:
        ignored = {*match.names, *settings.ignored_columns}
        return naming_lines(part, match.missing, ignored, settings)

    usual = [m for m in matches if all(c.kind not in _MADE_BY_TOOLS for c in m.form.columns)]
    match = min(
        usual or matches,
        key=lambda m: (
            len(m.missing),
            m.form.is_pair,
            not m.missing[0].is_target and proposed(m)[0].endswith("..."),
            -sum(map(bool, m.columns.values())),
            m.missing[0].setting != "text_column",
        ),
    )
    missing = match.missing
    advice = "docs/DATA.md lists the names that are known."
    if lines := languages(part, spec):
        missing = missing[:1]
    elif part.table.num_rows == 1 and ".json" in part.path.suffixes:
        advice = 'It has one row: write a list of rows, [{"text": "...", "label": "..."}, ...].'
    else:
        lines = proposed(match)
        texts = [Kind.TEXT, Kind.TEXT, *[Kind.ANY] * (len(part.table.column_names) == 3)]
        pairs = (m for m in usual if [c.kind for c in m.missing] in (texts, texts[:2]))
        if not match.names and (pair := next(pairs, None)) is not None:
            lines += [one for one in proposed(pair)[:4] if one not in lines and "..." not in one]
    roles = " and the ".join(column.role for column in match.missing)
    return ColumnsError(
        f"{part.path} has no column that is known by name as the {roles} of {spec.name}; its "
        f"columns are {examples(part, part.table.column_names)}.",
        lines,
        advice,
        len(missing),
        bool(match.names) or len(missing) < len(match.missing),
        is_close=len(missing) == 1 < len(match.names),
    )


def _check_unread(
    part: Part,
    spec: TaskSpec,
    match: _Match,
    selection: Selection,
    settings: DataSettings,
    is_first: bool = True,
) -> None:
    """Raise DataError if columns that belong to a sample by their names would not be read.

    It is allowed if the user has named an input, and so what a sample is made of.

    Args:
        is_first: Whether other files take their columns from this one.
    """
    inputs = [column for column in match.form.columns if not column.is_target]
    if any(column.role in match.given for column in inputs):
        return
    is_target_named = bool(match.given)
    read = {*selection.names, *settings.ignored_columns}
    extras = set(map(normalized, match.form.extras))
    unread = [
        name
        for name in part.table.column_names
        if name not in read
        and normalized(name) not in extras
        and _belongs(part, name, is_target_named)
        and _has_values(part, name)
    ]
    if not unread:
        return
    left_out = ",".join([*settings.ignored_columns, *unread])
    ways = [f"ignore_columns={quoted(left_out)} to leave out what is not meant"]
    is_single = is_first and "text_pair" not in selection and takes_pairs(spec)
    is_text = is_string(part.table.schema.field(unread[0]).type)
    if is_single and len(unread) == is_text and [c.setting for c in inputs] == ["text_column"]:
        texts = quoted(f"{selection[inputs[0].role]},{unread[0]}")
        ways.append(f"text_column={texts} to read both texts as a pair")
    for other in TASKS.values() if is_first else ():
        for form in other.forms:
            if other is spec or form.needs_task:
                continue
            other_match = _match(part, form, settings, True)
            if other_match is None or other_match.missing or other_match.ambiguous:
                continue
            rest = [name for name in part.table.column_names if name not in other_match.names]
            if {*unread} <= other_match.names and not any(
                _belongs(part, name, False) for name in rest
            ):
                ways.append(f"task={other.name} to read what belongs together")
                break
    is_media = all(normalized(name.partition(".")[0]) in _MEDIA for name in unread)
    advice = "" if is_first else "To read them, give all files of the training data these columns."
    raise ColumnsError(
        f"{part.path} has values in {examples(part, unread)}, which by name belong to a sample "
        f"and would not be read by {spec.name} (it reads {selection.describe()}).",
        [] if is_media else ways,
        SCRIPT if is_media else advice,
        is_rival=len(selection.columns) > 1,
    )


def _check_weak_names(
    part: Part, spec: TaskSpec, match: _Match, selection: Selection, settings: DataSettings
) -> None:
    """Raise DataError if a column is found by a weak name, and others would not be read that may
    be meant."""
    if match.form.is_pair:
        return
    ignored = {*selection.names, *settings.ignored_columns}
    for column in match.form.columns:
        name = selection.get(column.role)
        if column.role in match.given or normalized(name or "") not in column.weak_names:
            continue
        others = [
            other
            for other in part.table.column_names
            if other not in ignored
            and normalized(other.partition(":")[0]) not in IDENTIFIERS | DESCRIPTIONS
            and _words_of(other)[-1] not in IDENTIFIERS | DESCRIPTIONS
            and not is_identifier(other)
            and (may_be_text if column.kind is Kind.TEXT else is_flag)(part, other)
        ]
        if others:
            raise several_candidates(part, spec, {column: [str(name), *others]}, settings)


def _belongs(part: Part, name: str, is_target_named: bool) -> bool:
    """Return whether a column belongs to a sample by its name, or by the last part of a record's
    name."""
    whole = normalized(name)
    first, last = whole.partition(".")[0], whole.rpartition(".")[2]
    keys = {whole, last, stem(name), stem(last)}
    known_names = names_of_samples()
    if keys & known_names.parts or (first != whole and first in known_names.parts):
        return True
    if stem(name) != whole and stem(name) in known_names.numbered:
        return True
    if known := [known_names.single[key] for key in keys if key in known_names.single]:
        return not (is_target_named and all(known))
    *qualifiers, noun = words = _words_of(name)
    if qualifiers and known_names.parts.issuperset(words):  # `Aspect Term`
        return True
    is_texts = is_string(kind := part.table.schema.field(name).type) or (
        is_list(kind) and is_string(kind.value_type)
    )
    is_part = noun in HEADS_OF_TEXTS and any(
        words[:-1] == qualifiers and words[-1] in TEXTS_OF_SAMPLES
        for words in map(_words_of, part.table.column_names)
    )
    if is_texts and qualifiers and (noun in TEXTS_OF_SAMPLES or is_part):
        is_about_users = [*qualifiers, noun] == ["user", "description"]
        is_target = is_target_named and known_names.single.get(noun, False)
        return not (is_about_users or is_target or _DERIVED & {*qualifiers})
    others = {normalized(other) for other in part.table.column_names}
    return any(
        keys & pair and pair - keys <= others and not (is_target_named and keys & targets)
        for pair, targets in known_names.pairs.items()
    )


def _words_of(name: str) -> list[str]:
    """Return the words of a column's name, the last one in the singular; [""] without any."""
    words = [word.lower() for word in _WORDS.split(name.strip().rstrip("0123456789")) if word]
    *qualifiers, noun = words or [""]
    return [*qualifiers, f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")]


def _has_values(part: Part, name: str, none: Collection[str] = (), has_empty: bool = False) -> bool:
    cells = (cell for _, batch in part.batches([name]) for cell in batch[name].to_pylist())
    return any(
        any(item != UNTAGGED for item in cell) or (has_empty and not cell)
        if isinstance(cell, list)
        else (cell.strip() if isinstance(cell, str) else cell) not in NOTHING
        and str(cell).strip() not in none
        for cell in cells
    )
