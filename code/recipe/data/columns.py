"""Choose the columns to read, for all tasks.

A hyperparameter decides, then the columns of the training data, then known names (`by_name`). Text
and label of a classifier may also be found by their content, if nothing else could be meant. A
column that belongs to a sample and would not be read ends the job (`check_parts`): a text that is
silently left out makes a wrong model.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_content import (
    differs,
    has_words,
    is_constant,
    is_metadata,
    is_text,
    numbers_rows,
    possible_labels,
    reads_like_text,
    same_classes,
    values_of,
)
from recipe.data.column_names import (
    ANSWERS_COMPARED,
    COMPLETION,
    COMPLETION_NAMES,
    DOCUMENT_PARTS,
    IMAGES,
    LABEL_NAMES,
    LABEL_NAMES_OF_PAIRS,
    MESSAGES,
    MESSAGES_NAMES,
    PAIR_NAMES,
    PROMPT,
    PROMPT_NAMES,
    SPAN_PARTS,
    SURE_LABELS,
    TEMPLATE_PARTS,
    TEXT,
    TEXT_NAMES,
    THIRDS,
    TOKEN_IDS,
    plain,
)
from recipe.data.files.part import Part, is_list, is_string
from recipe.errors import DataError, Problems, near
from recipe.settings import DataSettings

_SHOWN = 8
_CHOICES = {"choices", "options", "endings", "alternatives", "candidates", "distractors"}
_CHOICE = re.compile(
    r"(choice|option|opt|op|ending|alternative|answer|distractor|sol)?_?(\d+|[a-e])"
)
"""What columns of answers to choose from are called."""
SCRIPT = (
    "Train a model of images and texts by a script of your own (TRL's SFTTrainer; "
    "docs/TRAINING.md, Your own script), or remove these rows."
)
"""What to do with conversations that are more than texts."""
DOCUMENTS = (TEXT, PROMPT, COMPLETION, MESSAGES, TOKEN_IDS)
"""The columns that a document may be made of."""
Texts = tuple[str, str | None]
"""A text column, and the column of its pair if there is one."""


@dataclass(frozen=True)
class Role:
    """What a column of a sample is for."""

    what: str
    names: Sequence[str]
    """What such columns are called (`plain`), most telling first."""
    key: str = ""
    """The hyperparameter that names the column, if there is one."""
    is_optional: bool = False
    parts: Collection[str] = ()
    """What columns are called that belong to this one. One with values ends the job, unless the
    hyperparameter names this column."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of the columns to read and of the column to predict."""

    text: str
    pair: str | None = None
    """The second text of each sample, if they are pairs."""
    label: str

    @property
    def read(self) -> tuple[str, ...]:
        """One name, or the two of a pair in their order."""
        return (self.text,) if self.pair is None else (self.text, self.pair)


def check_named(part: Part, given: DataSettings) -> None:
    """Check that the columns exist that hyperparameters name, all at once.

    Raises:
        DataError: one or more do not.
    """
    names = part.table.column_names
    wrong: dict[str, str] = {}
    for item in dataclasses.fields(given):
        value = getattr(given, item.name)
        if not value or not item.name.endswith(("_column", "_columns")):
            continue
        for name in [value] if value in names else [each.strip() for each in value.split(",")]:
            # A column of records is named without its fields.
            if not any(each == name or each.startswith(f"{name}.") for each in names):
                wrong[name] = item.name
    if wrong:
        values = ", ".join(f"{key} has value {name!r}" for name, key in wrong.items())
        meant = " ".join(dict.fromkeys(filter(None, (near(name, names) for name in wrong))))
        raise DataError(
            f"{values}, but {part.path} has the columns {', '.join(names)}.",
            meant or f"Name one of them in {' and '.join(dict.fromkeys(wrong.values()))}.",
        )


def first_known(part: Part, known: Sequence[str], taken: Collection[str] = ()) -> str | None:
    """Return the column with the first of the `known` names, or None; none of those `taken`."""
    free = [name for name in reversed(part.table.column_names) if name not in taken]
    by_plain = {plain(name): name for name in free}
    return next((by_plain[name] for name in known if name in by_plain), None)


def choose(
    part: Part,
    alternatives: Sequence[Sequence[Role]],
    given: DataSettings,
    like: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the column of each role of the first alternative that the table has.

    A hyperparameter names a column; otherwise it is that of the training data (`like`), or the one
    with a known name. If hyperparameters name columns, alternatives without any of them are out.

    Raises:
        DataError: a column that is named does not exist; no alternative has its columns (the
            message lists those of the first one); or others belong to them and would not be read.
    """
    check_named(part, given)
    names, like = part.table.column_names, like or {}
    keys = {role.key for roles in alternatives for role in roles} - {""}
    named = {key: getattr(given, key) for key in keys if getattr(given, key)}
    missing: list[Role] = []
    for roles in alternatives:
        if not like.keys() <= {role.what for role in roles}:
            continue
        if named and not named.keys() & {role.key for role in roles}:
            continue
        chosen: dict[str, str] = {}
        for role in roles:
            column = named.get(role.key) or like.get(role.what)
            if column is None and not like:
                column = first_known(part, role.names, {*named.values(), *chosen.values()})
            if column in names:
                chosen[role.what] = str(column)
        required = [role for role in roles if not role.is_optional or role.what in like]
        absent = [role for role in required if role.what not in chosen]
        if not absent:
            break
        missing = missing or absent
    else:
        if like:
            lacking = " and ".join(repr(like.get(role.what)) for role in missing)
            raise DataError(
                f"{part.path} lacks {lacking}, read in the training data: its columns are "
                f"{', '.join(names)}.",
                "Give the columns the same names in all files.",
            )
        raise unknown(part, missing)
    if len(set(chosen.values())) < len(chosen):
        raise DataError(
            f"One column of {part.path} is named for two things: {chosen}.",
            f"Name a different column in each of {', '.join(role.key for role in roles)}.",
        )
    for role in roles:
        if role.parts and role.what in chosen and role.key not in named:
            if len(roles) > 1:
                check_choices(part)
            leave = f"{role.key}={chosen[role.what]}" if role.key else ""
            check_parts(part, chosen.values(), role.parts, leave)
    return chosen


def unknown(part: Part, missing: Sequence[Role]) -> DataError:
    """Return the refusal of a table without a known column for each role."""
    plural = "s" if len(missing) > 1 else ""
    pronoun = "them" if plural else "it"
    keys = [role.key or role.what for role in missing]
    remedy = f"Name {pronoun} in the hyperparameter{plural} {' and '.join(keys)}."
    if not all(role.key for role in missing):
        remedy = f"Rename {pronoun} to {' and '.join(keys)}."
    return DataError(
        f"The {' and '.join(role.what for role in missing)} column{plural} of {part.path} "
        f"{'are' if plural else 'is'} not known by name: its columns are "
        f"{', '.join(part.table.column_names)}.",
        remedy,
    )


_TEXT, _LABEL = Role(TEXT, TEXT_NAMES, "text_column"), Role("label", LABEL_NAMES, "label_column")


def given_texts(part: Part, given: DataSettings) -> Texts | None:
    """Return the columns that text_column (`a` or `a,b`) and text_pair_column name.

    Raises:
        DataError: they name other than one or two columns.
    """
    text, pair = given.text_column, given.text_pair_column
    if text is None and pair is None:
        return None
    if text is None:
        raise DataError(
            f"text_pair_column has value {pair!r}, and text_column is not given.",
            f"Give both, as text_column=a and text_pair_column={pair}.",
        )
    is_one = text in part.table.column_names
    requested = [text] if is_one else [name.strip() for name in text.split(",")]
    requested += [] if pair is None else [pair]
    if len(requested) > 2 or len(set(requested)) < len(requested):
        raise DataError(
            f"The columns of texts that were named are {', '.join(requested)}.",
            "Name one, or two different ones that are read as a pair.",
        )
    return requested[0], requested[1] if len(requested) > 1 else None


def of_labelled_texts(
    part: Part, given: DataSettings, label: str | None, like: Columns | None
) -> Columns:
    """Return the text and label columns of a classifier's data.

    Args:
        label: The label column, if it is known: maybe one that was made of several.
        like: The columns of the training data, which other data most likely shares.

    Raises:
        DataError: a given column does not exist; none (or several) can be the one; texts would be
            left out; or these are pairs and the training data is not, or the other way round.
    """
    check_named(part, given)
    names = part.table.column_names
    texts = requested = given_texts(part, given)
    if texts is None and like is not None and set(like.read) <= set(names):
        texts = requested = (like.text, like.pair)
    if texts is None:
        check_choices(part)
        texts = pair_by_name(part, label)
    if label is None and like is not None and like.label in {*names} - {*(texts or ())}:
        label = like.label
    problems = Problems()
    with problems.noted():
        texts = texts or (text_alone(part, label), None)
    with problems.noted():
        label = label or _label(part, texts)
    if texts is not None and requested is None:
        with problems.noted():
            _check_other_texts(part, texts, label)
    problems.check()
    assert texts is not None and label is not None
    chosen = Columns(text=texts[0], pair=texts[1], label=label)
    if requested is None:
        leave = f"text_column={','.join(chosen.read)}"
        check_parts(part, [*chosen.read, label], SPAN_PARTS, leave)
    if like is not None and len(chosen.read) != len(like.read):
        raise DataError(
            f"{part.path} has the text columns {', '.join(chosen.read)}, and the training data "
            f"{', '.join(like.read)}.",
            "Give one text a sample in all files, or two under the same names.",
        )
    return chosen


def _label(part: Part, texts: Texts | None) -> str | None:
    """Return the label column: by its name, or the only other column, if it has classes.

    Columns that number the rows, have one value or read like texts do not count.

    Args:
        texts: The columns of texts. If they are not known, None is returned instead of a guess.

    Raises:
        DataError: none can be it, or another column may be meant, too: one that is known as well,
            or, if the name is not sure, one that has classes.
    """
    names = [name for name in part.table.column_names if name not in (texts or ())]
    by_plain = {plain(name): name for name in reversed(names)}
    known: list[str] = [by_plain[name] for name in LABEL_NAMES if name in by_plain]
    if known:
        rivals = [name for name in known[1:] if plain(name) in SURE_LABELS]
        if plain(known[0]) not in SURE_LABELS:
            classes = [name for name in possible_labels(part, names) if name not in known]
            rivals = known[1:] + [name for name in classes if plain(name) not in TEXT_NAMES]
        rivals = [name for name in rivals if not same_classes(part, name, known[0])]
        if rivals:
            raise several_labels(part, [known[0], *rivals])
        return known[0]
    if texts is None:
        return None
    known = [name for name in names if plain(name) in LABEL_NAMES_OF_PAIRS]
    if texts[1] is not None and known:
        if len(known) > 1:
            raise several_labels(part, known)
        return known[0]
    classes = possible_labels(part, names)
    left = [
        name
        for name in names
        if not (numbers_rows(name) or is_constant(part, name) or _is_other_text(part, name))
    ]
    if classes == left and len(left) == 1 and not is_metadata(part, left[0]):
        return classes[0]
    if classes:
        raise several_labels(part, classes)
    raise unknown(part, [_LABEL])


def several_labels(part: Part, names: Sequence[str]) -> DataError:
    """Return the refusal of a table in which several columns may be the label."""
    return DataError(
        f"{part.path} has {', '.join(map(repr, names))}, which may be the labels: the label column "
        "is not known for sure by its name.",
        f"Give label_column={' or label_column='.join(names[:_SHOWN])}.",
    )


def pair_by_name(part: Part, label: str | None) -> tuple[str, str] | None:
    """Return two columns of texts whose names say that they belong together, or None.

    Args:
        label: The label column, if it is known.
    """
    by_plain = {plain(name): name for name in reversed(part.table.column_names) if name != label}

    for first, second in PAIR_NAMES:
        names = by_plain.get(first), by_plain.get(second)
        if THIRDS.get(second) in by_plain:
            continue
        if names[0] and names[1] and all(is_text(part, name) for name in names if name):
            # `question` and `answer` may be a text and its class, too.
            has_label = label or any(name in by_plain for name in LABEL_NAMES if name != second)
            if has_label or differs(part, names[1]):
                return names[0], names[1]
    return None


def text_alone(part: Part, label: str | None) -> str:
    """Return the column of the texts: by its name, or the only one that can be it by its content.

    Raises:
        DataError: none can be it, or several can.
    """
    named = first_known(part, (*TEXT_NAMES, TOKEN_IDS))
    if named is not None and named != label:
        return named
    names = [name for name in part.table.column_names if plain(name) not in LABEL_NAMES]
    strings = [name for name in names if name != label and is_text(part, name)]
    candidates = [name for name in strings if not is_metadata(part, name)] or strings
    for test in (reads_like_text, has_words, differs, is_text):
        left: list[str] = [name for name in candidates if test(part, name)]
        if len(left) > 1:
            raise _several_texts(part, left)
        if left:
            return left[0]
    raise unknown(part, [_TEXT])


def _check_other_texts(part: Part, chosen: Texts, label: str | None) -> None:
    """Raise DataError if another column reads like a text that belongs to the sample."""
    others = [
        name
        for name in part.table.column_names
        if name not in (*chosen, label)
        and _is_other_text(part, name)
        and not (label and same_classes(part, name, label))
    ]
    if others:
        raise _several_texts(part, [*filter(None, chosen), *others])


def _is_other_text(part: Part, name: str) -> bool:
    return not is_metadata(part, name) and reads_like_text(part, name)


def _several_texts(part: Part, names: Sequence[str]) -> DataError:
    shown = []
    for name in names:
        text = next(iter(values_of(part, name)), "")
        example = text if len(text) <= 40 else f"{text[:40]}..."
        shown.append(f"{name!r} ({example!r})")
    return DataError(
        f"{part.path} has {len(names)} columns that may be the text: {'; '.join(shown)}. Which "
        "of them make a sample is not known.",
        f"Name one, as text_column={names[0]}, or two that are read as a pair, as "
        f"text_column={','.join(names[:2])}.",
    )


_DOCUMENTS: Mapping[str, Sequence[Role]] = {
    MESSAGES: [
        Role(MESSAGES, MESSAGES_NAMES, "messages_column", parts=DOCUMENT_PARTS[MESSAGES]),
    ],
    PROMPT: [
        Role(PROMPT, PROMPT_NAMES, "prompt_column", parts=DOCUMENT_PARTS[PROMPT]),
        Role(COMPLETION, COMPLETION_NAMES, "completion_column"),
    ],
    TEXT: [Role(TEXT, TEXT_NAMES, "text_column", parts=DOCUMENT_PARTS[TEXT])],
    TOKEN_IDS: [Role(TOKEN_IDS, (TOKEN_IDS,), "text_column")],
}
"""What a document may be made of; the first that is found is taken."""


def of_documents(
    part: Part,
    given: DataSettings,
    like: Mapping[str, str] | None = None,
    kinds: Collection[str] = DOCUMENTS,
) -> dict[str, str]:
    """Return the columns of documents: messages, prompt and completion, text, or input_ids.

    Args:
        like: The columns of the training data, whose kind other data must be of.
        kinds: What a document may be made of.

    Raises:
        DataError: a given column does not exist, none can be the one, or something that belongs to
            a document would not be read.
    """
    alternatives = [roles for kind, roles in _DOCUMENTS.items() if kind in kinds]
    keys = {role.key for roles in alternatives for role in roles}
    is_known = any(all(first_known(part, role.names) for role in roles) for roles in alternatives)
    if not (like or is_known or any(getattr(given, key) for key in keys)):
        check_named(part, given)
        check_parts(part, (), DOCUMENT_PARTS[TEXT], "text_column")
        return {TEXT: text_alone(part, None)}
    chosen = choose(part, alternatives, given, like)
    if MESSAGES in chosen:
        check_parts(part, chosen.values(), TEMPLATE_PARTS[1:], "")
    return chosen


def check_choices(part: Part) -> None:
    """Raise DataError if there are answers to choose from, in lists or in columns as `option_1`.

    Without them, a model could only learn the labels of the right answers by heart.
    """
    found, by_stem = [], defaultdict(list)
    for name in part.table.column_names:
        kind, match = part.table.schema.field(name).type, _CHOICE.fullmatch(plain(name))
        if _CHOICES & {*plain(name).split(".")}:
            # In a CSV, lists and records are written as strings.
            values = values_of(part, name) if is_string(kind) else []
            is_written = bool(values) and all(value.lstrip()[:1] in ("[", "{") for value in values)
            found += [name] if is_list(kind) or "." in name or is_written else []
        elif match and (is_string(kind) or (match[1] and pa.types.is_integer(kind))):
            by_stem[match[1]].append(name)
    found += [name for stem, of in by_stem.items() if len(of) > (1 if stem else 2) for name in of]
    if found:
        raise DataError(
            f"{part.path} has answers to choose from in {', '.join(map(repr, found))}: a model "
            "that does not read them learns to guess.",
            "Give a question, a list called choices and the right one called answer "
            "(task=multiple-choice); or a row for each answer, with label 1 for the right one and "
            "0 for the others (task=reranking); or name the columns to read "
            "(text_column and label_column, or prompt_column and completion_column) to leave them "
            "out.",
        )


def check_parts(part: Part, read: Collection[str], names: Collection[str], leave: str) -> None:
    """Raise DataError if a column that is not read belongs to what is, by its name.

    Args:
        read: The columns that are read.
        names: Plain names, without numbers; of a record, its own.
        leave: The hyperparameters that leave the column out; '' if none does.
    """
    for column in part.table.column_names:
        name = re.sub(r"\d+", "", plain(column).partition(".")[0])
        is_label = name in SURE_LABELS
        if name not in names or column in read or not _has_values(part, column):
            continue
        if is_label and not possible_labels(part, [column]):
            continue
        remedy = f"Write them into what is read, or give {leave} to leave {column!r} out."
        if name in IMAGES:
            remedy = SCRIPT
        elif not leave:
            remedy = f"Write them into what is read, or remove the column {column!r}."
        elif name in ANSWERS_COMPARED:
            remedy = "Give task=preference to learn from both answers, or remove the column."
        elif is_label:
            remedy = f"Keep the rows that are wanted, or give {leave} to learn all rows alike."
        elif name == TEXT:
            remedy = f"Give text_column={column} to learn it as a whole, or remove the column."
        raise DataError(
            f"{part.path} has values in column {column!r}, which belong to a sample and would not "
            "be read.",
            remedy,
        )


def _has_values(part: Part, name: str) -> bool:
    nothing: Sequence[Any] = (None, "", "[]", "{}", "null", [])
    cells = (cell for _, batch in part.batches([name]) for cell in batch[name].to_pylist())
    return any((cell.strip() if isinstance(cell, str) else cell) not in nothing for cell in cells)
