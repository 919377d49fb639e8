"""Which columns are read, and which is predicted: by the user's word, by name, or by content."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import text_columns
from recipe.data.column_names import (
    COMPLETION,
    COMPLETION_NAMES,
    COMPLETION_PARTS,
    LABEL_NAMES,
    LABEL_NAMES_OF_PAIRS,
    MESSAGES,
    MESSAGES_NAMES,
    PROMPT,
    PROMPT_NAMES,
    PROMPT_PARTS,
    SURE_LABELS,
    TEXT,
    TEXT_NAMES,
    TOKEN_IDS,
    plain,
)
from recipe.data.files.part import Part, is_list, is_string
from recipe.errors import DataError

_SAMPLE_ROWS = 1_000
_MOST_CLASSES, _SHOWN = 50, 8
_NUMBERING = ("id", "ids", "idx", "index")
_DOCUMENTS: Sequence[Mapping[str, Sequence[str]]] = (
    {MESSAGES: MESSAGES_NAMES},
    {PROMPT: PROMPT_NAMES, COMPLETION: COMPLETION_NAMES},
    {TEXT: TEXT_NAMES},
    {TOKEN_IDS: (TOKEN_IDS,)},
)
"""What a document may be made of, and what those columns are called; the first found is taken."""
DOCUMENTS = (TEXT, PROMPT, COMPLETION, MESSAGES, TOKEN_IDS)
"""The columns that a document may be made of."""


_PREFERENCES = ("chosen", "rejected")
SCRIPT = (
    "Train a model of images and texts by a script of your own (TRL's SFTTrainer; "
    "docs/TRAINING.md, Your own script), or remove these rows."
)
"""What to do with conversations that are more than texts."""
_OF_TEMPLATES: Mapping[str, str] = {
    **dict.fromkeys(
        ("tools", "functions", "chat_template_kwargs"),
        "Write them into a system message, or remove the column.",
    ),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), SCRIPT),
}
"""Columns beside conversations that TRL hands to their chat template, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of the columns to read and of the column to predict."""

    text: str
    pair: str | None = None
    """The second text of each sample, where they are pairs."""
    label: str

    @property
    def read(self) -> tuple[str, ...]:
        """One name, or the two of a pair in their order."""
        return (self.text,) if self.pair is None else (self.text, self.pair)


def choose(
    part: Part,
    text: str | None,
    label: str | None,
    like: Columns | None = None,
    pair: str | None = None,
) -> Columns:
    """The text and label columns of `part`.

    Args:
        text: The hyperparameter text_column, if given: one column, or two with a comma between.
        label: The hyperparameter label_column, if given.
        like: The columns of the training data, which other data most likely shares.
        pair: The hyperparameter text_pair_column, if given.

    Raises:
        DataError: a given column is not there; none (or several) can be the one; texts would be
            left out; or these are pairs and the training data is none, or the other way round.
    """
    names = part.table.column_names
    texts = requested = text_columns.given(part, text, pair, ("label_column", label))
    chosen_label = label
    if texts is None and like is not None and set(like.read) <= set(names):
        texts = requested = (like.text, like.pair)
    if texts is None:
        text_columns.check_choices(part)
        texts = text_columns.pair_by_name(part, chosen_label)
    others = [name for name in names if name not in (texts or ())]
    if chosen_label is None and like is not None and like.label in others:
        chosen_label = like.label
    chosen_label = chosen_label or _label_by_name(part, others)
    if texts is None and TOKEN_IDS in names and _by_name(names, "", TEXT_NAMES) is None:
        texts = requested = (TOKEN_IDS, None)
    if texts is None:
        texts = (text_columns.single(part, chosen_label), None)
    by_name = chosen_label
    chosen_label = chosen_label or _label_of(part, texts)
    if requested is None:
        text_columns.check_nothing_is_left_out(part, texts, chosen_label)
    if by_name is None and _may_be_detail(part, chosen_label, texts[1] is not None):
        raise _several_labels(part, [chosen_label])
    chosen = Columns(text=texts[0], pair=texts[1], label=chosen_label)
    if like is not None and len(chosen.read) != len(like.read):
        raise DataError(
            f"{part.path} has the text columns {', '.join(chosen.read)}, and the training data "
            f"{', '.join(like.read)}.",
            "Give one text a sample in all files, or two under the same names.",
        )
    return chosen


def _label_by_name(part: Part, names: Sequence[str]) -> str | None:
    """The label column that is known by its name.

    Raises:
        DataError: another column may be meant, too: one that is known as well, or, where the name
            is not sure, one with classes of the same type.
    """
    by_plain = {plain(name): name for name in reversed(names)}
    known: list[str] = [by_plain[name] for name in LABEL_NAMES if name in by_plain]
    if not known or plain(known[0]) in SURE_LABELS:
        return known[0] if known else None
    is_named = text_columns.is_text(part, known[0])
    unknown = [name for name in names if name not in known and plain(name) not in TEXT_NAMES]
    classes = possible_labels(part, unknown)
    rivals = [
        name
        for name in classes
        if text_columns.is_text(part, name) == is_named
        # Numbers of more values may be counts.
        and (is_named or len(part.table[name].unique()) == 2)
        and not text_columns.is_metadata(part, name)
    ]
    alike = text_columns.depends_on
    rivals = [
        name
        for name in (*known[1:], *rivals)
        if not (alike(part, name, known[0]) and alike(part, known[0], name))
    ]
    if rivals:
        raise _several_labels(part, [known[0], *rivals])
    return known[0]


def _label_of(part: Part, texts: tuple[str, str | None]) -> str:
    """The label column that is not known by a usual name: the only other column that has classes,
    beside columns that are about the texts or the same in all rows."""
    names = [name for name in part.table.column_names if name not in texts]
    known: list[str] = [name for name in names if plain(name) in LABEL_NAMES_OF_PAIRS]
    if texts[1] is not None and len(known) == 1:
        return known[0]
    classes = possible_labels(part, names)
    others = [
        name
        for name in names
        if name in classes
        or pa.types.is_nested(part.table[name].type)
        or (not text_columns.is_text(part, name) and len(part.table[name].unique()) > 1)
    ]
    others = [name for name in others if not text_columns.is_metadata(part, name)] or classes
    if len(others) == 1 and others[0] in classes:
        return others[0]
    if classes:
        raise _several_labels(part, classes)
    raise part.unknown("label", "label_column")


def _may_be_detail(part: Part, label: str, is_pair: bool) -> bool:
    """Return whether the column that is left over may be about the text instead of its label: its
    name says nothing, and a date, an author or the like stands beside it.
    """
    if plain(label).endswith("label") or (is_pair and plain(label) in LABEL_NAMES_OF_PAIRS):
        return False
    return any(
        text_columns.is_metadata(part, name)
        and plain(name).rpartition("_")[2] not in ("id", "ids", "idx", "index")
        and not plain(name).startswith("unnamed")
        for name in part.table.column_names
        if name != label
    )


def possible_labels(part: Part, names: Sequence[str]) -> list[str]:
    """Those of some columns whose values repeat as those of classes do, and are no identifiers."""
    sample = part.table.slice(0, _SAMPLE_ROWS)
    most = min(_MOST_CLASSES, max(2, sample.num_rows // 2))
    can_be = (is_string, pa.types.is_integer, pa.types.is_boolean)
    return [
        name
        for name in names
        if any(test(sample[name].type) for test in can_be)
        and 1 < len(sample[name].unique()) <= most
        and (plain(name) in LABEL_NAMES or plain(name).rpartition("_")[2] not in _NUMBERING)
    ]


def _several_labels(part: Part, names: Sequence[str]) -> DataError:
    return DataError(
        f"{part.path} has {', '.join(map(repr, names))}, which may be the labels: the label column "
        "is not known for sure by its name.",
        f"Give label_column={' or label_column='.join(names[:_SHOWN])}.",
    )


def has_text(part: Part, like: Columns) -> bool:
    """Whether `part` has the columns of texts of the training data, or another that holds some."""
    names = part.table.column_names
    nested = any(pa.types.is_nested(kind) for kind in part.table.schema.types)
    known = set(like.read) <= set(names) or nested
    return known or any(text_columns.is_text(part, name) for name in names)


def has_label(part: Part, label: str) -> bool:
    """Whether `part` has the column that the training data has its labels in (several with commas,
    where they are indicators), or one of a name that such columns have."""
    names = part.table.column_names
    whole = label in names or set(label.split(",")) <= set(names)
    return whole or _by_name(names, "", LABEL_NAMES) is not None


def of_documents(
    part: Part,
    requested: Mapping[str, str | None],
    like: Mapping[str, str] | None = None,
    kinds: Collection[str] = DOCUMENTS,
) -> dict[str, str]:
    """The columns that the documents of `part` are made of: `messages`, `prompt` and `completion`,
    `text`, or `input_ids`, each with the name that it has in the file.

    Args:
        asked: The hyperparameters text_column, prompt_column, completion_column and
            messages_column, by what they name.
        like: The columns of the training data, whose kind other data must be of.
        kinds: What a document may be made of.

    Raises:
        DataError: a given column is not there, or none can be the one.
    """
    names = part.table.column_names
    part.check_named(*((f"{name}_column", column) for name, column in requested.items()))
    for kind in _DOCUMENTS:
        if not set(kind) <= set(kinds):
            continue
        if any(requested.values()) and not any(requested.get(name) for name in kind):
            continue
        if like is not None and set(like) != set(kind):
            continue
        columns = {
            name: requested.get(name) or _by_name(names, (like or {}).get(name, ""), known)
            for name, known in kind.items()
        }
        if chosen := {name: column for name, column in columns.items() if column is not None}:
            missing = next((name for name in kind if name not in chosen), None)
            if missing is None:
                if PROMPT in chosen and requested.get(PROMPT) is None:
                    check_prompt_is_whole(part, chosen)
                if MESSAGES in chosen:
                    check_only_messages(part)
                if TEXT in chosen and requested.get(TEXT) is None:
                    _refuse_preferences(part)
                if TEXT not in chosen and requested.get(COMPLETION) is None:
                    refuse_unwanted(part)
                return chosen
            if like is not None or any(requested.values()):
                raise part.unknown(missing, f"{missing}_column")
    if like is not None:
        raise part.unknown(next(iter(like)), f"{next(iter(like))}_column")
    _refuse_preferences(part)
    return {TEXT: text_columns.single(part, None)}


def _refuse_preferences(part: Part) -> None:
    """Raises DataError where answers stand beside the text that was found: it would be all that is
    learned."""
    names = {plain(name): name for name in part.table.column_names}
    if set(_PREFERENCES) <= set(names):
        raise DataError(
            f"{part.path} has answers that were chosen and rejected, of which a text alone learns "
            "nothing.",
            "Give task=preference to learn from both, or prompt_column and "
            f"completion_column={names['chosen']} to learn the chosen ones; or name one column in "
            "text_column.",
        )


def refuse_unwanted(part: Part) -> None:
    """Raise DataError if a label says that some answers are unwanted, as KTO's data does."""
    label = next((name for name in part.table.column_names if plain(name) == "label"), None)
    if label is None:
        return
    distinct = part.distinct(label, 2) or []
    if sorted(str(value).lower() for value in distinct) == ["false", "true"]:
        raise DataError(
            f"{part.path} has True and False in column {label!r}, as data has that tells answers "
            "which are wanted from others (KTO), and all of them would be learned.",
            "Keep the rows that are wanted, and remove the column.",
        )


def check_prompt_is_whole(part: Part, chosen: Mapping[str, str]) -> None:
    """See that no other column has texts that belong to the prompts, which were found by name.

    Args:
        chosen: The columns that are read, by what they hold; among them PROMPT.

    Raises:
        DataError: one has, as Alpaca's `input` beside `instruction`.
    """
    text_columns.check_choices(part)
    prompt, answer = chosen[PROMPT], chosen.get(COMPLETION)
    if (name := unread_texts(part, PROMPT_PARTS, chosen.values())) is not None:
        beside, kind, named = f"the prompts in {prompt!r}", PROMPT, f"prompt_column={prompt}"
        what = "learns answers to half of a question"
    elif answer and (name := unread_texts(part, COMPLETION_PARTS, chosen.values())) is not None:
        beside, kind, what = (
            f"the answers in {answer!r}",
            COMPLETION,
            "would not learn to write them",
        )
        named = f"prompt_column={prompt} and completion_column={answer}"
    else:
        return
    raise DataError(
        f"{part.path} has texts in column {name!r} beside {beside}, and a model that does not read "
        f"them {what}.",
        f"Write both into one column {kind}, or give {named} to leave {name!r} out.",
    )


def unread_texts(part: Part, known: Collection[str], read: Collection[str]) -> str | None:
    """The first column of a known name that is not read and has texts, or lists of something.

    Args:
        known: Plain names; of a record, its own.
        read: The columns that are read.
    """
    names: list[str] = part.table.column_names
    for name in names:
        if plain(name).partition(".")[0] not in known or name in read:
            continue
        column = part.table[name]
        if is_string(column.type):
            has_some = pc.not_equal(pc.utf8_trim_whitespace(column), "")
        elif is_list(column.type):
            has_some = pc.greater(pc.list_value_length(column), 0)
        else:
            continue
        if pc.any(has_some).as_py():
            return name
    return None


def check_only_messages(part: Part) -> None:
    """See that no column beside conversations has what their chat template would write, too.

    Raises:
        DataError: one has: tools, or values for the template.
    """
    for name in part.table.column_names:
        remedy = _OF_TEMPLATES.get(plain(name).partition(".")[0])
        if remedy is None:
            continue
        nothing: Sequence[Any] = (None, "", "[]", "{}", "null", [])
        if any(cell not in nothing for _, some in part.batches([name])
               for cell in some[name].to_pylist()):  # fmt: skip
            raise DataError(
                f"{part.path} has values in column {name!r} for the chat template, which is given "
                "messages alone: a model that does not read them learns to answer without.",
                remedy,
            )


def _by_name(names: list[str], preferred: str, known: Sequence[str]) -> str | None:
    if preferred in names:
        return preferred
    by_lower = {plain(name): name for name in reversed(names)}
    return next((by_lower[name] for name in known if name in by_lower), None)
