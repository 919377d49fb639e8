"""Propose hyperparameters for data whose columns names alone do not make clear.

Names and contents of columns order what a message proposes. What trains is decided by
`recipe.data.columns`: by names, and by the hyperparameters that the user gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.column_words import ANSWERS, DISPREFERRED, PREFERRED, plain_word, split_name, words_of
from recipe.data import conversations, labels, values
from recipe.data.classes import class_checks, label_columns
from recipe.data.column_matching import is_label
from recipe.data.column_names import WORD_NAMES
from recipe.data.column_settings import (
    ColumnsError,
    is_beside_responses,
    is_identifier,
    is_search,
    quote_value,
    sample_cells,
    verdicts_in,
)
from recipe.data.columns import ColumnSelection, select_columns
from recipe.data.files import formats
from recipe.data.files.part import DATE, Part, UnclearHeader, is_list, is_number
from recipe.data.files.text_files import files_encoded
from recipe.data.layout.row_splits import SplitColumnError, split_column
from recipe.data.proposing.column_costs import Roles, find_listed, label_cost, rank_roles
from recipe.data.proposing.column_looks import alike_labels, are_numbers, look_of
from recipe.data.proposing.learnability import LEARNED_ROWS, learned_shares
from recipe.data.proposing.name_meanings import are_translations
from recipe.errors import DataError
from recipe.settings import DataSettings, split_values
from recipe.spec import (
    CellKind,
    Column,
    Form,
    TaskSpec,
    normalize_name,
)
from recipe.task_table import TASKS

MOST = 3
"""Lines in a message."""
_MOST_CHECKED = 20
_LONG_CELL, _WORDS_OF_NAMES = 25, 3
"""Characters above which a cell is a text, and words below which it may be a name."""
_MOST_SETTINGS = 3
"""Columns or groups of columns that a line leaves out, and one more."""
_SIGNS = {"-1", "0", "1"}
_FEW = 10
"""Rows in which each may have a label of its own."""
_TEXTS = {"text", "words", "list", "records"}
_MARKUP = {"html", "json", "parse", "xml"}
_PREFERRED = 10
"""How much less it costs to learn pairs of a better and a worse answer than the better ones."""
_IS_TRANSLATION = 2
"""How much less a translation costs than another text written for a text in another language."""
_TIE = 0.01
"""What orders ways that cost the same."""
_GAPS, _MANY, _LOOKED_AT = 4, 0.2, 200
"""What a column with many empty cells costs; the share of cells that is many, of the first ones."""
_MOST_JUDGED, _MOST_LABELS = 2, 5
"""Texts of which, and labels by which, it is tried what can be learned."""
_LITTLE, _SOME, _CHANCE, _UNLEARNED = 0.05, 0.1, 6, 6
"""Shares that are learned of a label that is none of these texts, and of one that is, above what is
learned by chance of some rows; what the first label costs."""
_NEAR = 10
"""How much more a line may cost than the first one."""
Works = Callable[[Part, str, DataSettings], bool]
"""Returns whether the rows of a file make samples of a task, with the columns that are named."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Hyperparameters with which the columns of a file make samples of a task."""

    task: str
    settings: Mapping[str, str]
    """The hyperparameters to add to the job's, without `task`."""
    selection: ColumnSelection
    cost: float
    """The lower, the likelier."""

    def line(self, with_task: bool) -> str:
        """Return the hyperparameters as a message shows them: `text_column=a label_column=b`."""
        pairs = {"task": self.task, **self.settings} if with_task else self.settings
        return " ".join(f"{name}={quote_value(value)}" for name, value in pairs.items())


def find(
    part: Part,
    tasks: Mapping[str, float],
    settings: DataSettings,
    works: Works = lambda *_: True,
) -> list[Proposal]:
    """Return at most `MOST` ways to read a file, the likeliest first.

    Each one was checked on the first rows of the file.

    Args:
        tasks: Those that are possible, and what each costs for the model.
        works: Tries a line that is to be proposed.
    """
    ignored, named = set(settings.ignored_columns), set(settings.named_columns)
    names = [name for name in part.table.column_names if name not in ignored]
    if not named <= {*names}:
        return []  # such as a record, whose fields are columns
    names = [
        name
        for name in names
        if name in named
        or not (
            _is_markup(name, names) or is_search(part, name) or is_beside_responses(name, names)
        )
    ]
    looks = {name: look_of(part, name) for name in names}
    if not {"text", "words"} & {*looks.values()}:  # texts of a word
        looks = {name: "words" if look == "codes" else look
                 for name, look in looks.items()}  # fmt: skip
    ways = {**tasks}
    preferring = dataclasses.replace(settings, columns=settings.columns or _preferred(names))
    if preferring != settings and len(tasks) > 1 and "causal-lm" in tasks:
        ways["dpo"] = tasks["causal-lm"] - _PREFERRED
    ranked = _rank_ways(part, ways, looks, settings, preferring)
    proposed: dict[object, Proposal] = {
        proposal.line(True): proposal
        for task in tasks
        for proposal in _translations(part, TASKS[task], settings)
    }
    # Of tasks that read the same, the last of a folder is the most general one.
    ranks = {task: rank for rank, task in enumerate(ways)}
    ordered = sorted(ranked.values(), key=lambda item: (item[0], -ranks[item[1].name]))
    for cost, spec, form, roles in ordered[:_MOST_CHECKED]:
        if proposed and cost > next(iter(proposed.values())).cost + _NEAR:
            break
        proposal = _checked(part, spec, form, roles, settings, cost, works)
        if proposal is None:
            continue
        if len(tasks) > 1 and (judged := _judged(part, proposal, settings, works)) is not None:
            proposed = {"kto": judged, **proposed}
        read = tuple(sorted(proposal.selection.names))
        proposed.setdefault((spec.folder, read) if spec.name in tasks else "dpo", proposal)
        if len(proposed) >= MOST:
            break
    return list(proposed.values())[:MOST]


def _rank_ways(
    part: Part, ways: Mapping[str, float], looks: Mapping[str, str], settings: DataSettings,
    preferring: DataSettings,
) -> dict[object, tuple[float, TaskSpec, Form, Roles]]:  # fmt: skip
    """Return the ways to read a file, each with what it costs.

    Args:
        ways: The tasks, and what each costs for the model.
        preferring: The settings for forms of preference pairs.
    """
    alike = alike_labels(part, looks)
    rows = part.table.slice(0, _LOOKED_AT)
    gaps = {
        name
        for name in looks
        if sum(cell in (None, "") for cell in rows[name].to_pylist()) > rows.num_rows * _MANY
    }
    known = {*map(normalize_name, looks)}
    ranked: dict[object, tuple[float, TaskSpec, Form, Roles]] = {}
    for task, task_cost in ways.items():
        spec = TASKS[task]
        for form in spec.forms:
            pairs = (pair for pair in form.pairs if known.issuperset(map(normalize_name, pair)))
            form = next(map(form.with_pair, pairs), form)
            given = preferring if "chosen" in form.roles else settings
            for cost, roles in rank_roles(form, looks, alike, given):
                key = task, *sorted((role, *names) for role, names in roles.items())
                texts = [names[0] for names in roles.values()]
                if task == "translation" and are_translations(*texts[:2]):
                    cost -= _IS_TRANSLATION
                needed = {names[0] for role, names in roles.items()
                          if len(names) == 1 and not form[role].is_optional}  # fmt: skip
                cost += task_cost + _GAPS * len(needed & gaps)
                if key not in ranked or ranked[key][0] > cost:
                    ranked[key] = cost, spec, form, roles
    _rank_labels(part, ranked, looks)
    return ranked


def _rank_labels(
    part: Part, ranked: dict[object, tuple[float, TaskSpec, Form, Roles]], looks: Mapping[str, str]
) -> None:
    """Order the ways to read the same texts by their labels, at the costs that they have."""
    by_texts: dict[tuple[str, ...], list[object]] = {}
    for key, (_, spec, form, roles) in ranked.items():
        if "label" in roles and form["label"].is_target and spec.owns_settings:
            names = [name for role, some in roles.items() if role != "label" for name in some]
            by_texts.setdefault((spec.name, *names), []).append(key)
    groups = sorted(by_texts.items(), key=lambda item: min(ranked[key][0] for key in item[1]))
    for number, ((_, *texts), keys) in enumerate(groups):
        totals = {
            key: ranked[key][0] + label_cost(ranked[key][3]["label"][0], texts, looks)
            for key in keys
        }
        if number < _MOST_JUDGED:
            likely = sorted(keys, key=lambda key: totals[key])[:_MOST_LABELS]
            unlearned = _unlearned(part, texts, {k: ranked[k][3]["label"] for k in likely}, looks)
            totals |= {key: totals[key] + _UNLEARNED for key in unlearned}
        costs = sorted(ranked[key][0] for key in keys)
        for index, key in enumerate(sorted(keys, key=lambda key: totals[key])):
            ranked[key] = (costs[index] + index * _TIE, *ranked[key][1:])


def _unlearned(
    part: Part, texts: Sequence[str], labels_of: Mapping[object, Sequence[str]],
    looks: Mapping[str, str],
) -> list[object]:  # fmt: skip
    """Return the keys of labels that a simple model does not learn from the texts, if it learns
    others of them."""
    judged = {
        names[0]: key
        for key, names in labels_of.items()
        if len(names) == 1 and looks[names[0]] in ("category", "flag", "grade")
    }
    if len(judged) < 2:
        return []
    rows = part.table.slice(0, LEARNED_ROWS)
    lines = [" ".join(str(cell or "") for cell in row)
             for row in zip(*(rows[name].to_pylist() for name in texts), strict=True)]  # fmt: skip
    classes = {
        name: ["" if cell is None else str(cell) for cell in rows[name].to_pylist()]
        for name in judged
    }
    shares = learned_shares(lines, classes)
    best = max(shares.values(), default=0.0) - _CHANCE / len(lines)
    return [
        judged[name]
        for name, share in shares.items()
        if share <= _LITTLE < _SOME <= best and not is_label(name)
    ]


def _judged(
    part: Part, proposal: Proposal, settings: DataSettings, works: Works
) -> Proposal | None:
    """Return the way to learn from good and bad completions, if a column says which are good."""
    ignored = split_values(proposal.settings.get("ignore_columns"))
    verdicts = [name for name in ignored if verdicts_in(part, name)]
    spec, roles = TASKS["kto"], {**proposal.selection.columns, "label": verdicts}
    forms = [form for form in spec.forms if {*form.roles} == {*roles}]
    words = words_of(proposal.selection.get("completion") or "reply")
    is_answer = not {*ANSWERS, "reply", "target"}.isdisjoint(words)
    if proposal.task != "causal-lm" or len(verdicts) != 1 or not forms or not is_answer:
        return None
    return _checked(part, spec, forms[0], roles, settings, proposal.cost, works)


def _preferred(names: Sequence[str]) -> str | None:
    """Return the value of `columns` for a better and a worse answer, whose names differ in a word
    for that: `better_reply` and `worse_reply`."""
    plain = {plain_word(name): name for name in names if not {*name} & {*",:"}}
    for word, other in itertools.product(sorted(PREFERRED), sorted(DISPREFERRED)):
        for name in plain:
            if word in name and (worse := name.replace(word, other, 1)) in plain:
                return f"chosen:{plain[name]},rejected:{plain[worse]}"
    return None


def _is_markup(name: str, names: Sequence[str]) -> bool:
    """Return whether a name says that a column repeats another one: `cv_html` beside `cv_str`."""
    if name.removeprefix("inputs.") in {*names} - {name}:
        return True  # Argilla's
    *first, last = split_name(name)
    others = (split_name(other) for other in names if other != name)
    return last in _MARKUP and any(words[: len(first)] == first for words in others)


def _translations(part: Part, spec: TaskSpec, settings: DataSettings) -> Iterator[Proposal]:
    """Yield the languages of a record of translations, in both directions."""
    prefixes = {
        name.partition("{")[0]
        for form in spec.forms
        for pair in (() if form.needs_task else form.pairs)
        for name in pair
        if "{" in name and not name.startswith("{")
    }
    codes = [
        name.removeprefix(prefix)
        for prefix in sorted(prefixes)
        for name in part.table.column_names
        if name.startswith(prefix)
    ]
    for source, target in itertools.permutations(codes, 2):
        line: dict[str, Any] = {"source_lang": source, "target_lang": target}
        with contextlib.suppress(DataError):
            selection = select_columns(part, spec, dataclasses.replace(settings, **line))
            yield Proposal(task=spec.name, settings=line, selection=selection, cost=-20)


def explained(
    error: ColumnsError,
    part: Part,
    spec: TaskSpec,
    settings: DataSettings,
    training: ColumnSelection | None = None,
) -> DataError:
    """Return the refusal of a file for a task that is given, with the lines to give.

    Args:
        training: The columns of the training data, if this is another file.
    """
    lines = []
    if error.is_final:
        return error
    if training is None:
        lines = [proposal.line(False) for proposal in find(part, {spec.name: 0.0}, settings)]
    elif error.unread:
        ignored = dict.fromkeys([*settings.ignored_columns, *error.unread])
        lines = [f"ignore_columns={quote_value(','.join(ignored))} to leave out what is not meant"]
    remedy = f"Give {'; or '.join(lines)}." if lines else error.remedy
    rest = error.remedy if lines and training is not None else ""
    return DataError(error.message, f"{remedy} {rest}".strip())


def header_refusal(
    unclear: UnclearHeader,
    tasks: Mapping[str, float],
    settings: DataSettings,
    works: Works = lambda *_: True,
) -> DataError:
    """Return the refusal of delimited text whose first row may be a header, with the lines to give
    for both cases, the likelier one first."""
    cases: list[list[str]] = []
    parts: list[Part] = []
    for header in (True, False):
        lines = []
        with contextlib.suppress(DataError):  # it is no header, or can be nothing else
            read = files_encoded(settings.encoding)(formats.read)
            parts.append(read(unclear.path, header=header))
            for proposal in find(parts[-1], tasks, settings, works):
                is_named = header and bool({*proposal.settings} - {"ignore_columns"})
                line = proposal.line(len(tasks) > 1)
                lines.append(line if is_named else f"header={str(header).lower()} {line}".strip())
        cases.append(lines)
    likelier, other = cases if _names_columns(parts[-1]) else cases[::-1]
    lines = [*likelier[: MOST - 1], *other[:1]] if cases[0] or len(parts) == 1 else []
    if lines:
        return DataError(unclear.message, f"Give {'; or '.join(lines)}.")
    return DataError(unclear.message, why_none(parts[0]) or unclear.remedy)


def lone_words(part: Part) -> str | None:
    """Return the column that has a word in each row, if no column has texts."""
    looks = {name: look_of(part, name) for name in part.table.column_names}
    words = (
        name
        for name, look in looks.items()
        if normalize_name(name) in WORD_NAMES and look in ("codes", "category")
    )
    return next(words, None) if "text" not in looks.values() else None


def check_lone_words(part: Part) -> None:
    """Raise DataError if a file has a word in each row, of sentences that it does not hold."""
    if name := lone_words(part):
        raise DataError(
            f"{part.path} has a word in each row, in column {name!r}: tags depend on the other "
            "words of a sentence.",
            'Write a row for each sentence: {"tokens": ["Ada", "sat"], "ner_tags": ["B-PER", '
            '"O"]}, or CoNLL: a word and its tag on each line, an empty line after each sentence.',
        )


def why_none(part: Part) -> str:
    """Return what must change so that a file can be learned, in a sentence; "" if it has texts."""
    names = part.table.column_names
    if {look_of(part, name) for name in names} & _TEXTS:
        return ""
    if sum(map(is_identifier, names)) > 1:
        return "It has ids in place of texts: join the texts of queries and documents by them."
    return "It has no column of texts, which tasks for texts learn from: add one."


def _names_columns(part: Part) -> bool:
    """Return whether the first row looks like names of columns, not like the rows below it."""
    positions = [str(table[0].as_py()) for table in part.table.columns]
    if positions == [str(index) for index in range(len(positions))]:
        return True  # pandas'
    is_name = True
    for name in part.table.column_names:
        first, *others = [str(cell or "") for cell in part.table[name].slice(0, 200).to_pylist()]
        if others.count(first) > 1 and first.strip():
            return False  # a value of other rows
        if first.rstrip()[-1:] in (".", "!", "。") and " " in first:
            return False  # a sentence
        filled = [cell for cell in others if cell] or [""]
        for is_like in (is_number, DATE.fullmatch):
            if all(map(is_like, filled)):
                return not is_like(first)
        usual = sum(map(len, filled)) / len(filled)
        is_text = len(first) * 2 > usual or len(first.split()) > _WORDS_OF_NAMES
        is_name = is_name and not (usual > _LONG_CELL and is_text)
    return is_name


def _checked(
    part: Part, spec: TaskSpec, form: Form, roles: Roles, settings: DataSettings, cost: float,
    works: Works,
) -> Proposal | None:  # fmt: skip
    """Return the shortest line by which these columns are read; None if none works."""
    is_text = len(roles) == 1 and form[next(iter(roles))].kind is CellKind.TEXT
    for is_short in (True, False):
        line: dict[str, Any] = _line(part, form, roles, settings, is_short)
        for _ in range(_MOST_SETTINGS):
            given = dataclasses.replace(settings, **line)
            try:
                selection = select_columns(part, spec, given)
                _check_cells(part, spec, selection)
                split_column(part, {*given.named_columns, *given.ignored_columns})
                line |= _label_settings(part, selection, given)
            except (ColumnsError, SplitColumnError) as error:
                if not error.unread or is_text:
                    break
                ignored = dict.fromkeys([*given.ignored_columns, *error.unread])
                line = {**line, "ignore_columns": ",".join(ignored)}
                continue
            except DataError:
                return None
            read = {role: sorted(names) for role, names in selection.columns.items()}
            if all(read.get(role) == sorted(names) for role, names in roles.items()):
                if not works(part, spec.name, dataclasses.replace(settings, **line)):
                    return None
                return Proposal(task=spec.name, settings=line, selection=selection, cost=cost)
            break
    return None


def _label_settings(
    part: Part, selection: ColumnSelection, settings: DataSettings
) -> dict[str, str]:
    """Return the hyperparameters with which the values of a label column are classes.

    Raises:
        DataError: None are known.
    """
    names = selection.columns.get("label", ())
    is_verdict = not {"completion", "messages"}.isdisjoint(selection.columns)
    if not names or is_verdict or selection.form["label"].setting != "label_column":
        return {}
    kinds = label_columns.kinds_of_labels(part, names, settings)
    if len(names) > 1 and kinds != {label_columns.FRACTIONS}:
        label_columns.one_label_column(part, names, settings)
    column, missing = names[0], settings.missing_labels
    part = label_columns.listed_labels(part, column)
    if is_list(part.table.schema.field(column).type) or settings.problem_type or len(names) > 1:
        return {}
    line = {}
    rows = part.table.num_rows
    if len(labels.empty_labels(part, column)) and missing is None:
        line["missing_labels"] = labels.EMPTY
    labelled = labels.labelled(part, column, line.get("missing_labels", missing))
    problem = labels.shape_of([labelled], column, settings.label_separator, None, missing).problem
    try:
        class_checks.CHECKS[problem]([labelled], column, rows, missing)
    except DataError:
        distinct = {str(value) for value in part.distinct(column, rows) or () if value}
        if {*distinct, "0"} == _SIGNS or (distinct & class_checks.MISSING and missing is None):
            line["problem_type"] = labels.SINGLE  # of sentiments; None is an intent
        elif (separated := class_checks.find_separator(distinct)) is not None:
            line["label_separator"] = separated[0]
        else:
            raise
    return line


def _line(
    part: Part, form: Form, roles: Roles, settings: DataSettings, is_short: bool
) -> dict[str, str]:
    """Return the hyperparameters that name the columns of roles.

    Args:
        is_short: Whether to leave out columns that are found by their names.
    """
    line: dict[str, str] = {}
    by_role = [settings.columns] if settings.columns else []
    named = {
        form[role].setting
        for role, names in roles.items()
        if not is_short or not _is_found(part, form[role], names)
    }
    pair = {"text_column", "text_pair_column"}
    if named & pair and pair <= {form[role].setting for role in roles}:
        named |= pair  # a pair is named as a pair
    for role, names in roles.items():
        column = form[role]
        is_listed = _is_found(part, column, names)
        if role in settings.columns_by_role or (
            is_short and is_listed and column.setting not in named & pair
        ):
            continue
        if not column.setting:
            by_role += [f"{role}:{name}" for name in names]
        elif getattr(settings, column.setting) is None:
            line[column.setting] = ",".join(names)
    if "text_column" in line and "text_pair_column" in line:
        line["text_column"] += f",{line.pop('text_pair_column')}"
    if len(by_role) > bool(settings.columns):
        line["columns"] = ",".join(by_role)
    return dict(sorted(line.items(), key=lambda item: not item[0].startswith(("text", "prompt"))))


def _is_found(part: Part, column: Column, names: Sequence[str]) -> bool:
    """Return whether columns have a role without being named."""
    is_listed = values.listed_as(part, column, names[0])
    return not is_listed and [*names] == find_listed(column, part.table.column_names)


def _check_answer(part: Part, selection: ColumnSelection, cells: Sequence[object]) -> None:
    """Raise DataError if answers are no letters, numbers or choices; without names, no letters."""
    if selection["endings"].startswith("column_") and not {*cells} <= {*"ABCDEFGHIJ"}:
        raise DataError(f"Column {selection['answer']!r} does not hold letters.")
    endings = [part.table[name].slice(0, len(cells)) for name in selection.columns["endings"]]
    choices = {str(text.as_py()).strip() for column in endings for text in column}
    if any(len(str(cell)) > 1 and str(cell).strip() not in choices for cell in cells):
        raise DataError(f"Column {selection['answer']!r} names none of the choices.")


def _check_cells(part: Part, spec: TaskSpec, selection: ColumnSelection) -> None:
    """Raise DataError if columns cannot have their roles by what their first cells hold."""
    values.check_inputs(part, selection)
    if spec.name == "reranking" and not {"score", "negatives"} & {*selection.columns}:
        raise DataError("Reranking needs irrelevant texts, too.")
    for column in selection.form.columns:
        for name in selection.columns.get(column.role, ()):
            cells = sample_cells(part, name)
            if not cells:
                raise DataError(f"Column {name!r} has no value in its first rows.")
            if values.listed_as(part, column, name):
                continue
            are_messages = isinstance(cells[0], list) and column.role in ("prompt", "completion")
            if column.role == "messages" or are_messages:
                conversations.read_conversation(part, 0, cells[0], name)
                continue
            if column.kind is CellKind.TEXT and not column.is_repeated:
                if not column.is_target:  # JSON may be written
                    values.check_texts(part, name)
            elif column.role == "label":
                part = label_columns.listed_labels(part, name)
                values.check_labels(part, name)
                if is_list(part.table.schema.field(name).type):
                    continue
                classes = {*map(str, cells)}
                are_whole = not all(map(labels.is_fraction, classes))
                if are_whole and len(cells) > _FEW and len(classes) > len(cells) / 2:
                    raise DataError(f"Column {name!r} has nearly as many values as rows.")
                if len(cells) > 1 and len(part.distinct(name, 1) or ()) == 1:
                    raise DataError(f"Column {name!r} has the same value in all rows.")
            elif column.role == "choices" and not is_list(part.table.schema.field(name).type):
                raise DataError(f"Column {name!r} does not hold lists.")
            elif column.role == "answer" and "endings" in selection:
                _check_answer(part, selection, cells)
            elif column.role == "text" and isinstance(cells[0], list):
                items = [*itertools.chain(*(cell for cell in cells if isinstance(cell, list)))]
                if any(isinstance(item, dict) and "text" not in item for item in cells[0]):
                    raise DataError(f"Column {name!r} holds no texts.")
                if len(cells) > _FEW and 1 < len({*map(str, items)}) <= len(cells) / 3:
                    raise DataError(f"Column {name!r} holds classes.")
            elif column.role == "tags" and isinstance(cells[0], list):
                of_words = isinstance(cells[0][0], str)
                if of_words and not is_list(part.table.schema.field(selection["tokens"]).type):
                    raise DataError(f"Column {name!r} labels no spans of a text.")
            elif column.role == "tags" and all(isinstance(cell, str) for cell in cells):
                words = sample_cells(part, selection["tokens"])
                listed = [(values.container(cell), cell.split()) for cell in cells]
                if not any(
                    len(tags or marks) == len(values.container(str(text)) or str(text).split()) > 1
                    or (tags and not isinstance(next(iter(tags)), (str, int)))
                    for (tags, marks), text in zip(listed, words, strict=False)
                ):
                    raise DataError(f"Column {name!r} does not hold tags of several words.")
            elif column.role == "tokens" and is_list(part.table.schema.field(name).type):
                words = list(itertools.chain(*cells))
                if not all(isinstance(word, str) and " " not in word for word in words):
                    raise DataError(f"Column {name!r} does not hold lists of words.")
            elif column.role == "score" and not are_numbers(
                [*itertools.chain(*(cell if isinstance(cell, list) else [cell] for cell in cells))]
            ):
                raise DataError(f"Column {name!r} does not hold numbers.")
