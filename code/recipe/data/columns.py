"""Choose the column of each role of a task, by names alone.

Hyperparameters name columns, and other columns are found by the names that the task's spec lists.
What the cells hold can only end the job. So does a column that belongs to a sample by its name and
would not be read: a part of a sample that is silently left out makes a wrong model.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from recipe import column_words
from recipe.column_words import words_of
from recipe.data.column_matching import (
    PAIRED,
    ColumnMatch,
    has_values,
    is_label,
    known_names,
    match_form,
    match_forms,
)
from recipe.data.column_settings import (
    ColumnsError,
    PreferencesError,
    check_named,
    holds_codes,
    holds_long_texts,
    holds_texts,
    is_category,
    is_flag,
    is_identifier,
    is_in_sample,
    is_search,
    may_be_text,
    named_settings,
    quote_value,
    show_examples,
    verdicts_in,
)
from recipe.data.files.part import Part
from recipe.settings import DataSettings
from recipe.spec import (
    ANNOTATORS,
    CHOSEN_NAMES,
    DESCRIPTIONS,
    IDENTIFIERS,
    PREFERENCES,
    PROMPT_NAMES,
    REJECTED_NAMES,
    TALK_NAMES,
    CellKind,
    Column,
    Form,
    TaskSpec,
    normalize_name,
)
from recipe.task_table import names_target

_CLASSES = column_words.LABELS | column_words.OTHER_LABELS
"""Last words of names of classes, which are left out if another column is called label."""
_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
TURNS = (
    'If each row is a turn, write each conversation as a row: {"messages": [{"role": "user", '
    '"content": "..."}, {"role": "assistant", "content": "..."}]}.'
)
"""The remedy for turns of conversations in rows of their own."""
SCRIPT = (
    "Train a model of images and texts by a script of your own (TRL's SFTTrainer; "
    "docs/TRAINING.md, Your own script), or remove these rows."
)
"""The remedy for conversations that hold more than text."""


@dataclass(frozen=True, kw_only=True)
class ColumnSelection:
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

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return the columns that are no targets."""
        roles = [column.role for column in self.form.columns if not column.is_target]
        return {role: names for role, names in self.columns.items() if role in roles}

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
                has_values(
                    part,
                    name,
                    none if is_target and column.kind is not CellKind.TEXT else (),
                    is_target and has_empty,
                )
                for name, column in columns.items()
                if name in present
            ):
                return list(columns)
        return ()


def select_columns(
    part: Part,
    spec: TaskSpec,
    settings: DataSettings,
    training: ColumnSelection | None = None,
    is_detection: bool = False,
    is_trained: bool = True,
) -> ColumnSelection:
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
        if is_trained and (repeated := match_form(part, same.form, settings, False)) is not None:
            _check_unread(part, spec, repeated, same, settings, is_first=False)
        return same
    check_named(part, settings)
    if "chosen" not in {column.role for form in spec.forms for column in form.columns}:
        _check_preferences(part, settings)
    matches = match_forms(part, spec, settings, is_detection)
    complete = [match for match in matches if not match.missing]
    error: ColumnsError | None = None
    for match in (match for match in complete if not match.ambiguous):
        columns = {role: tuple(names) for role, names in match.columns.items() if names}
        selection = ColumnSelection(form=match.form, columns=columns)
        try:
            _check_unread(part, spec, match, selection, settings)
            _check_weak_names(part, match, selection, settings)
            query = selection.get(match.form.columns[0].role) or ""
            if is_detection and match.form.is_pair and is_search(part, query):
                # The rows may have been found by it.
                raise _several(part, {"text": selection.names[:2]})
        except ColumnsError as refusal:  # another form may read what this one leaves out
            if complete[0].ambiguous:
                break
            error = error or refusal
            continue
        if twice := [name for name in selection.names if f"{name}.1" in part.table.column_names]:
            twice_there = f"{part.path} has two columns called {twice[0]!r}."
            raise ColumnsError(twice_there, "Rename one.", is_rival=True)
        return selection
    if error is not None:
        raise error
    if complete:
        first = complete[0]
        raise _several(part, {c.role: first.columns[c.role] for c in first.ambiguous})
    raise _no_candidate(part, spec, settings, matches)


def _several(part: Part, candidates: Mapping[str, Sequence[str]]) -> ColumnsError:
    """Return the refusal of a file in which several columns may have one role."""
    shown = (
        f"{len(names)} columns may be the {role}: {show_examples(part, names)}"
        for role, names in candidates.items()
    )
    return ColumnsError(f"{part.path}: {'; '.join(shown)}.", is_rival=True)


def _check_preferences(part: Part, settings: DataSettings) -> None:
    """Raise PreferencesError if a file has preference pairs, unless the user names the columns to
    read."""
    columns = {normalize_name(name): name for name in part.table.column_names}
    ignored = set(map(normalize_name, settings.ignored_columns))
    pair = [
        columns[known]
        for names in (CHOSEN_NAMES, REJECTED_NAMES)
        for known in sorted({*map(normalize_name, names)} & {*columns} - ignored)[:1]
    ]
    if len(pair) == 2 and not settings.named_columns:
        prompts = {*map(normalize_name, (*PROMPT_NAMES, *TALK_NAMES))}
        unread = [
            name
            for name in part.table.column_names
            if name not in (*pair, *settings.ignored_columns)
            and normalize_name(name) not in prompts
            and is_in_sample(part, name, is_target_named=False)
            and has_values(part, name)
        ]
        rest = f" ignore_columns={quote_value(','.join(unread))}" if unread else ""
        advice = re.sub(r"task=\w+", lambda task: f"{task[0]}{rest}", PREFERENCES)
        raise PreferencesError(
            f"{part.path} has the columns {pair[0]!r} and {pair[1]!r}, preference pairs, which "
            "several tasks read.",
            f"{advice} To learn from other columns, name these in hyperparameters.",
            unread,
        )


def _same_columns(part: Part, training: ColumnSelection) -> ColumnSelection:
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
            "Give the columns the same names in all files, or leave this file out.",
        )
    return dataclasses.replace(training, columns=columns)


def _no_candidate(
    part: Part, spec: TaskSpec, settings: DataSettings, matches: Sequence[ColumnMatch]
) -> ColumnsError:
    """Return the refusal of a file that has no form of a task, by the form that lacks least."""
    if not matches:
        return ColumnsError(
            f"{spec.name} has no form of data with all the columns that are named: "
            f"{named_settings(settings)}.",
            "Leave some out; docs/REFERENCE.md lists the columns of each task.",
        )
    by_name = (CellKind.TOKEN_IDS, CellKind.ARTICLES, CellKind.TURNS)  # not named by hand
    usual = [m for m in matches if all(c.kind not in by_name for c in m.form.columns)]
    match = min(
        usual or matches,
        key=lambda m: (len(m.missing), m.form.is_pair, m.missing[0].setting != "text_column"),
    )
    advice = "docs/REFERENCE.md lists the names that are known."
    if part.table.num_rows == 1 and ".json" in part.path.suffixes:
        advice = 'It has one row: write a list of rows, [{"text": "...", "label": "..."}, ...].'
    roles = " and the ".join(column.role for column in match.missing)
    return ColumnsError(
        f"{part.path} has no column that is known by name as the {roles} of {spec.name}; its "
        f"columns are {show_examples(part, part.table.column_names)}.",
        advice,
    )


def _check_unread(
    part: Part,
    spec: TaskSpec,
    match: ColumnMatch,
    selection: ColumnSelection,
    settings: DataSettings,
    is_first: bool = True,
) -> None:
    """Raise ColumnsError if columns that belong to a sample by their names would not be read.

    If the user has named an input, and so what a sample is made of, these are only labels, scores
    and negatives of texts that are learned together.

    Args:
        is_first: Whether other files take their columns from this one.
    """
    inputs = [column for column in match.form.columns if not column.is_target]
    is_input_named = any(column.role in match.given for column in inputs)
    texts = [c for c in match.form.columns if c.kind is CellKind.TEXT or c.setting == PAIRED]
    has_label = any(c.is_target and c.kind is not CellKind.TEXT for c in match.form.columns)
    if is_input_named and (has_label or len(texts) < 2):
        return
    read = {*selection.names, *settings.ignored_columns}
    has_exact = is_label(selection.get("label") or "")
    is_answered = spec.name == "causal-lm" and "completion" in selection
    extras = set(map(normalize_name, match.form.extras))
    if normalize_name(selection.get("label") or "") != "goldlabel":
        extras -= ANNOTATORS
    unread = [
        name
        for name in part.table.column_names
        if name not in read
        and normalize_name(name) not in extras
        and (
            (names_target(name) if is_input_named else is_in_sample(part, name, bool(match.given)))
            or (is_answered and _judges(part, name))
        )
        and not (has_exact and names_target(name) and column_words.ends_in(name, _CLASSES))
        and has_values(part, name)
    ]
    if not unread:
        return
    keys = set(map(normalize_name, unread))
    final = ""
    if all(key.partition(".")[0] in _MEDIA for key in keys):
        final = SCRIPT
    elif spec.name == "causal-lm" and "role" in keys:
        final = TURNS
    what = selection.describe()
    if "completion" in selection and any(verdicts_in(part, name) for name in unread):
        what += "; task=kto learns from good and bad completions"
    advice = "" if is_first else "To read them, give all files of the training data these columns."
    raise ColumnsError(
        f"{part.path} has values in {show_examples(part, unread)}, which by name belong to a "
        f"sample and would not be read by {spec.name} (it reads {what}).",
        final or advice,
        is_rival=len(selection.columns) > 1,
        is_final=bool(final),
        unread=() if final else unread,
    )


def _check_weak_names(
    part: Part, match: ColumnMatch, selection: ColumnSelection, settings: DataSettings
) -> None:
    """Raise ColumnsError if a column is found by a weak name, and others would not be read that may
    be meant."""
    codes = settings.source_lang, settings.target_lang
    free = _free_columns(part, match, selection, settings)
    for column in match.form.columns:
        name = selection.get(column.role) or ""
        known = itertools.chain(*known_names(column, codes, False))
        is_known = normalize_name(name) in known or (column.role == "label" and is_label(name))
        is_similar = not column.is_repeated and not is_known and bool(name)
        is_weak = normalize_name(name) in column.weak_names and not match.form.is_pair
        is_one_of_several = (
            column.is_target and (match.form.is_of_reports or is_weak) and name.lower() != "label"
        )
        if column.role in match.given or not name:
            continue
        others: list[str] = []
        is_input = column.kind is CellKind.TEXT and not column.is_target
        if is_similar and is_input and holds_codes(part, name):
            what = f"{show_examples(part, [name])} holds codes, not texts"
            raise ColumnsError(f"{part.path}: column {what}.", is_rival=True)
        if is_similar or is_weak:
            # Other classes may be meant, unless this one says what a text says.
            is_judged = any(
                not column_words.REVIEWS.isdisjoint(words_of(text)) for text in selection.names
            )
            is_class = not (is_judged and column_words.ends_in(name, column_words.OPINIONS))
            is_like = is_similar if column.kind is CellKind.TEXT else is_class
            others += [
                other
                for other in free
                if _looks_alike(part, column, other, is_like)
                or (column.role == "label" and _is_of_same(part, name, other))
            ]
        if is_one_of_several:
            rare = column_words.OTHER_LABELS if column.marks else frozenset()
            others += [
                other
                for other in free
                if (
                    column.is_like(other)
                    or column_words.ends_in(other, rare)
                    or not column_words.OPINIONS.isdisjoint(words_of(other))
                )
                and other not in others
            ]
        elif column.role == "label" and is_label(name):
            others += [o for o in free if words_of(o)[-1] in column_words.LABELLED
                       and words_of(o)[0] not in column_words.LABELLED]  # fmt: skip
        elif column.is_target and "rejected" not in selection:  # whose answers have scores
            is_one = column.role == "label" and is_flag(part, name)  # maybe of several
            aside = column_words.RECORDS | column_words.METADATA
            others += [
                other
                for other in free
                if _says_another(name, other)
                or (is_one and is_flag(part, other) and not column_words.ends_in(other, aside))
            ]
        if is_similar or is_one_of_several:
            others = _drop_described(part, column, name, others)
        if others:
            raise _several(part, {column.role: [name, *others]})


def _drop_described(part: Part, column: Column, name: str, others: Sequence[str]) -> list[str]:
    """Return the columns that may be meant in place of another one, without those that describe a
    sample by their names."""
    described = column_words.METADATA | column_words.STATES | column_words.RECORDS
    is_question = column_words.ends_in(name, column_words.QUESTIONS - column_words.TEXTS)
    if not is_question and not column_words.ends_in(name, column_words.DESCRIBING):
        described |= column_words.THINGS
    return [
        other
        for other in others
        if not column_words.ends_in(other, described)
        or (column.kind is CellKind.TEXT and holds_long_texts(part, other))
    ]


def _free_columns(
    part: Part, match: ColumnMatch, selection: ColumnSelection, settings: DataSettings
) -> list[str]:
    """Return the columns that are not read and neither identify nor describe a sample."""
    left = {*part.table.column_names} - {*selection.names, *settings.ignored_columns}
    return [
        name
        for name in part.table.column_names
        if name in left
        and normalize_name(name) not in match.form.extras
        and normalize_name(name.partition(":")[0]) not in IDENTIFIERS | DESCRIPTIONS
        and words_of(name)[-1] not in IDENTIFIERS | DESCRIPTIONS
        and not is_identifier(name)
    ]


def _judges(part: Part, name: str) -> bool:
    """Return whether a column says what is thought of a completion: it may be a bad one."""
    other = column_words.RECORDS | column_words.METADATA
    is_verdict = verdicts_in(part, name) and not column_words.ends_in(name, other)
    return bool(is_verdict) or column_words.ends_in(name, column_words.VERDICTS)


def _says_another(name: str, other: str) -> bool:
    """Return whether the second of two columns is an opinion by its name, and not a detail of the
    first: `polarity` beside `rating`."""
    opinions = column_words.OPINIONS
    is_detail = column_words.ends_in(name, opinions) and {*words_of(name)} <= {*words_of(other)}
    return column_words.ends_in(other, opinions) and not is_detail


def _is_of_same(part: Part, name: str, other: str) -> bool:
    """Return whether two columns are classes of the same by their names: `hate_or_not` beside
    `hate_rating`."""
    first = words_of(name)[0]
    is_same = first == words_of(other)[0] and first in column_words.OPINIONS
    return is_same and is_category(part, other)


def _looks_alike(part: Part, column: Column, other: str, is_similar: bool) -> bool:
    """Return whether another column may have a role by what it holds."""
    if column.kind is CellKind.TEXT:
        return (holds_texts if is_similar else may_be_text)(part, other)
    return is_flag(part, other) or (is_similar and is_category(part, other))
