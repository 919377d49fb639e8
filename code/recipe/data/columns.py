"""Choose the columns to read, for all tasks.

A hyperparameter decides, then the columns of the training data, then known names (`by_name`). Text
and label of a classifier may also be found by their content, if nothing else could be meant. A
column that belongs to a sample and would not be read ends the job (`check_parts`): a text that is
left out without a word makes a wrong model.
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
    TOKEN_IDS,
    TOOLS,
    TWINS,
    plain,
)
from recipe.data.files.part import Part, is_list, is_string
from recipe.errors import DataError, Problems, near
from recipe.hyperparameters import Hyperparameters

_SHOWN = 8
_CHOICES = {"choices", "options", "endings", "alternatives", "candidates", "distractors"}
_CHOICE = re.compile(
    r"(choice|option|opt|op|ending|alternative|answer|distractor|sol)?_?([0-9]|[a-e])"
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
    key: str
    """The hyperparameter that names the column."""
    is_optional: bool = False


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


def check_named(part: Part, given: Hyperparameters) -> None:
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


def first_known(part: Part, known: Sequence[str]) -> str | None:
    """Return the column with the first of the `known` names, or None."""
    by_plain = {plain(name): name for name in reversed(part.table.column_names)}
    return next((by_plain[name] for name in known if name in by_plain), None)


def by_name(
    part: Part,
    roles: Sequence[Role],
    given: Hyperparameters,
    like: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the column of each role: as its hyperparameter says, as in the training data (`like`),
    or by its name.

    Raises:
        DataError: a column that is named does not exist, or some are not known by their names (all
            of them in one message).
    """
    check_named(part, given)
    names = part.table.column_names
    chosen: dict[str, str] = {}
    missing: list[Role] = []
    named = {getattr(given, role.key) for role in roles}
    for role in roles:
        column = getattr(given, role.key) or (like or {}).get(role.what)
        if column is None and not like:
            free = [name for name in names if name not in {*named, *chosen.values()}]
            by_plain = {plain(name): name for name in reversed(free)}
            column = next((by_plain[name] for name in role.names if name in by_plain), None)
        if column in names:
            chosen[role.what] = str(column)
        elif not role.is_optional or role.what in (like or {}):
            missing.append(role)
    if missing:
        raise unknown(part, missing)
    if len(set(chosen.values())) < len(chosen):
        raise DataError(
            f"One column of {part.path} is named for two things: {chosen}.",
            f"Name a column each in {', '.join(role.key for role in roles)}.",
        )
    return chosen


def unknown(part: Part, missing: Sequence[Role]) -> DataError:
    """Return the refusal of a table without a known column for each role."""
    plural = "s" if len(missing) > 1 else ""
    return DataError(
        f"The {' and '.join(role.what for role in missing)} column{plural} of {part.path} "
        f"{'are' if plural else 'is'} not known by name: its columns are "
        f"{', '.join(part.table.column_names)}.",
        f"Name {'them' if plural else 'it'} in the hyperparameter{plural} "
        f"{' and '.join(role.key for role in missing)}.",
    )


_TEXT, _LABEL = Role("text", TEXT_NAMES, "text_column"), Role("label", LABEL_NAMES, "label_column")


def given_texts(part: Part, text: str | None, pair: str | None) -> Texts | None:
    """Return the columns that text_column (`a` or `a,b`) and text_pair_column name.

    Raises:
        DataError: they name other than one or two columns.
    """
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


def choose(part: Part, given: Hyperparameters, label: str | None, like: Columns | None) -> Columns:
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
    texts = requested = given_texts(part, given.text_column, given.text_pair_column)
    if texts is None and like is not None and set(like.read) <= set(names):
        texts = requested = (like.text, like.pair)
    if texts is None:
        check_choices(part)
        texts = pair_by_name(part, label)
    others = [name for name in names if name not in (texts or ())]
    if label is None and like is not None and like.label in others:
        label = like.label
    problems, has_rivals = Problems(), True
    with problems.noted():
        label = label or _label_by_name(part, others)
        has_rivals = False
    is_tokens = TOKEN_IDS in names and first_known(part, TEXT_NAMES) is None
    if texts is None and is_tokens:
        texts = requested = (TOKEN_IDS, None)
    with problems.noted():
        texts = texts or (text_alone(part, label), None)
    if texts is not None and not has_rivals:
        with problems.noted():
            label = label or _label_left(part, texts)
    if texts is not None and requested is None:
        with problems.noted():
            _check_other_texts(part, texts, label)
    problems.check()
    assert texts is not None and label is not None
    if requested is None:
        leave = f"text_column={','.join(name for name in texts if name)}"
        check_parts(part, [*filter(None, texts), label], SPAN_PARTS, leave)
    chosen = Columns(text=texts[0], pair=texts[1], label=label)
    if like is not None and len(chosen.read) != len(like.read):
        raise DataError(
            f"{part.path} has the text columns {', '.join(chosen.read)}, and the training data "
            f"{', '.join(like.read)}.",
            "Give one text a sample in all files, or two under the same names.",
        )
    return chosen


def _label_by_name(part: Part, names: Sequence[str]) -> str | None:
    """Return the label column that is known by its name, or None.

    Raises:
        DataError: another column may be meant, too: one that is known as well, or, if the name is
            not sure, one that has classes.
    """
    by_plain = {plain(name): name for name in reversed(names)}
    known: list[str] = [by_plain[name] for name in LABEL_NAMES if name in by_plain]
    if not known:
        return None
    is_sure = plain(known[0]) in SURE_LABELS
    rivals = [name for name in known[1:] if plain(name) in SURE_LABELS] if is_sure else [
        *known[1:],
        *(name for name in possible_labels(part, names)
          if name not in known and plain(name) not in TEXT_NAMES),
    ]  # fmt: skip
    rivals = [name for name in rivals if not same_classes(part, name, known[0])]
    if rivals:
        raise _several_labels(part, [known[0], *rivals])
    return known[0]


def _label_left(part: Part, texts: Texts) -> str:
    """Return the label column that has no usual name: the only other column, and one with classes.

    Columns that number the rows, have one value or read like texts do not count.
    """
    names = [name for name in part.table.column_names if name not in texts]
    known: list[str] = [name for name in names if plain(name) in LABEL_NAMES_OF_PAIRS]
    if texts[1] is not None and known:
        if len(known) > 1:
            raise _several_labels(part, known)
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
        raise _several_labels(part, classes)
    raise unknown(part, [_LABEL])


def _several_labels(part: Part, names: Sequence[str]) -> DataError:
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

    def holds_texts(*names: str) -> bool:
        return all(name in by_plain and is_text(part, by_plain[name]) for name in names)

    for first, second in PAIR_NAMES:
        if holds_texts(first, second):
            # `question` and `answer` may be a text and its class, too.
            has_label = label or any(name in by_plain for name in LABEL_NAMES if name != second)
            if has_label or differs(part, by_plain[second]):
                return by_plain[first], by_plain[second]
    for first in by_plain:
        for one, two, three in TWINS:
            for match in re.finditer(rf"(?<![^_#\W]){one}(?=_|$)|{one}$", first):
                start, end = first[: match.start()], first[match.end() :]
                second = start + two + end
                if start + three + end in by_plain or not holds_texts(first, second):
                    continue
                chosen = by_plain[first], by_plain[second]
                # Columns called sentence1 and sentence2 are a pair, even of single words.
                is_known = (start + end).strip("_#") in TEXT_NAMES
                if is_known or all(reads_like_text(part, name) for name in chosen):
                    return chosen
    return None


def text_alone(part: Part, label: str | None) -> str:
    """Return the column of the texts, by its name, else the only one that it can be by content.

    Raises:
        DataError: none can be it, or several can.
    """
    named = first_known(part, TEXT_NAMES)
    if named is not None and named != label:
        return named
    strings = [name for name in part.table.column_names if name != label and is_text(part, name)]
    candidates = [name for name in strings if not is_metadata(part, name)] or strings
    for test in (reads_like_text, has_words, differs, is_text):
        left: list[str] = [name for name in candidates if test(part, name)]
        if len(left) > 1:
            raise _several_texts(part, left, label)
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
        raise _several_texts(part, [*(name for name in chosen if name), *others], label)


def _is_other_text(part: Part, name: str) -> bool:
    return not is_metadata(part, name) and reads_like_text(part, name)


def _several_texts(part: Part, names: Sequence[str], label: str | None) -> DataError:
    shown = []
    for name in names:
        text = next(iter(values_of(part, name)), "")
        example = text if len(text) <= 40 else f"{text[:40]}..."
        shown.append(f"{name!r} ({example!r})")
    return DataError(
        f"{part.path} has {len(names)} columns that may be the text: {'; '.join(shown)}. Which "
        "of them make a sample is not known.",
        f"Name one, as text_column={names[0]}, or two that are read as a pair, as "
        f"text_column={','.join(names[:2])}"
        + ("." if label else "; and the column to predict in label_column."),
    )


_DOCUMENTS: Mapping[str, Sequence[Role]] = {
    MESSAGES: [Role(MESSAGES, MESSAGES_NAMES, "messages_column")],
    PROMPT: [
        Role(PROMPT, PROMPT_NAMES, "prompt_column"),
        Role(COMPLETION, COMPLETION_NAMES, "completion_column"),
    ],
    TEXT: [_TEXT],
    TOKEN_IDS: [Role(TOKEN_IDS, (TOKEN_IDS,), "text_column")],
}
"""What a document may be made of; the first that is found is taken."""


def of_documents(
    part: Part,
    given: Hyperparameters,
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
    check_named(part, given)
    keys = [role.key for roles in _DOCUMENTS.values() for role in roles]
    named = {key for key in keys if getattr(given, key)}
    for kind, roles in _DOCUMENTS.items():
        if kind not in kinds or (named and not named & {role.key for role in roles}):
            continue
        if like is not None and {*like} != {role.what for role in roles}:
            continue
        is_known = all(getattr(given, r.key) or first_known(part, r.names) for r in roles)
        if not (is_known or named or like):
            continue
        chosen = by_name(part, roles, given, like)
        leave = " and ".join(f"{role.key}={chosen[role.what]}" for role in roles)
        if kind == MESSAGES:
            others = [name for name in TEMPLATE_PARTS if name != TOOLS]
            check_parts(part, chosen.values(), others, "")
        if kind == PROMPT and not named:
            check_choices(part)
        if not named:
            check_parts(part, chosen.values(), DOCUMENT_PARTS.get(kind, ()), leave)
        return chosen
    check_parts(part, (), DOCUMENT_PARTS[TEXT], "text_column")
    return {TEXT: text_alone(part, None)}


def check_choices(part: Part) -> None:
    """Raise DataError if there are answers to choose from, in lists or in columns as `option_1`.

    Their label says which is right, and would be learned by heart without them.
    """
    found, by_stem = [], defaultdict(list)
    for name in part.table.column_names:
        kind, match = part.table.schema.field(name).type, _CHOICE.fullmatch(plain(name))
        if _CHOICES & {*plain(name).split(".")} and (is_list(kind) or "." in name):
            found.append(name)
        elif match is not None and is_string(kind):
            by_stem[match[1]].append(name)
    found += [name for stem, of in by_stem.items() if len(of) > (1 if stem else 2) for name in of]
    if found:
        raise DataError(
            f"{part.path} has answers to choose from in {', '.join(map(repr, found))}: a model "
            "that does not read them learns to guess.",
            "Give a row for each answer, with label 1 for the right one and 0 for the others "
            "(task=reranking), or write them into the text; or name the columns to read "
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
            remedy = "Write them into a system message, or remove the column."
        elif name == "chosen":
            remedy = f"Give task=preference to learn from both answers, or {leave}=one column."
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


def has_text(part: Part, like: Columns) -> bool:
    """Return whether `part` has the text columns of the training data, or another with texts."""
    names = part.table.column_names
    nested = any(pa.types.is_nested(kind) for kind in part.table.schema.types)
    return set(like.read) <= set(names) or nested or any(is_text(part, name) for name in names)


def has_label(part: Part, label: str) -> bool:
    """Return whether `part` has the label column of the training data (several with commas, if
    they are indicators), or one with a name that such columns have.
    """
    names = part.table.column_names
    whole = label in names or set(label.split(",")) <= set(names)
    return whole or first_known(part, LABEL_NAMES) is not None
