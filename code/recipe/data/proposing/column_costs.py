"""Rank the ways to read a file, by the names of its columns and by what they look like.

A way gives columns to the roles of a form. It costs the mean of what its roles cost, by name and by
look, and what the whole adds; the cheapest is the likeliest. All rules are in the tables below.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from recipe import column_words
from recipe.column_words import TEXTS, split_name, words_of
from recipe.data.column_matching import PAIRED, is_label
from recipe.data.column_names import SPLIT_COLUMNS, splits_in
from recipe.data.column_settings import is_identifier
from recipe.data.proposing.column_looks import WHOLE
from recipe.data.proposing.name_meanings import (
    CLASSES,
    HUMP,
    NO_HEADER,
    PAIRING,
    REWRITTEN,
    are_numbered,
    are_translations,
    are_twins,
    are_unrelated,
    is_described,
    is_known,
    is_question,
    names_class,
)
from recipe.settings import DataSettings, split_values
from recipe.spec import (
    LABEL_IS_ABOUT,
    PARTS_OF_SAMPLES,
    SCORE_NAMES,
    CellKind,
    Column,
    Form,
    name_stem,
    normalize_name,
)
from recipe.task_table import names_of_samples, names_target

LISTED, OF_TASK, NAMED, SIMILAR, RELATED, AKIN, UNKNOWN = 0, 1, 1, 3, 4, 6, 10
"""What a name costs: one that a spec lists, for any task or if the task is given, one that ends in
it, one like it, one that ends in a word for the role, one with such a word or with one for a like
role, and any other."""
_ROLE_WORDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "asking": (column_words.ASKING, column_words.TEXTS | column_words.OTHER_TEXTS),
    "answering": (
        column_words.ANSWERING | column_words.SUMMARIES | column_words.TRANSLATIONS,
        column_words.HEADINGS,
    ),
    "text": (
        column_words.TEXTS | column_words.OTHER_TEXTS | column_words.ASKING | column_words.HEADINGS,
        column_words.ANSWERING,
    ),
    "found": (column_words.ANSWERING, column_words.TEXTS | column_words.HEADINGS),
    "label": (column_words.LABELS | column_words.OTHER_LABELS, column_words.LABEL_MARKS),
    "choice": (
        column_words.ANSWERS | column_words.KEYS,
        column_words.LABELS | column_words.OTHER_LABELS,
    ),
}
"""Words for a role, and for like ones."""
_ALIKE = dict.fromkeys(("text", "words", "codes", "constant", "list", "records"), 0)
_LOOKS: Mapping[str, Mapping[str, int]] = {
    "text": {"text": 0, "words": 3, "list": 6, "category": 12},
    "answers": _ALIKE,
    "label": {"flag": 0, "category": 0, "grade": 1, "number": 4, "codes": 6, "list": 6, "words": 9},
    "score": {"number": 3, "grade": 4, "flag": 4},
    "lists": {"list": 0, "records": 0, "spans": 0},
    "records": {"records": 0},
}
"""What a look costs in a role; a column of another look cannot have it."""
_SECOND, _STATE, _DESCRIBED, _CLASS_AS_SCORE = 15, 2, 3, 3
"""What it costs that other names are listed for a role; that a label's name says how far the work
on a sample is or that it is computed, or who or where it is from; that a class is a score."""
_FLAG, _SORT = 5, 3
"""What a flag of any name costs as a label at most, and what it adds to labels that sort things."""
_NEXT, _JUDGED, _ROUTED, _ANSWER, _LATE = -2, -2, -3, 3, 2
"""What `label_cost` adds for each of these."""
_OF_LABELS = {"method", "metodo", "methode", "metode", "source", "author", "ban", "rule"}
"""Words in names of what describes labels, or of authors."""
_SCORES = {*SCORE_NAMES, "sim", "relatedness"}
_STATES = {"status", "state", "department"}
_LISTS_OF_WORDS = {"concept", "token", "word"}
_LISTS_OF_TURNS = {"chat", "conversation", "dialog", "dialogue", "turn", "utterance"}
"""Last words of names of lists of strings that make a text, or a conversation."""
_UNREAD: Mapping[str, int] = {"text": 4, "words": 1, "list": 1, "records": 2}
_KNOWN_UNREAD, _TARGET_UNREAD, _ALONE, _HALF, _UNRELATED = 2, 6, 10, 4, 12
"""What columns that are not read cost, beside `_UNREAD` by their looks: each one that belongs to
samples by its name; any that may be a label; any if only a text is read;
a text where a query is, or where its title is read alone; that one of two texts is a part of the
other one or a reply to it, or the title of a work."""
_UNPAIRED, _UNORDERED, _NEEDS_TASK, _MORE_ROLES = 3, 1, 1, -1
"""What it costs that two texts are no pair by their names, or in another order than in the file,
that a form needs the task, and that there is one role more."""
_TRANSLATED = -4
"""What two texts cost as source and target whose names differ in a language."""
_MOST_CANDIDATES = 6
_FEW_FLAGS, _FEW_COLUMNS, _FEWEST_CHOICES = 5, 2, 4
"""Flags that need not belong together; columns of which one may be a label by any name; those that
a question with choices has, at least."""
_QUERIES = {"query", "question", "search"}
_IMAGE_WORDS = {"image", "img", "file", "filename", "path", "photo"}
_ASKING = {"prompt", "source", "query", "question", "context", "input"}
_CLEANED = {"clean", "cleaned", "processed", "preprocessed", "final", "combined"}
"""Those of `REWRITTEN` in names of texts that were made to be learned."""
_ABOUT = {name for name, why in PARTS_OF_SAMPLES.items() if why == LABEL_IS_ABOUT}
_BY_NAME = {"starts", "is_impossible", "id", "choices.label", "tools"}
_ANSWERED = (
    (column_words.TITLES | column_words.HEADINGS | column_words.WORKS | column_words.THINGS)
    - column_words.ASKING
    - column_words.ANSWERING
)
_OPINIONS = column_words.OPINIONS | {"recommend", "satisfied", "stance", "verdict"}
_NO_CLASSES = {"nothing", "words", "constant"}
_NOT_LABELS = (
    (column_words.THINGS | column_words.METADATA | column_words.TEXTS | column_words.ASKING)
    - column_words.LABELS
    - column_words.OTHER_LABELS
)
"""Last words of names of what has few values and is no label: people, things, texts."""
_ASIDE = (
    (column_words.METADATA | column_words.THINGS | column_words.STATES)
    - column_words.ASKING
    - column_words.ANSWERING
    - column_words.DESCRIBING
)
_NO_LABELS = (
    column_words.METADATA | column_words.WORKS | column_words.RECORDS
) - column_words.LABELS
Roles = Mapping[str, Sequence[str]]


def rank_roles(
    form: Form, looks: Mapping[str, str], alike: Sequence[Sequence[str]], settings: DataSettings
) -> Iterator[tuple[float, Roles]]:
    """Yield columns for the roles of a form, each with what they cost.

    Args:
        looks: What each column looks like, by `look_of`.
        alike: Groups of columns of the same classes, by `alike_labels`.
    """
    choices: list[list[tuple[float, Sequence[str]]]] = []
    columns: list[Column] = []
    for column in form.columns:
        scored = _candidates(column, form, looks, alike, settings)
        if column.is_optional and not scored:
            continue
        choices.append(sorted(scored, key=lambda item: item[0])[:_MOST_CANDIDATES])
        columns.append(column)
    for combination in itertools.product(*choices):
        used = [name for _, some in combination for name in some]
        if not used or len({*used}) < len(used):
            continue
        roles = {c.role: some for c, (_, some) in zip(columns, combination, strict=True)}
        rest = {name: look for name, look in looks.items() if name not in used}
        is_lone = len(roles) == 1 and columns[0].kind is CellKind.TEXT
        if is_lone and any(
            names_target(name) or look == "text" or (look == "records" and is_known(name))
            for name, look in rest.items()
            if column_words.plain_word(name) not in column_words.TITLES
        ):
            continue  # another text, or a label, belongs to it
        cost = sum(cost for cost, _ in combination) / len(combination)
        texts = [roles[c.role][0] for c in columns if c.kind is CellKind.TEXT]
        if len(texts) == len(columns) > 1:  # one is written for the other
            cost = _TRANSLATED if are_translations(*texts[:2]) else cost
            if are_numbered(*texts[:2]) and "text" in rest.values():
                cost += _UNRELATED  # several answers to the other text
        yield cost + _whole_cost(form, roles, looks), roles


def _candidates(
    column: Column,
    form: Form,
    looks: Mapping[str, str],
    alike: Sequence[Sequence[str]],
    settings: DataSettings,
) -> list[tuple[float, Sequence[str]]]:
    """Return the columns that can have a role, each with its cost."""
    if given := _given(column, settings):
        return [(LISTED, given)]
    listed = [name for name in looks if _name_cost(column, name) == LISTED]
    if column.is_repeated and not column.is_list:
        filled = [name for name in listed if looks[name] != "nothing"]
        groups = [filled] if len(filled) > 1 else _groups(looks)
        return [(-5.0 * bool(listed), group) for group in groups]
    scored: list[tuple[float, Sequence[str]]] = []
    near = [name for name in looks if _name_cost(column, name) <= NAMED]
    for name in looks if not column.is_optional else near:
        cost = _role_cost(column, form, name, looks[name])
        if cost is not None:
            is_copy = column.role == "text" and not _CLEANED.isdisjoint(words_of(name))
            is_second = bool(listed) and name not in listed and not is_copy
            scored.append((cost + _SECOND * is_second, (name,)))
    records = column_words.RECORDS
    flags = [
        name
        for name, look in looks.items()
        if look == "flag" and not column_words.ends_in(name, records)
    ]
    if column.is_list and column.is_target:
        opinions = [name for name, look in looks.items()
                    if column_words.ends_in(name, _OPINIONS)
                    or (is_question(name) and look in ("grade", "number"))]  # fmt: skip
        unusual = [name for name in flags if words_of(name)[0] != "has"
                   and not column_words.ends_in(name, column_words.LABELS)]  # fmt: skip
        more = _SORT * bool(unusual or opinions)
        sorting = [name for name in looks if name not in opinions and not is_question(name)]
        scored = [
            (min(cost, _FLAG) if name in unusual else cost + more * (name in sorting), (name,))
            for cost, (name,) in scored
        ]
    are_marked = len({words_of(name)[0] in column.marks for name in flags}) == 1
    others = [name for name in listed if looks[name] != "flag"]
    has_flag = len(others) < len(listed) and not any(map(is_label, listed))
    if column.is_list and column.is_target and len(flags) > 1 and are_marked:
        is_other = bool(others) or any(map(is_label, listed))
        is_other |= any(look != "flag" and _name_cost(column, name) == SIMILAR
                       for name, look in looks.items())  # fmt: skip
        opinion_count = sum(column_words.ends_in(name, _OPINIONS) for name in flags)
        firsts = {HUMP.split(name.replace("_", " "))[0].split()[0] for name in flags}  # Sub1_Toxic
        are_numbered = len(firsts) == len(flags) and len({*map(name_stem, firsts)}) == 1
        is_few = opinion_count == 1 and len(flags) < _FEW_FLAGS and not has_flag
        is_other = is_other or (is_few and not are_numbered)
        scored.append((AKIN if is_other else -2, flags))
    if column.is_list and column.is_target and not listed:
        scored += [(-2, group) for group in alike]
    return scored


def _whole_cost(form: Form, roles: Roles, looks: Mapping[str, str]) -> float:
    """Return what the order of columns, and those that are not read, cost."""
    used = list(itertools.chain(*roles.values()))
    rest = [name for name in looks if name not in used and not is_identifier(name)]
    unread = [name for name in rest if not is_described(name, looks[name])]
    if form.columns[0].role == "text" and len(form.columns) == 1:
        unread = [n for n in unread if column_words.plain_word(n) not in column_words.TITLES]
    is_cleaned = any(not _CLEANED.isdisjoint(words_of(name)) for name in used)
    copies = [
        name
        for name in unread
        if not REWRITTEN.isdisjoint(words_of(name)) or (is_cleaned and looks[name] == "text")
    ]
    cost: float = sum(_UNREAD.get(looks[name], 0) for name in unread if name not in copies)
    has_label = any(form[r].is_target and form[r].kind is not CellKind.TEXT for r in roles)
    known = [
        name
        for name in unread
        if name not in copies
        and is_known(name)
        and not ("label" in roles and names_target(name))
        and not column_words.ends_in(name, column_words.DESCRIBING)
    ]
    cost += _KNOWN_UNREAD * len(known) + _NEEDS_TASK * form.needs_task
    choices = [name_stem(name) for name in rest if name_stem(name) in names_of_samples().numbered
               and name_stem(name) != normalize_name(name)]  # fmt: skip
    cost += _TARGET_UNREAD * (len(choices) > len({*choices}))
    labels, has_few = {"flag", "category", "grade"}, len(rest) + len(used) <= _FEW_COLUMNS
    may_be_label = any(map(names_target, unread)) or any(
        (looks[name] in labels and (has_few or not column_words.ends_in(name, _NO_LABELS)))
        or (looks[name] == "flag" and not column_words.ends_in(name, column_words.RECORDS))
        or (looks[name] in ("number", "grade") and words_of(name)[-1] in _SCORES)
        or (
            column_words.ends_in(name, column_words.LABELS)
            and looks[name] in ("number", "codes", "words")
        )
        for name in unread
    )
    looks_unread = {looks[name] for name in unread} | {
        looks[n]
        for n in rest
        if looks[n] == "category" and (has_few or not column_words.ends_in(n, _NO_LABELS))
    }
    if len(roles) == 1 and (may_be_label or looks_unread - _NO_CLASSES):
        cost += _ALONE
    elif not has_label and may_be_label:
        cost += _TARGET_UNREAD
    texts = [some[0] for r, some in roles.items() if form[r].kind is CellKind.TEXT or r == "text"]
    asking = {name for name in (*texts, *unread) if _QUERIES & {*words_of(name)}}
    others = [
        name
        for name in rest
        if looks[name] in ("text", "words")
        and (name in unread or not column_words.THINGS.isdisjoint(words_of(name)))
    ]
    positions = list(map(list(looks).index, texts))
    cost += _UNORDERED * (positions != sorted(positions)) + _MORE_ROLES * len(roles)
    cost += _cost_of_texts(texts, others, asking, looks)
    turns = [words_of(roles[role][0])[-1] for role in ("prompt", "completion") if role in roles]
    cost += 2 * _HALF * (len(turns) > 1 and not _ANSWERED.isdisjoint(turns))
    labels_of = [*words_of(roles["label"][0])[:-1]] if "label" in roles else []
    cost -= NAMED * (labels_of != [] and labels_of in [[*words_of(name)[:-1]] for name in texts])
    if form.is_pair or "text_pair" in roles:
        cost += _cost_of_pair(form, roles, texts, asking, looks)
        is_headed = words_of(texts[0])[-1] in column_words.HEADINGS
        cost += 2 * _UNPAIRED * (form.is_pair and not has_label and is_headed) * (1 + may_be_label)
    return cost


def label_cost(label: str, texts: Sequence[str], looks: Mapping[str, str]) -> float:
    """Return what a label costs more than another one of the same texts: what was written for a
    text stands next to it; of requests it is who deals with them, and not how urgent they are, how
    far the work on them is, or what the customer thinks; of scores it is that of the whole."""
    order, cost = list(looks), 0.0
    is_late = column_words.ends_in(label, column_words.URGENCY | column_words.STATES)
    if not is_late and (looks[label] == "flag" or column_words.ends_in(label, CLASSES)):
        cost += _NEXT * (bool(texts) and order.index(label) == order.index(texts[-1]) + 1)
        cost += _NEXT * (label == order[-1])
    is_answer = column_words.ends_in(label, column_words.SATISFACTION)
    is_class = looks[label] == "category" and not is_answer
    cost += _JUDGED * (is_class and column_words.ends_in(label, _OPINIONS))
    if all(column_words.REVIEWS.isdisjoint(words_of(text)) for text in texts):
        cost += _ROUTED * column_words.ends_in(label, column_words.ROUTING) + _ANSWER * is_answer
    cost += _JUDGED * (not WHOLE.isdisjoint(split_name(label)))
    is_late |= not _OF_LABELS.isdisjoint(split_name(label))
    return cost + _LATE * is_late


def _cost_of_texts(
    texts: Sequence[str], others: Sequence[str], asking: set[str], looks: Mapping[str, str]
) -> float:
    """Return what the names of the texts cost.

    Args:
        others: Texts that are not read.
        asking: Texts, read or not, that are queries by their names.
    """
    is_asked, is_lone, cost = not asking.isdisjoint(texts), len(texts) == 1, 0.0
    if not is_asked:
        cost += _UNRELATED * any(
            column_words.ends_in(name, _ASIDE) and not is_question(name) for name in texts
        )
        replies = [name for name in texts[:1] if column_words.ANSWERS & {*words_of(name)}]
        cost += 2 * _HALF * (is_lone and replies != [] and len(others) > 0)
    if is_lone and asking and others and (is_asked or asking & {*others}):
        cost += 2 * _HALF
    if is_lone and words_of(texts[0])[-1] in column_words.HEADINGS:
        cost += _HALF * any(looks[name] == "text" for name in others)
    return cost + _UNPAIRED * (is_asked and texts[0] not in asking)


def _cost_of_pair(
    form: Form, roles: Roles, texts: Sequence[str], asking: set[str], looks: Mapping[str, str]
) -> float:
    """Return what it costs that two texts are read together, by their names."""
    is_asked = not asking.isdisjoint(texts)
    one, two = words_of(texts[0]), words_of(texts[-1])
    is_post = "score" in roles and one[-1] in column_words.TITLES
    first_two = [role for role in form.roles[:2] if role in roles]
    is_listed = not is_post and all(
        _name_cost(form[role], roles[role][0]) == LISTED for role in first_two
    )
    is_headed = one[-1] in column_words.HEADINGS
    is_pair = (
        is_listed
        or ("text_pair" in roles and {*two} <= _ABOUT)
        or (len(texts) > 1 and are_twins(*texts[:2]))
        or (one[-1] == two[-1] and not ({*one} ^ {*two}).isdisjoint(PAIRING))
        or (is_headed and "text_pair" in roles and not is_asked)
    )
    cost = (-_UNPAIRED if is_pair else _UNPAIRED) + _HALF * (asking != set() and not is_asked)
    if not is_pair and len(texts) > 1:
        cost += _HALF * any(are_twins(*two) for two in itertools.combinations(looks, 2))
    is_generated = any(form[role].is_target and form[role].kind is CellKind.TEXT for role in roles)
    pairs = itertools.permutations(texts, 2)
    if not is_asked and not is_generated and any(are_unrelated(*pair, looks) for pair in pairs):
        cost += _UNRELATED
    return cost


def _given(column: Column, settings: DataSettings) -> Sequence[str]:
    """Return the columns that hyperparameters name for a role."""
    if column.role in settings.columns_by_role:
        return settings.columns_by_role[column.role]
    named = split_values(getattr(settings, column.setting)) if column.setting else []
    if column.setting == "text_pair_column" and not named:
        return split_values(settings.text_column)[1:2]
    return named[:1] if column.setting == "text_column" else named


def _groups(looks: Mapping[str, str]) -> list[Sequence[str]]:
    """Return groups of columns that differ in a number or letter: `answer_a`, `answer_b`."""
    by_stem: dict[str, list[str]] = {}
    for name, look in looks.items():
        key = "" if len(name.strip()) == 1 else name_stem(name)
        if not {"positive", "negative", "example", "annotator", "model"}.isdisjoint(words_of(name)):
            continue  # examples and judgements, not choices
        is_named = not name.startswith(NO_HEADER)
        is_text = look in ("text", "words", "category", "codes")
        if is_named and is_text and key != normalize_name(name):
            by_stem.setdefault(key, []).append(name)
    if len(looks) > _FEWEST_CHOICES and all(name.startswith(NO_HEADER) for name in looks):
        by_stem[NO_HEADER] = [*looks][1:-1]  # MMLU's: a question, its choices, a letter
    return [group for group in by_stem.values() if len(group) > 1]


def _role_cost(column: Column, form: Form, name: str, look: str) -> float | None:
    """Return what a column costs in a role; None if it cannot have it."""
    by_name = _name_cost(column, name)
    is_named = by_name <= SIMILAR
    if column.kind is CellKind.ARTICLES:
        return None  # found by its name, or not at all
    is_file = look in ("codes", "words") and not _IMAGE_WORDS.isdisjoint(words_of(name))
    if column.kind is CellKind.IMAGE and is_file:
        return SIMILAR
    if column.kind in (CellKind.TOKEN_IDS, CellKind.IMAGE) or column.role in _BY_NAME:
        return by_name - 5 if is_named else None
    if column.kind is CellKind.TEXTS or column.role in ("choices", "messages", "tokens", "tags"):
        return _list_cost(column, name, look, by_name)
    is_target = column.is_target and column.kind is not CellKind.TEXT
    is_split = len(splits_in(name)) > 1 or normalize_name(name) in map(
        normalize_name, SPLIT_COLUMNS
    )
    if is_split or is_described(name, look):
        if is_named:
            return by_name if look != "nothing" else None
        is_class = is_target and look in ("category", "flag")
        is_class = is_class and not is_split and not is_identifier(name)
        return by_name + _DESCRIBED if is_class else None
    if column.role == "answers" and look == "records" and by_name > RELATED:
        return None
    if column.role == "answers" and "starts" not in form.roles and look not in _LOOKS["lists"]:
        return by_name if by_name <= RELATED and look != "text" else None
    kind = column.role if column.role in ("answers", "score") else "label" if is_target else "text"
    if column.role == "answer" and by_name > AKIN and not name.startswith(NO_HEADER):
        return None
    if kind == "score" and by_name == LISTED:
        return LISTED
    if kind == "score" and by_name == OF_TASK and look in ("flag", "grade"):
        return by_name + _CLASS_AS_SCORE + _LOOKS["score"][look]
    fit = _LOOKS[kind].get(look)
    if fit is None:
        if column.role == "answer" and look in ("text", "words") and by_name == LISTED:
            return NAMED  # the text of a choice
        more = ["records"] * (column.role in ("prompt", "completion"))  # lists of messages
        return by_name if look in ("nothing", "constant", *more) and by_name == LISTED else None
    if look == "list" and kind == "text" and not column.is_target:
        if words_of(name)[-1] in _LISTS_OF_WORDS:
            by_name = min(by_name, RELATED)
        elif "answers" in words_of(name):
            return None
    if look == "list" and column.setting == PAIRED and by_name > NAMED:
        return None  # several labels, rather than passages
    is_response = is_target and name.endswith(".responses")
    if look == "list" and by_name > (AKIN if is_target else RELATED) and not is_response:
        return None
    if kind == "text" and by_name > NAMED and names_class(name):
        fit += _HALF
    if kind == "score" and not column_words.AGGREGATES.isdisjoint(words_of(name)):
        fit += _HALF
    if kind == "label":
        if column_words.ends_in(name, column_words.QUESTIONS) and by_name > NAMED:
            return None
        if look in ("grade", "number") and is_question(name):
            by_name = min(by_name, SIMILAR)
        if look in ("category", "flag", "grade"):
            fit += _DESCRIBED * (
                (words_of(name)[-1] in _ABOUT or column_words.ends_in(name, _NOT_LABELS))
                + column_words.ends_in(name, column_words.METADATA)
            )
        fit += "." in name
        is_state = not {*_STATES, *column_words.AGGREGATES}.isdisjoint(
            re.split(r"[\s_]+", name.lower())
        )
        return by_name + fit + _STATE * is_state
    return _text_cost(column, name, look, by_name, fit) if kind == "text" else by_name + fit


def _list_cost(column: Column, name: str, look: str, by_name: int) -> float | None:
    """Return what a column costs in the role of a list; None if it cannot have it."""
    is_named = by_name <= SIMILAR
    if column.role in ("tokens", "tags"):
        is_listed = look in _LOOKS["lists"] and (by_name < UNKNOWN or column.is_target)
        if look == "spans" and column.is_target:
            return min(by_name, SIMILAR) - 9
        if look == "text" and not column.is_target and column_words.ends_in(name, TEXTS):
            return min(by_name, RELATED)  # of spans
        return by_name - 3 * (by_name < UNKNOWN) if is_listed or is_named else None
    fits = look in _LOOKS["records" if column.role == "messages" else "lists"]
    if column.role == "messages" and look == "list" and words_of(name)[-1] in _LISTS_OF_TURNS:
        return min(by_name, RELATED) - 6
    unlikely = _HALF * (column.role != "messages" and by_name == UNKNOWN)
    return by_name - 6 + unlikely if fits and (look != "spans" or is_named) else None


def _text_cost(column: Column, name: str, look: str, by_name: int, fit: int) -> float | None:
    """Return what a column costs as a text; None if its name or look is that of something else."""
    words = {*words_of(name)}
    if column.role == "text" and not words.isdisjoint(_CLEANED):
        fit -= 2 * NAMED
    elif not words.isdisjoint(column_words.COPIES):
        fit += NAMED
    if by_name <= SIMILAR:
        is_result = column.role == "source" and column_words.SUMMARIES & words
        return by_name + fit + _HALF * bool(is_result)
    is_found = column.setting == "text_pair_column" and column.role != "text_pair"
    if column.is_target:
        fit += 2 * _HALF * (look != "text" and names_class(name))
        return None if look == "category" else by_name + fit
    fit += _HALF * (column.role == "source" and bool(words & column_words.SUMMARIES))
    is_answer = column.role in _ASKING and words & column_words.ANSWERING - column_words.ASKING
    if (is_answer and not words & column_words.ASKING) or (
        look == "category" and by_name == UNKNOWN
    ):
        return None
    is_target = by_name > RELATED and (
        (names_target(name) and not (look == "text" and words & column_words.ANSWERS))
        or (look != "text" and column_words.ends_in(name, column_words.LABELS))
    )
    if is_target or (
        column.role == "input" and not column_words.ends_in(name, column_words.CONTEXTS)
    ):
        return None
    return by_name + fit + 3 * (is_found and by_name == UNKNOWN)


@functools.lru_cache(maxsize=8192)
def _name_cost(column: Column, name: str) -> int:
    """Return what a name costs in a role."""
    key = normalize_name(name)
    listed = {*map(normalize_name, column.names)}
    if (key in listed and not column.is_numbered) or (
        column.is_repeated and key != name_stem(name) in listed
    ):
        return SIMILAR if key in map(normalize_name, column.weak_names) else LISTED
    if column.role == "label" and is_label(name):
        return LISTED
    words = words_of(name)
    if key in map(normalize_name, column.names_of_task) and not column.is_numbered:
        return OF_TASK
    weak = {*map(normalize_name, column.weak_names)}
    if words[-1] in listed - weak and not column.is_numbered:
        return NAMED
    if column.is_like(name):
        is_any_text = column.role in _ASKING and words[-1] in column_words.TEXTS
        return RELATED if words[0] in column.marks or is_any_text else SIMILAR
    role = "label" if column.is_target else "text"
    if column.role in _ASKING:
        role = "asking"
    elif column.role == "answer":
        role = "choice"
    elif (column.kind is CellKind.TEXT and column.is_target) or column.role == "answers":
        role = "answering"
    elif column.setting == "text_pair_column" and column.role != "text_pair":
        role = "found"
    exact, akin = _ROLE_WORDS[role]
    is_answer = role == "answering" and words[-1] == "text" and not exact.isdisjoint(words)
    if words[-1] in exact or is_answer:
        return RELATED
    is_compound = any(len(word) > 3 and words[-1].endswith(word) for word in exact)  # Freitext
    is_akin = is_compound or words[-1] in akin or not {*words}.isdisjoint(exact | akin)
    return AKIN if is_akin else UNKNOWN


def find_listed(column: Column, names: Sequence[str]) -> list[str]:
    """Return the columns that have a role by their names, if the task is given."""
    best = min((_name_cost(column, name) for name in names), default=UNKNOWN)
    return [name for name in names if _name_cost(column, name) == best <= OF_TASK]
