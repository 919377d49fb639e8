"""Which columns hold the texts of a sample: one, or two that are read as a pair.

A user's word decides, then names, then content. What reads like a text and is known to be neither
text nor metadata ends the job: a text that is left out in silence is a model that is wrong.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from recipe.data.column_names import (
    DERIVED,
    LABEL_NAMES,
    METADATA,
    PAIR_NAMES,
    PAIR_STEMS,
    TEXT_NAMES,
    TWINS,
    plain,
)
from recipe.data.files.part import Part, is_list, is_number, is_string
from recipe.errors import DataError

SAMPLE_ROWS = 1_000
_MOST_CLASSES = 50
_LOOKED_AT = 2_000
"""Characters of a text whose words are counted."""
_SENTENCE = 4
"""Words on average, from which also values that repeat are texts, not names of classes."""
_LONG = 8
"""Words on average that no author, place or date has."""
# Written without spaces: Thai, Japanese and Chinese.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
_FILE = re.compile(
    r"\S*\.(jpe?g|png|gif|bmp|webp|tiff?|wav|mp3|flac|ogg|m4a|mp4|avi|pdf|docx?|dcm)", re.IGNORECASE
)
_BYTES = re.compile(r"b(?P<quote>['\"]).*(?P=quote)", re.DOTALL)
_CHOICES = {"choices", "options", "endings", "alternatives", "candidates", "distractors"}
_CHOICE = re.compile(
    r"(choice|option|opt|op|ending|alternative|answer|distractor|sol)?_?([0-9]|[a-e])"
)
"""What columns of answers to choose from are called."""
ANSWER, MARKS = "answer", {"accept", "reject", "ignore"}
"""The column in which Prodigy's exports say what was made of each row, and its values."""
_LETTER = re.compile(r"[^\W\d_]")

Texts = tuple[str, str | None]
"""A text column, and the column of its pair if there is one."""


def given(
    part: Part, text: str | None, pair: str | None, *others: tuple[str, str | None]
) -> Texts | None:
    """The columns that the hyperparameters text_column (`a` or `a,b`) and text_pair_column name.

    Args:
        others: Other hyperparameters that name columns, with their values, to be checked as well.

    Raises:
        DataError: one of them is not there, or they name other than one or two columns.
    """
    if text is None:
        part.check_named(*others)
        if pair is None:
            return None
        raise DataError(
            f"text_pair_column has value {pair!r}, and text_column is not given.",
            f"Give both, as text_column=a and text_pair_column={pair}.",
        )
    names = part.table.column_names
    requested = [text] if text in names or "," not in text else [name.strip() for name in
                                                              text.split(",")]  # fmt: skip
    keys = ["text_column"] * len(requested)
    if pair is not None:
        requested, keys = [*requested, pair], [*keys, "text_pair_column"]
    part.check_named(*zip(keys, requested, strict=True), *others)
    if len(requested) > 2 or len(set(requested)) < len(requested):
        raise DataError(
            f"The columns of texts that were named are {', '.join(requested)}.",
            "Name one, or two different ones that are read as a pair.",
        )
    return requested[0], requested[1] if len(requested) > 1 else None


def pair_by_name(part: Part, label: str | None) -> tuple[str, str] | None:
    """Two columns of strings whose names say that they belong together.

    Args:
        label: The hyperparameter label_column, if given.
    """
    by_plain = {plain(name): name for name in reversed(part.table.column_names) if name != label}

    def holds_texts(*names: str) -> bool:
        return all(name in by_plain and is_text(part, by_plain[name]) for name in names)

    for first, second in PAIR_NAMES:
        if holds_texts(first, second):
            # `question` and `answer` may be a text and its class, too.
            has_label = label or any(name in by_plain for name in LABEL_NAMES if name != second)
            if has_label or _differs(part, by_plain[second]):
                return by_plain[first], by_plain[second]
    for stem, first, second, third in _twins(by_plain):
        if third in by_plain or not holds_texts(first, second):
            continue
        chosen = by_plain[first], by_plain[second]
        if stem in PAIR_STEMS or all(reads_like_text(part, name) for name in chosen):
            return chosen
    return None


def _twins(names: Sequence[str] | Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """(stem, first, second, what a third were called) of names as `sentence1`, `#1_string`."""
    twins = []
    for one, two, three in TWINS:
        for name in names:
            if name.endswith(one):
                start = name.removesuffix(one)
                twins.append((start.rstrip("_"), name, start + two, start + three))
            if name.startswith((f"{one}_", f"#{one}_")):
                mark = name[: name.index(one)]
                rest = name.removeprefix(mark + one)
                twins.append((rest.strip("_"), name, mark + two + rest, mark + three + rest))
    return twins


def single(part: Part, label: str | None) -> str:
    """The column of the texts, by its name, else the only one that it can be by its content.

    Raises:
        DataError: none can be it, or several can.
    """
    by_plain = {plain(name): name for name in reversed(part.table.column_names)}
    named: str | None = next((by_plain[name] for name in TEXT_NAMES if name in by_plain), None)
    if named is not None and named != label:
        return named
    strings = [name for name in part.table.column_names if name != label and is_text(part, name)]
    candidates = [name for name in strings if not is_metadata(part, name)] or strings
    for test in (reads_like_text, _has_words, _differs, is_text):
        left: list[str] = [name for name in candidates if test(part, name)]
        if len(left) > 1:
            raise _several(part, left, label)
        if left:
            return left[0]
    raise part.unknown("text", "text_column")


def check_nothing_is_left_out(part: Part, chosen: Texts, label: str) -> None:
    """See that no other column reads like a text that belongs to the sample.

    Raises:
        DataError: one does; it lists all, and what to say.
    """
    others = [
        name
        for name in part.table.column_names
        if name not in (*chosen, label)
        and not is_metadata(part, name)
        and reads_like_text(part, name)
        and not depends_on(part, name, label)
    ]
    if others:
        raise _several(part, [*(name for name in chosen if name), *others], label)


def depends_on(part: Part, name: str, label: str) -> bool:
    """Whether a column has one value only for each label, as `label_text` beside `label`."""
    both = part.table.select([label, name]).slice(0, SAMPLE_ROWS).to_pydict()
    rows = list(zip(map(str, both[label]), map(str, both[name]), strict=True))
    labels = {each for each, _ in rows}
    return len(labels) <= len(rows) / 2 and len(set(rows)) == len(labels)


def check_choices(part: Part) -> None:
    """See that there are no answers to choose from: in lists, or in columns as `option_1`.

    Raises:
        DataError: there are; a label says which is right, and without them is learned by heart.
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


def is_mark(part: Part, name: str) -> bool:
    """Whether a column says of each row whether its annotation was accepted."""
    names = {*part.table.column_names}
    is_export = name == ANSWER and names & {"_input_hash", "_task_hash", "spans"}
    if not is_export or not is_string(part.table.schema.field(name).type):
        return False
    values = set(part.distinct(name, len(MARKS) + 1) or [""]) - {None}
    return bool(values) and values <= MARKS


def _several(part: Part, names: Sequence[str], label: str | None) -> DataError:
    shown = []
    for name in names:
        text = next(iter(_values(part, name)), "")
        example = text if len(text) <= 40 else f"{text[:40]}..."
        shown.append(f"{name!r} ({example!r})")
    two = ",".join(names[:2])
    return DataError(
        f"{part.path} has {len(names)} columns that may be the text: {'; '.join(shown)}. Which "
        "of them make a sample is not known.",
        f"Name one, as text_column={names[0]}, or two that are read as a pair, as "
        f"text_column={two}" + ("." if label else "; and the column to predict in label_column."),
    )


def is_something_else(texts: Sequence[str]) -> str | None:
    """What strings are that are no texts, in words; None where they may be some."""
    if texts and all(_FILE.fullmatch(text.strip()) for text in texts):
        return "names files"
    if sum(bool(_BYTES.fullmatch(text.strip())) for text in texts) * 2 > len(texts):
        return "holds bytes as Python writes them"
    return None


def is_text(part: Part, name: str) -> bool:
    """Whether the column holds strings, of which some are no numbers."""
    if not is_string(part.table[name].type):
        return False
    return not all(is_number(value) for value in _values(part, name))


def reads_like_text(part: Part, name: str) -> bool:
    """Whether most values have several words, and are no names of classes."""
    return _has_words(part, name) and (_differs(part, name) or _mean_words(part, name) >= _SENTENCE)


def _has_words(part: Part, name: str) -> bool:
    if not is_text(part, name):
        return False
    counts = _words(part, name)
    return sum(count > 1 for count in counts) >= len(counts) / 2


def _mean_words(part: Part, name: str) -> float:
    counts = _words(part, name)
    return sum(counts) / max(1, len(counts))


def _differs(part: Part, name: str) -> bool:
    """Whether there are more values than classes would have."""
    values = _values(part, name)
    return len(set(values)) > min(_MOST_CLASSES, len(values) / 2)


def _words(part: Part, name: str) -> list[int]:
    """Words of each value: what stands between spaces and has a letter."""
    return [
        sum(bool(_LETTER.search(word)) for word in text.split()) + len(_UNSPACED.findall(text)) // 2
        for text in (value[:_LOOKED_AT] for value in _values(part, name))
    ]


def _values(part: Part, name: str) -> list[str]:
    values = part.table[name].slice(0, SAMPLE_ROWS).to_pylist()
    return [value for value in values if value and isinstance(value, str)]


def is_metadata(part: Part, name: str) -> bool:
    """Whether a column is about the text (its id, place, date, author) or derived from it."""
    spaced = plain(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name))
    last = re.sub(r"_?\d+$", "", spaced).rpartition("_")[2]
    if last in DERIVED or plain(name).startswith("unnamed"):
        return True
    # `user_name` is about the text, `product_name` is a part of it.
    is_known = (
        plain(name) in METADATA or spaced in METADATA or (last in METADATA and last != "name")
    )
    return bool(is_known) and _mean_words(part, name) < _LONG
