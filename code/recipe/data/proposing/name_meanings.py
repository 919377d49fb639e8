"""Tell what the names of columns say, alone and in pairs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from recipe import column_words
from recipe.column_words import split_name, words_of
from recipe.data.column_settings import is_identifier
from recipe.spec import DESCRIPTIONS, IDENTIFIERS, name_stem, normalize_name
from recipe.task_table import names_of_samples

CLASSES = column_words.LABELS | column_words.OTHER_LABELS
"""Last words of names of classes."""
NO_HEADER = "column_"
"""How columns without a header are called."""
_SCALE = re.compile(
    r"\d\s*(?:-|~|/|to|ile|a|à|bis|do|до|tot|til|out of|sur|su|auf|von)\s*\d", re.IGNORECASE
)
_CODES = {"id", "ids", "idx", "index", "code", "codes"}
"""Last words of names of classes as numbers."""
_SOURCES = {"src", "source", "tgt", "trg", "target"}
_COPIED = (
    column_words.COPIES
    | column_words.LANGUAGES
    | (column_words.CODES - {"no"})
    | {
        *("clean", "original", "processed", "translation", "translated", "correct", "raw", "norm"),
        *("orig", "annot", "annotated", "templ", "template"),
    }
)
"""Words by which the names of two forms of a text differ."""
REWRITTEN = {
    *("raw", "clean", "cleaned", "normalized", "normalised", "processed", "preprocessed"),
    *("lemmatized", "stemmed", "tokenized", "final", "combined"),
}
"""Words in names of texts that are rewritten, though what they say may describe others."""
PAIRING = (
    column_words.ASKING | column_words.ANSWERING | column_words.HEADINGS | column_words.TEXTS
) - {
    "correct",
    "corrected",
    "original",
    "translation",
}
"""Words by which the names of two texts of a pair differ."""
_SIDES = [
    *({"a", "b"}, {"left", "right"}, {"first", "second"}, {"positive", "negative"}, {"x", "y"}),
    *({"pos", "neg"}, {"pros", "cons"}, {"pro", "con"}, {"one", "two"}),
]
"""Words in which the names of two texts of a pair differ."""
_PARTS_OF_NAMES, HUMP = re.compile(r"[^\W\d_]+|\d+"), re.compile(r"(?<=[a-z])(?=[A-Z])")


def is_question(name: str) -> bool:
    """Return whether a name is a question of a survey, or names a scale: `Satisfaction (1-5)`."""
    return name.rstrip().endswith(("?", "?", "؟")) or _SCALE.search(name) is not None


def names_class(name: str) -> bool:
    """Return whether a name ends in a word for classes, which is none for texts."""
    return column_words.ends_in(name, CLASSES - column_words.TEXTS - column_words.ASKING)


def is_known(name: str) -> bool:
    """Return whether a name is one of a column of samples of some task."""
    known = names_of_samples()
    key, stem = normalize_name(name), name_stem(name)
    return key in known.single or key in known.parts or (key != stem in known.numbered)


def is_described(name: str, look: str) -> bool:
    """Return whether a column's name says that it identifies or describes a sample."""
    key = normalize_name(name)
    if name.startswith("_") or is_question(name):
        return name.startswith("_") and look != "text"
    *_, noun, last = ["", *split_name(name)]
    if noun in column_words.LABELS and last in _CODES and look != "codes":
        return False  # intent_id
    is_description = (
        key in DESCRIPTIONS
        or words_of(name)[-1] in DESCRIPTIONS
        or column_words.ends_in(name, column_words.METADATA)
    )
    return (
        is_identifier(name)
        or key in IDENTIFIERS
        or key.startswith("unnamed:")
        or (is_description and look != "text" and REWRITTEN.isdisjoint(split_name(name)))
    )


def are_unrelated(text: str, other: str, names: Iterable[str]) -> bool:
    """Return whether a text is the title of a work or product, or another one is a part of it, a
    copy of it or a reply to it, or about something else."""
    if are_twins(text, other):
        return False
    first, second = words_of(text), words_of(other)
    titles, things = column_words.HEADINGS - column_words.SUBJECTS, column_words.THINGS
    if first[-1] in titles | things:
        is_of_thing = first[:-1] != second[:-1] and not (things | column_words.METADATA).isdisjoint(
            first[:-1] or first
        )
        is_described = second[-1] in column_words.DESCRIBING
        others = {words_of(name)[-1] for name in names}
        return not is_described and (is_of_thing or not column_words.WORKS.isdisjoint(others))
    if {*first} & REWRITTEN != {*second} & REWRITTEN:
        return True  # one of two is rewritten, or both in other ways
    asking = {*column_words.ASKING, "post"}
    is_reply = not {*second}.isdisjoint({"reply", "response", *column_words.ANSWERS})
    more = {*first} ^ {*second}
    is_copy = (bool(more) and more <= _COPIED) or (
        second[-1] in _COPIED and not {*first}.isdisjoint(second[:-1])
    )
    is_same = (
        first[-1] == second[-1] and min(len(first), len(second)) > 1 and more.isdisjoint(PAIRING)
    )
    return (
        second[0] in column_words.PARTS
        or is_copy
        or _COPIED.issuperset(second)
        or is_same
        or (is_reply and asking.isdisjoint(first))
    )


def are_numbered(text: str, other: str) -> bool:
    """Return whether two names differ in a number only: `reference_1`, `reference_2`."""
    is_named = not text.startswith(NO_HEADER)
    return is_named and name_stem(text) == name_stem(other) != normalize_name(text)


def are_translations(text: str, other: str) -> bool:
    """Return whether two names differ in a language: `en` and `de`, `Text EN` and `Text DE`."""
    words = [{*split_name(name)} for name in (text, other)]
    codes = [some & (column_words.CODES | column_words.LANGUAGES) for some in words]
    rest = [some - both - _SOURCES for some, both in zip(words, codes, strict=True)]
    return bool(codes[0] and codes[1]) and codes[0].isdisjoint(codes[1]) and rest[0] == rest[1]


def are_twins(text: str, other: str) -> bool:
    """Return whether two names differ in a number, a letter or a side only: `ltable`, `rtable`."""
    one, two = (_PARTS_OF_NAMES.findall(HUMP.sub(" ", name).lower()) for name in (text, other))
    differing = [pair for pair in zip(one, two, strict=False) if pair[0] != pair[1]]
    if len(one) != len(two) or len(differing) != 1:
        return False
    first, second = differing[0]
    return (
        {first, second} in _SIDES
        or (first.isdigit() and second.isdigit())
        or ({first[0], second[0]} == {*"lr"} and first[1:] == second[1:])
    )
