"""Score columns for roles by their names and contents, for the order of proposals."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa  # type: ignore[import-untyped]

from recipe import column_words
from recipe.column_words import words_of
from recipe.data import values
from recipe.data.column_names import SPLIT_COLUMNS, splits_in
from recipe.data.column_settings import (
    holds_texts,
    is_category,
    is_flag,
    is_identifier,
    may_be_text,
    sample_cells,
)
from recipe.data.files.part import Part, is_list, is_number
from recipe.settings import DataSettings, split_values
from recipe.spec import (
    COMPLETION_NAMES,
    DESCRIPTIONS,
    HEADS_OF_TEXTS,
    IDENTIFIERS,
    TEXT_NAMES,
    CellKind,
    Column,
    Form,
    name_stem,
    normalize_name,
)
from recipe.task_table import names_of_samples, names_target

_MOST_CANDIDATES = 6
_LONG, _LONG_CELL = 4.0, 25
"""Words, and characters, above which a cell is a text rather than some words."""
_FEW = 10
"""Values of a column of grades."""
_NAMED, _OF_TASK, _WEAK, _SIMILAR, _SUGGESTED, _FEEBLE = 1.0, 0.9, 0.8, 0.7, 0.5, 0.3
"""Scores of a name: one that a task lists, a weak one, one like it, and a related word in it."""
_FIT: Mapping[str, Mapping[str, float]] = {
    "text": {"text": 0.6, "words": 0.3, "category": -0.3, "list": 0.0, "constant": 0.3},
    "answers": dict.fromkeys(("text", "words", "codes", "constant", "list", "records"), 0.3),
    "label": {
        "flag": 0.6,
        "category": 0.6,
        "grade": 0.5,
        "number": 0.2,
        "list": 0.3,
        "codes": 0.0,
        "constant": 0.0,
        "words": -0.3,
    },
    "score": {"flag": -0.2, "grade": -0.2, "number": 0.4},
}
"""Scores of what a column looks like for what its role holds; others cannot have the role."""
_UNREAD = {"text": 0.25, "words": 0.1, "category": 0.1, "flag": 0.1, "list": 0.1, "records": 0.2}
_MOST_UNREAD, _KNOWN_UNREAD, _TARGET_UNREAD, _LONE = 0.75, 0.2, 0.35, 1.0
"""What columns that would not be read take from a score: at most all of them, one that belongs to
samples by its name, any that may be a target, and any if only a text is read, and they are rather
meant, too."""
_OTHER_ROLE = 0.3
"""What a name that is known for another role of the form takes from a score."""
_UNPAIRED = 0.15
"""What two texts whose names are no pair take from a score."""
_ASKING = {"prompt", "source", "query", "question", "context", "input"}
_CONTEXTS = {"context", "kontext", "contexto", "contexte", "input", "eingabe", "entrada"}
_IMAGE_WORDS = {"image", "img", "file", "filename", "path", "photo"}
_ANSWERING = {"completion", "target", "answers"}
Roles = Mapping[str, Sequence[str]]


def narrow_form(form: Form, names: Iterable[str]) -> Form:
    """Return a form with the names of the pair of which a file has most."""
    known = set(map(normalize_name, names))
    # Names that mean as much without the other one of a pair.
    alone = {*map(normalize_name, (*TEXT_NAMES, *COMPLETION_NAMES)), *DESCRIPTIONS}
    pairs = [tuple(map(normalize_name, pair)) for pair in form.pairs]
    counts = [2 * known.issuperset(pair) or len(known.intersection(pair) - alone) for pair in pairs]
    if not any(counts):
        return form
    best = form.pairs[counts.index(max(counts))]
    if max(counts) == len(best):
        return form.with_pair(best)
    columns = [
        dataclasses.replace(column, names=(name,))
        if normalize_name(name) in known - alone
        else column
        for column, name in zip(form.columns, best, strict=False)
    ]
    return dataclasses.replace(form, columns=(*columns, *form.columns[2:]))


def score_assignments(
    form: Form, profiles: Mapping[str, str], settings: DataSettings
) -> Iterator[tuple[float, Roles]]:
    """Yield columns for the roles of a form, each with its score."""
    names = list(profiles)
    choices: list[list[tuple[float, Sequence[str]]]] = []
    columns: list[Column] = []
    for column in form.columns:
        if given := _given(column, settings):
            scored: list[tuple[float, Sequence[str]]] = [(_NAMED, given)]
        elif column.is_repeated and not column.is_list:
            named = [name for name in names if _name_score(column, name) == _NAMED]
            groups = [named] if len(named) > 1 else _groups(profiles)
            scored = [(_NAMED + 0.5 * bool(named), group) for group in groups]
        else:
            rivals = [other for other in form.columns if other.role != column.role]
            scores = {name: _score(column, name, profiles[name], form) for name in names}
            scored = [
                (score - _OTHER_ROLE * _is_named_for(name, rivals, column), (name,))
                for name, score in scores.items()
                if score is not None
            ]
            flags = [name for name in names if profiles[name] == "flag"]
            is_named = any(_name_score(column, name) == _NAMED for name in names)
            if column.is_list and column.is_target and len(flags) > 1 and not is_named:
                scored.append((_NAMED + 0.2, flags))
        if column.is_optional:
            scored = [(score, some) for score, some in scored
                      if given or _name_score(column, some[0]) == _NAMED]  # fmt: skip
            if not scored:
                continue
        choices.append(sorted(scored, key=lambda item: -item[0])[:_MOST_CANDIDATES])
        columns.append(column)
    for combination in itertools.product(*choices):
        used = [name for _, some in combination for name in some]
        if not used or len({*used}) < len(used):
            continue
        roles = {c.role: some for c, (_, some) in zip(columns, combination, strict=True)}
        rest = [name for name in names if name not in used]
        is_lone = len(roles) == 1 and columns[0].kind is CellKind.TEXT
        if is_lone and any(
            names_target(name)
            or profiles[name] == "text"
            or (profiles[name] == "records" and _is_known(name))
            for name in rest
        ):
            continue  # another text, or a label, belongs to it
        score = sum(score for score, _ in combination) / len(combination) + 0.1 * len(roles)
        score += _whole_score(form, roles, profiles) - 0.05 * form.needs_task
        yield score, roles


def _is_named_for(name: str, rivals: Sequence[Column], column: Column) -> bool:
    """Return whether a column is known by name for other roles, and not for this one."""
    return _name_score(column, name) < _NAMED in [_name_score(other, name) for other in rivals]


def _whole_score(form: Form, roles: Roles, profiles: Mapping[str, str]) -> float:
    """Return what the order of columns, and those that are not read, add to the score."""
    used = list(itertools.chain(*roles.values()))
    unread = [n for n in profiles if n not in used and not _describes(n, profiles[n])]
    has_label = any(form[r].is_target and form[r].kind is not CellKind.TEXT for r in roles)
    cost = sum(
        _UNREAD.get(profiles[name], 0.0) + 0.1 * (words_of(name)[-1] in column_words.TEXT_LIKE)
        for name in unread
    )
    cost = min(cost, _MOST_UNREAD) + _KNOWN_UNREAD * sum(map(_is_known, unread))
    kinds = {profiles[name] for name in unread} - {"nothing", "words"}
    is_target_unread = any(map(names_target, unread)) or kinds & {"flag", "category", "grade"}
    if not has_label and len(roles) > 1 and is_target_unread:
        cost += _TARGET_UNREAD
    if len(roles) == 1 and kinds:
        cost += _LONE
    texts = [some[0] for r, some in roles.items() if form[r].kind is CellKind.TEXT or r == "text"]
    names = list(profiles)
    is_in_order = [names.index(name) for name in texts] == sorted(map(names.index, texts))
    is_named = all(_name_score(form[role], roles[role][0]) == _NAMED for role in form.roles[:2]
                   if role in roles)  # fmt: skip
    if form.is_pair and is_named:
        cost -= _UNPAIRED
    elif form.is_pair:
        is_headed = any(words_of(name)[-1] in HEADS_OF_TEXTS for name in texts)
        cost += -_UNPAIRED if is_headed and "text_pair" in roles else _UNPAIRED
    return 0.15 * is_in_order - cost


def _is_known(name: str) -> bool:
    """Return whether a name is one of a column of samples of some task."""
    known = names_of_samples()
    keys = {normalize_name(name), name_stem(name)}
    return bool(keys & (known.single.keys() | known.parts)) or (
        name_stem(name) != normalize_name(name) and name_stem(name) in known.numbered
    )


def _given(column: Column, settings: DataSettings) -> Sequence[str]:
    """Return the columns that hyperparameters name for a role."""
    if column.role in settings.columns_by_role:
        return settings.columns_by_role[column.role]
    named = split_values(getattr(settings, column.setting)) if column.setting else []
    if column.setting == "text_pair_column" and not named:
        return split_values(settings.text_column)[1:2]
    return named[:1] if column.setting == "text_column" else named


def _groups(profiles: Mapping[str, str]) -> list[Sequence[str]]:
    """Return groups of columns that differ in a number or letter: `answer_a`, `answer_b`."""
    by_stem: dict[str, list[str]] = {}
    for name, profile in profiles.items():
        key = "" if len(name.strip()) == 1 else name_stem(name)
        is_named = not name.startswith("column_")  # without a header
        if (
            is_named
            and profile in ("text", "words", "category", "codes")
            and key != normalize_name(name)
        ):
            by_stem.setdefault(key, []).append(name)
    return [group for group in by_stem.values() if len(group) > 1]


def _score(column: Column, name: str, profile: str, form: Form) -> float | None:
    """Return how likely a column has a role; None if it cannot."""
    by_name = _name_score(column, name)
    is_named = by_name >= _WEAK
    if form.is_pair and column.role in ("text", "text_pair") and len(column.names) > 1:
        by_name = min(by_name, _SIMILAR)  # either text may be the first
    if column.kind is CellKind.ARTICLES:
        return None  # found by its name, or not at all
    if (
        column.kind is CellKind.IMAGE
        and profile in ("codes", "words")
        and {*words_of(name)} & _IMAGE_WORDS
    ):
        return _SIMILAR
    if column.kind in (CellKind.TOKEN_IDS, CellKind.IMAGE) or (
        column.role in ("starts", "is_impossible", "id", "choices.label", "tools")
    ):
        return by_name + 0.5 if is_named else None
    if column.kind is CellKind.TEXTS or column.role == "choices":
        return by_name + 0.5 if profile in ("list", "records") else None
    if column.role == "messages":
        return by_name + 0.6 if profile == "records" else None
    if column.role in ("tokens", "tags"):
        is_listed = profile in ("list", "records") and (by_name > 0 or column.is_target)
        return by_name + 0.3 * bool(by_name) if is_listed or is_named else None
    is_split = (
        normalize_name(name) in {*map(normalize_name, SPLIT_COLUMNS)} or len(splits_in(name)) > 1
    )
    if is_split or _describes(name, profile):
        return by_name if is_named and profile != "nothing" else None
    if column.role == "answers" and "starts" not in form.roles:
        return by_name if profile in ("list", "records") else None
    if column.role == "score":
        if normalize_name(name) in map(normalize_name, column.names):
            return by_name + 0.5
        by_name = min(by_name, _FEEBLE)  # a label of classes, rather
    kind = "text"
    if column.is_target and column.kind is not CellKind.TEXT and column.role != "answers":
        kind = "score" if column.role == "score" else "label"
    elif column.role == "answers":
        kind = "answers"
    fit = _FIT[kind].get(profile, 0.0 if profile == "nothing" and by_name == _NAMED else None)
    if fit is None or (profile == "list" and not is_named):
        return None
    if profile == "constant" and not is_named:
        fit = -0.3
    if kind == "text" and not is_named:
        if profile == "category" and column.is_target:
            return None
        if names_target(name) and not column.is_target:
            return None
        is_found = column.setting == "text_pair_column" and column.role != "text_pair"
        if (is_found and not by_name) or (
            column.role in ("text", "text_pair")
            and not is_found
            and normalize_name(name) in COMPLETION_NAMES
        ):
            fit -= 0.3
        if column.role == "input" and not _CONTEXTS & {*words_of(name)}:
            return None
    return by_name + fit


def _describes(name: str, profile: str) -> bool:
    """Return whether a column's name says that it identifies or describes a sample."""
    key = normalize_name(name)
    is_description = key in DESCRIPTIONS or words_of(name)[-1] in DESCRIPTIONS
    return (
        is_identifier(name)
        or key in IDENTIFIERS
        or key.startswith("unnamed:")
        or (is_description and profile != "text")
    )


@functools.lru_cache(maxsize=8192)
def _name_score(column: Column, name: str) -> float:
    """Return how much a name speaks for a role, from 0 to 1."""
    key = normalize_name(name)
    for names, score in ((column.names, _NAMED), (column.names_of_task, _OF_TASK)):
        listed = {*map(normalize_name, names)}
        if (key in listed and not column.is_numbered) or (
            column.is_repeated and key != name_stem(name) in listed
        ):
            return _WEAK if key in map(normalize_name, column.weak_names) else score
    words = words_of(name)
    spoken = {*words, *(f"{word}s" for word in words), name.strip().lower()}
    related: frozenset[str] = frozenset()
    if column.role in _ASKING:
        related = column_words.ASKING
    elif column.role in _ANSWERING:
        related = column_words.ANSWERING
    elif column.setting == "text_pair_column":
        related = column_words.RETRIEVED
        related |= column_words.TEXT_LIKE if column.role == "text_pair" else frozenset()
    elif column.is_target:
        related = column_words.LABEL_LIKE
    elif column.kind is CellKind.TEXT or column.role == "tokens":
        related = column_words.TEXT_LIKE
    if words[-1] in related or name.strip().lower() in related | column.similar_names:
        return _SIMILAR
    is_within = any(word in name.lower() for word in column.similar_names if not word.isascii())
    return _SUGGESTED if is_within or spoken & related else 0.0


def find_named(column: Column, names: Sequence[str]) -> list[str]:
    """Return the columns that have a role by their names."""
    best = max((_name_score(column, name) for name in names), default=0.0)
    is_known = best > _WEAK
    return [name for name in names if is_known and _name_score(column, name) == best]


def profile_column(part: Part, name: str) -> str:
    """Return what a column looks like: text, words, category, flag, grade, number, list, records,
    codes (single words), or nothing that a role holds."""
    kind = part.table.schema.field(name).type
    cells = sample_cells(part, name)
    if not cells or pa.types.is_binary(kind) or pa.types.is_struct(kind):
        return "nothing"
    if is_list(kind):
        return "records" if pa.types.is_struct(kind.value_type) else "list"
    if is_flag(part, name):
        return "flag"
    texts = [str(cell) for cell in cells]
    distinct = len({*texts})
    if distinct == 1 and len(texts) > 1:
        count = len(texts[0].split())
        return "text" if count > _LONG else "words" if count > 1 else "constant"
    if not may_be_text(part, name):
        is_grade = distinct <= _FEW and all("." not in text for text in texts)
        return ("grade" if is_grade else "number") if are_numbers(cells) else "nothing"
    parsed = values.container(texts[0])
    if isinstance(parsed, list):
        return "records" if parsed and isinstance(parsed[0], dict) else "list"
    if is_category(part, name):
        return "category"
    if not holds_texts(part, name):
        return "codes"
    words = sum(len(text.split()) for text in texts) / len(texts)
    return "text" if words > _LONG or sum(map(len, texts)) / len(texts) > _LONG_CELL else "words"


def are_numbers(cells: Sequence[object]) -> bool:
    return all(
        isinstance(cell, (int, float)) or (isinstance(cell, str) and is_number(cell))
        for cell in cells
    )
