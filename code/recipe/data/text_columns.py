"""Choose the columns of texts and labels, of pairs and of documents.

A classifier's columns may also be found by their content, if no other column can be meant; so they
are not chosen by `columns.choose`, which goes by names only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
from recipe.data.columns import (
    Role,
    check_choices,
    check_named,
    check_parts,
    choose,
    first_known,
    several_labels,
    unknown,
)
from recipe.data.files.part import Part
from recipe.errors import DataError, Problems
from recipe.settings import DataSettings

DOCUMENTS = (TEXT, PROMPT, COMPLETION, MESSAGES, TOKEN_IDS)
"""The columns that a document may be made of."""
Texts = tuple[str, str | None]
"""A text column, and the column of its pair if there is one."""


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
