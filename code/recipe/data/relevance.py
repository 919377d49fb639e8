"""Load queries with relevant and irrelevant texts, for sentence vectors and rerankers.

The two text columns are not chosen by `columns.choose`: `text_column` names both of them, and
which pair of names counts also depends on what the columns hold (lists, texts, numbers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import held_out
from recipe.data.column_content import is_mark, is_text
from recipe.data.column_names import LABEL_NAMES_OF_PAIRS, SURE_LABELS, TWINS, plain
from recipe.data.columns import check_choices, check_named
from recipe.data.evidence import CLASSIFIER, Evidence, Recognised
from recipe.data.files.part import Part, is_list, is_string
from recipe.data.files.spool import Spool
from recipe.data.held_out import DataSets
from recipe.data.layout import channels as layout
from recipe.data.reading import describe, read_parts
from recipe.data.text_columns import given_texts, pair_by_name
from recipe.errors import DataError, Problems
from recipe.settings import DataSettings

QUERY, TEXTS, SCORES = "query", "texts", "scores"
"""The columns of the data sets: a query, a list of texts, and the relevance of each text."""
PAIRS, SCORED, LISTS = "pairs", "scored", "lists"
"""The kinds of data: a relevant text and maybe irrelevant ones; one text and its score; a list of
texts and their scores."""

QUERY_NAMES = (
    *("anchor", "query", "question", "sentence", "text", "sentence1", "query_text", "title"),
)
POSITIVE_NAMES = (
    *("positive", "pos", "positives", "positive_passages", "positive_passage", "positive_text"),
    *("positive_document", "positive_documents", "positive_doc", "positive_ctxs"),
)
ANSWER_NAMES = (
    *("answer", "answers", "passage", "document", "doc", "response", "context", "paragraph"),
    *("target", "text", "title", "abstract", "summary", "code"),
)
"""Names of the relevant text if there are no negatives."""
LIST_NAMES = (
    *("passages.passage_text", "documents", "docs", "passages", "texts", "candidates"),
    *("paragraphs", "answers"),
)
_NEGATIVE = re.compile(
    r"(hard_)?neg(ative)?s?(_(passage|document|doc|text|ctx|sentence)s?)?(_?\d+)?"
)
_SCORE_NAMES = (
    *("label", "labels", *LABEL_NAMES_OF_PAIRS, "scores", "relevances", "is_selected"),
    "passages.is_selected",
)
_JUDGING = frozenset({
    *("label", "labels", "class", "grade", "grades", "graded", "rating", "ratings", "rel"),
    *("relevance", "relevant", "relevancy", "judgement", "judgment", "judgements", "judgments"),
    *("target", "gold", "match", "matches", "matched", "same", "duplicate", "duplicates", "dup"),
    *("paraphrase", "similar", "similarity", "distance", "score", "correct", "irrelevant", "is"),
    "y",
})  # fmt: skip
"""Words in the names of columns that may hold the relevance."""
_JUDGED_ROWS, _MOST_JUDGEMENTS = 1_000, 50
_SHOWN = 60
Row = tuple[str, list[str], list[float]]
Arrange = Callable[[str, pa.Table, list[str]], tuple[str, pa.Table]]
SCHEMA = pa.schema([
    (QUERY, pa.large_string()),
    (TEXTS, pa.large_list(pa.large_string())),
    (SCORES, pa.large_list(pa.float64())),
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Relevance(DataSets):
    """Data sets with the columns `query`, `texts` and `scores`.

    For PAIRS, the first of `texts` is relevant (1.0), and the others are not (0.0).
    """

    kind: str
    """PAIRS, SCORED or LISTS."""
    columns: tuple[str, str]
    """The names of the query and text columns in the training data."""


@dataclass(frozen=True, kw_only=True)
class RelevanceColumns:
    """The columns of one file."""

    kind: str
    query: str
    text: str
    negatives: tuple[str, ...] = ()
    score: str | None = None


def recognise(evidence: Evidence) -> Recognised | None:
    """Return that the first rows can train sentence vectors.

    Certain if a column is called positive or negative and the model is no classifier; other pairs
    of texts may be for other tasks.
    """
    chosen = columns_of(evidence)
    if chosen is None or chosen.kind == LISTS:
        return None
    shown = " and ".join((chosen.query, chosen.text, *chosen.negatives[:1]))
    is_named = bool(chosen.negatives) or plain(chosen.text) in POSITIVE_NAMES
    if chosen.kind == PAIRS and is_named:
        reason = f"columns {shown} hold queries and relevant texts"
        return Recognised(reason=reason, certain=evidence.model != CLASSIFIER)
    return Recognised(reason=f"columns {shown} hold pairs of texts", certain=False)


def columns_of(evidence: Evidence) -> RelevanceColumns | None:
    """Return the columns of the first rows that would be read, or None."""
    if evidence.part is None:
        return None
    try:
        return choose(evidence.part, evidence.settings, None)
    except DataError:
        return None


def load(channels: Mapping[str, Path], settings: DataSettings, arrange: Arrange) -> Relevance:
    """Read and split the data of a job's channels.

    Args:
        arrange: Called with the kind and the rows of a split (SCHEMA). Returns them as the task
            needs them; it may add notes, the same for each split.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    places = layout.find(channels, settings.dataset_config_name)
    notes = list(places.notes)
    rows: dict[str, Spool] = {}
    like: RelevanceColumns | None = None
    described: list[str] = []
    problems = Problems()
    with contextlib.ExitStack() as stack:
        for split, part in read_parts(places, notes):
            with problems.noted():
                chosen = choose(part, settings, like)
                like = like or chosen
                if split not in rows:
                    rows[split] = Spool()
                    stack.callback(rows[split].close)
                    rows[split].add(SCHEMA.empty_table())
                count = 0
                for some in rows_of(part, chosen, notes):
                    rows[split].add(some)
                    count += some.num_rows
                beside = f", negatives {', '.join(chosen.negatives)}" if chosen.negatives else ""
                score = f", scores {chosen.score!r}" if chosen.score else ""
                columns_shown = f"queries {chosen.query!r}, texts {chosen.text!r}{beside}{score}"
                columns_read = {chosen.query, chosen.text, chosen.score or "", *chosen.negatives}
                described.append(
                    describe(split, [part], f"{count} rows", columns_shown, columns_read)
                )
        problems.check()
        tables = {split: spool.table() for split, spool in rows.items()}
    assert like is not None  # `read_parts` checks that
    kind, built = like.kind, {}
    for split, table in tables.items():
        if not table.num_rows:
            raise DataError(f"The {split} data has no rows with texts.", "Give some.")
        least, most = pc.min_max(pc.list_flatten(table[SCORES])).as_py().values()
        if split == "train" and like.kind == SCORED and least == most:
            raise DataError(
                f"Every row of the training data has {least:g} in column {like.score!r}: there is "
                "nothing to learn.",
                "Leave the column out if all texts are relevant, or add rows with other scores.",
            )
        if like.kind == SCORED and settings.label_column is None:
            _refuse_entailment(like, table)
        kind, arranged = arrange(like.kind, table, notes)
        built[split] = held_out.data_set([arranged])
    uses, rule = held_out.assign_groups(built, QUERY, settings)
    return Relevance(
        **uses,
        kind=kind,
        found=[*dict.fromkeys(notes), *described, rule],
        columns=(like.query, like.text),
    )


def _refuse_entailment(columns: RelevanceColumns, table: pa.Table) -> None:
    """Raise DataError if scores may be classes of entailment, whose 0 means entailment.

    They may be if the texts are a premise and a hypothesis, or two alike (`sentence1` and
    `sentence2`) with the three labels 0, 1 and 2.
    """
    numbers = set(pc.unique(pc.list_flatten(table[SCORES])).to_pylist())
    names = plain(columns.query), plain(columns.text)
    are_classes = numbers <= {-1.0, 0.0, 1.0, 2.0}
    is_label = plain(str(columns.score)) in (*SURE_LABELS, "gold_label")
    are_three = is_label and names in TWINS and {0.0, 1.0, 2.0} <= numbers
    if are_classes and (set(names) == {"premise", "hypothesis"} or are_three):
        raise DataError(
            f"Column {columns.score!r} beside {columns.query!r} and {columns.text!r} has the "
            f"numbers {', '.join(f'{number:g}' for number in sorted(numbers))}, which may be "
            "classes of entailment (0 is entailment).",
            "Give triplets: anchor, positive (entailed) and negative (contradicted). If higher "
            f"numbers mean more similar texts, give label_column={columns.score}.",
        )


def choose(part: Part, settings: DataSettings, like: RelevanceColumns | None) -> RelevanceColumns:
    """Return the columns of a part: those of the training data (`like`), those that
    hyperparameters name, or those with known names.

    Raises:
        DataError: columns are missing or not known by name, or an unread one may be the relevance.
    """
    names = part.table.column_names
    if like is not None and {like.query, like.text} <= set(names) and like.score in (None, *names):
        negatives = tuple(name for name in like.negatives if name in names)
        return dataclasses.replace(like, negatives=negatives)
    check_named(part, settings)
    requested = given_texts(part, settings)
    if requested is not None and requested[1] is None:
        raise DataError(
            f"text_column has value {requested[0]!r}, one column, and this task takes two.",
            "Name the columns of queries and of texts: text_column=query,passage.",
        )
    by_plain = {plain(name): name for name in reversed(names)}
    with_texts = {key: name for key, name in by_plain.items() if _can_be_texts(part, name)}
    negative = [name for key, name in reversed(with_texts.items()) if _NEGATIVE.fullmatch(key)]
    if settings.negative_columns is not None:
        listed = settings.negative_columns.split(",")
        negative = [name.strip() for name in listed if name.strip()]
    label = settings.label_column
    query, text = requested or _by_names(part, with_texts, bool(negative), label)
    assert text is not None
    if negative and label is None:
        return RelevanceColumns(kind=PAIRS, query=query, text=text, negatives=tuple(negative))
    known = [by_plain[name] for name in _SCORE_NAMES if name in by_plain]
    known = [name for name in known if name not in (query, text)]
    if label is None and len(known) > 1:
        raise DataError(
            f"{part.path} has several columns that may be the relevance: {', '.join(known)}.",
            f"Name one of them, as label_column={known[0]}.",
        )
    score = label or next(iter(known), None)
    holds_lists = pa.types.is_nested(part.table.schema.field(text).type)
    if score is not None and holds_lists:
        return RelevanceColumns(kind=LISTS, query=query, text=text, score=score)
    if holds_lists and plain(text) in LIST_NAMES[:-1] and requested is None:
        raise DataError(
            f"{part.path} has lists of texts in {text!r}, and no column has their relevance.",
            "Give a list of labels for each row in a column called labels.",
        )
    if requested is None:
        check_choices(part)
    if score is None and plain(text) not in POSITIVE_NAMES:
        _refuse_unread_relevance(part, (query, text))
    kind = PAIRS if score is None else SCORED
    return RelevanceColumns(kind=kind, query=query, text=text, score=score)


def _can_be_texts(part: Part, name: str) -> bool:
    """Return whether a column holds texts, lists of them, or records; `pos` may hold numbers."""
    outer = kind = part.table.schema.field(name).type
    while is_list(kind):
        kind = kind.value_type
    can_be = is_string(kind) or pa.types.is_struct(kind) or pa.types.is_null(kind)
    # In a CSV, numbers are strings, too.
    return (is_text(part, name) if is_string(outer) else can_be) and not is_mark(part, name)


def _refuse_unread_relevance(part: Part, read: Sequence[str]) -> None:
    """Raise DataError if an unread column may be the relevance, as all pairs would be positive."""
    for name in part.table.column_names:
        words = set(re.split(r"[^a-z]+", plain(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))))
        kind = part.table.schema.field(name).type
        if name in read or pa.types.is_nested(kind) or not words & _JUDGING:
            continue
        sample = dict.fromkeys(part.table[name].slice(0, _JUDGED_ROWS).to_pylist())
        if len(sample) > 1 and (len(sample) <= _MOST_JUDGEMENTS or not is_string(kind)):
            shown = ", ".join(json.dumps(value, default=str) for value in list(sample)[:3])
            raise DataError(
                f"{part.path} has a column {name!r} ({shown} ...) beside {read[0]!r} and "
                f"{read[1]!r}, which may be the relevance.",
                f"Give label_column={name} if higher numbers mean more relevant texts; or remove "
                "the column if all texts are relevant.",
            )


def _by_names(
    part: Part, by_plain: Mapping[str, str], has_negatives: bool, label: str | None
) -> tuple[str, str]:
    """Return the columns of queries and of texts.

    Args:
        by_plain: Columns that can hold texts, by their plain names.

    Raises:
        DataError: no two columns are known by name.
    """
    query = next((name for name in QUERY_NAMES if name in by_plain), None)
    others = [name for name in by_plain if name != query]
    # `pos` without negatives may be parts of speech.
    positives = [name for name in POSITIVE_NAMES if name != "pos" or has_negatives]
    lists = [name for name in LIST_NAMES if name in others]
    lists = [name for name in lists[:1]
             if pa.types.is_nested(part.table.schema.field(by_plain[name]).type)]  # fmt: skip
    text = next((name for name in (*positives, *lists) if name in others), None)
    if query is not None and text is not None:
        return by_plain[query], by_plain[text]
    if (pair := pair_by_name(part, label)) is not None:
        return pair
    answers = [name for name in ANSWER_NAMES if name in others]
    if query == "text" and answers == ["title"]:
        return by_plain["title"], by_plain["text"]
    if query is not None and answers:
        return by_plain[query], by_plain[answers[0]]
    beside = " beside the negatives" if has_negatives else ""
    raise DataError(
        f"{part.path} has no two columns{beside} that are known as queries and relevant texts: its "
        f"columns are {', '.join(part.table.column_names)}.",
        "Name them: text_column=query,passage. Known are for example anchor and positive, query "
        "and passage.",
    )


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Return rows as a table of SCHEMA."""
    of_columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(cells, kind) for cells, kind in zip(of_columns, SCHEMA.types, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


def rows_of(part: Part, columns: RelevanceColumns, notes: list[str]) -> Iterator[pa.Table]:
    """Yield the rows of a part in tables of SCHEMA. Rows without a query or text are left out and
    counted in a note.

    Raises:
        DataError: a value is not a text, or not a number, as its column requires.
    """
    names = [columns.query, columns.text, *columns.negatives, columns.score]
    empty = 0
    for first, batch in part.batches([name for name in dict.fromkeys(names) if name is not None]):
        cells = batch.to_pydict()
        rows: list[Row] = []
        for at in range(batch.num_rows):
            read = _rows_of(part, first + at, columns, {name: cells[name][at] for name in cells})
            empty += not read
            rows += read
        yield table_of(rows)
    if empty:
        notes.append(f"{empty} rows of {part.path} lack a text and are not used.")


def _rows_of(part: Part, at: int, columns: RelevanceColumns, cells: Mapping[str, Any]) -> list[Row]:
    """Return the rows of SCHEMA in a row of a part: one for each relevant text, or one; none if it
    has no query or text."""
    queries = _texts(part, at, columns.query, cells[columns.query])
    texts = _texts(part, at, columns.text, cells[columns.text])
    if len(queries) > 1:
        raise DataError(
            f"{part.where(at)} has a list in column {columns.query!r}.", "Give one query a row."
        )
    if columns.kind == LISTS:
        scores = _scores(part, at, str(columns.score), cells[str(columns.score)])
        if len(scores) != len(texts):
            raise DataError(
                f"{part.where(at)} has {len(texts)} texts in {columns.text!r} and "
                f"{len(scores)} scores in {columns.score!r}.",
                "Give a score for each text.",
            )
        kept = [(text, score) for text, score in zip(texts, scores, strict=True) if text]
        if not (queries and queries[0] and kept):
            return []
        return [(queries[0], [text for text, _ in kept], [score for _, score in kept])]
    texts = [text for text in texts if text]
    if not (queries and queries[0] and texts):
        return []
    if columns.kind == SCORED:
        scores = _scores(part, at, str(columns.score), cells[str(columns.score)])
        if len(texts) > 1 or len(scores) > 1:
            raise DataError(
                f"{part.where(at)} has several texts or scores, and other rows have one.",
                "Give one text and one score in each row, or lists in all.",
            )
        return [(queries[0], texts, scores)]
    negatives = [
        text
        for name in columns.negatives
        for text in _texts(part, at, name, cells[name])
        if text and text not in texts
    ]
    zeros = [0.0] * len(negatives)
    return [(queries[0], [text, *negatives], [1.0, *zeros]) for text in texts]


def _texts(part: Part, row: int, column: str, value: Any) -> list[str]:
    """Return the text of a cell, or the texts of its list (of texts or `{"title", "text"}`)."""
    if isinstance(value, str) and value.lstrip().startswith("[") and value.rstrip().endswith("]"):
        try:
            listed = json.loads(value)
        except ValueError:
            listed = None
        if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
            value = listed
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    texts = []
    for item in values:
        if isinstance(item, Mapping) and isinstance(item.get("text"), str):
            item = f"{item.get('title') or ''} {item['text']}".strip()
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            item = str(item)
        if not isinstance(item, (str, type(None))):
            raise DataError(
                f"{part.where(row)} has no text in column {column!r}, but "
                f"{json.dumps(item, default=str)[:_SHOWN]}.",
                'Give a text, a list of texts, or a list of {"title": ..., "text": ...}.',
            )
        texts.append((item or "").strip() and str(item))
    return texts


def _scores(part: Part, row: int, column: str, value: Any) -> list[float]:
    """Return the score of a cell, or the scores of its list.

    Raises:
        DataError: one is not a finite number.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    names = part.class_names.get(column)
    scores = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if names is not None and isinstance(item, int) and 0 <= item < len(names):
            item = names[item]
        try:
            number = float(item)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"{part.where(row)} has {json.dumps(item, default=str)[:_SHOWN]} in column "
                f"{column!r}, which must hold numbers: the relevance of the texts.",
                "Give numbers, name their column in label_column, or leave the column out.",
            )
        scores.append(number)
    return scores
