"""From a job's channels to queries and the texts that belong to them, or do not: what models of
sentence vectors and rerankers learn from."""

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
from recipe.data.columns import check_choices, check_named, given_texts, pair_by_name
from recipe.data.evidence import CLASSIFIER, Evidence, Recognised
from recipe.data.files.part import Part, is_string
from recipe.data.files.spool import Spool
from recipe.data.held_out import DataSets
from recipe.data.layout import channels as layout
from recipe.data.reading import describe, read_parts
from recipe.errors import DataError, Problems
from recipe.settings import DataSettings

QUERY, TEXTS, SCORES = "query", "texts", "scores"
"""The columns of what is read: a text, a list of texts, and how well each belongs to the query."""
PAIRS, SCORED, LISTS = "pairs", "scored", "lists"
"""What data can be: a text that belongs to the query and maybe some that do not; one text and a
number; texts and a number for each."""

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
"""What the text that belongs to a query is called where no negatives stand beside it."""
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
"""Words in the names of columns that say which texts belong to which."""
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

    Of PAIRS the first of `texts` belongs to the query (1.0), and the others do not (0.0).
    """

    kind: str
    """PAIRS, SCORED or LISTS."""
    columns: tuple[str, str]
    """The names of the columns of queries and of texts in the training data."""


@dataclass(frozen=True, kw_only=True)
class RelevanceColumns:
    """The columns of one file."""

    kind: str
    query: str
    text: str
    negatives: tuple[str, ...] = ()
    score: str | None = None


def recognise(evidence: Evidence) -> Recognised | None:
    """Return that the first rows are for vectors of sentences.

    Certain if a column is called positive or negative and no classifier is trained; two texts in
    each row may be for other tasks.
    """
    chosen = columns_of(evidence)
    if chosen is None or chosen.kind == LISTS:
        return None
    shown = " and ".join((chosen.query, chosen.text, *chosen.negatives[:1]))
    is_named = bool(chosen.negatives) or plain(chosen.text) in POSITIVE_NAMES
    if chosen.kind == PAIRS and is_named:
        reason = f"columns {shown} hold queries and what belongs to them"
        return Recognised(reason=reason, certain=evidence.model != CLASSIFIER)
    return Recognised(reason=f"columns {shown} hold pairs of texts", certain=False)


def columns_of(evidence: Evidence) -> RelevanceColumns | None:
    """The columns that the tasks of this module would read in the first rows; None for none."""
    if evidence.part is None:
        return None
    try:
        return choose(evidence.part, evidence.settings, None)
    except DataError:
        return None


def load(channels: Mapping[str, Path], settings: DataSettings, arrange: Arrange) -> Relevance:
    """Read and split the data of a job's channels.

    Args:
        arrange: Called with the kind and the rows of a split (SCHEMA), to make of them what the
            task takes; it may add to the notes, the same for each split.

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
                score = f", numbers {chosen.score!r}" if chosen.score else ""
                columns_shown = f"queries {chosen.query!r}, texts {chosen.text!r}{beside}{score}"
                columns_read = {chosen.query, chosen.text, chosen.score or "", *chosen.negatives}
                described.append(
                    describe(split, [part], f"{count} rows", columns_shown, columns_read)
                )
        problems.check()
        tables = {split: spool.table() for split, spool in rows.items()}
    assert like is not None  # `read_parts` has seen to training data
    kind, built = like.kind, {}
    for split, table in tables.items():
        if not table.num_rows:
            raise DataError(f"The {split} data has no rows with texts.", "Give some.")
        least, most = pc.min_max(pc.list_flatten(table[SCORES])).as_py().values()
        if split == "train" and like.kind == SCORED and least == most:
            raise DataError(
                f"Every row of the training data has {least:g} in column {like.score!r}, from "
                "which nothing can be learned.",
                "Leave the column out if all texts belong to their queries, or give rows whose do "
                "not.",
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
    """The columns of `part`: as the user says, as the training data has them, or by their names.

    Raises:
        DataError: none can be it, or a column that was named is not there.
    """
    names = part.table.column_names
    if like is not None and {like.query, like.text} <= set(names) and like.score in (None, *names):
        negatives = tuple(name for name in like.negatives if name in names)
        return dataclasses.replace(like, negatives=negatives)
    by_plain = {plain(name): name for name in reversed(names)}
    # `pos` and `neg` may be numbers, too.
    with_texts = {}
    for each, name in by_plain.items():
        outer = kind = part.table.schema.field(name).type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        can_be = is_string(kind) or pa.types.is_struct(kind) or pa.types.is_null(kind)
        # In CSV numbers are strings, too.
        if is_string(outer):
            can_be = is_text(part, name)
        if can_be and not is_mark(part, name):
            with_texts[each] = name
    label = settings.label_column
    listed = [each.strip() for each in (settings.negative_columns or "").split(",") if each]
    check_named(part, settings)
    requested = given_texts(part, settings)
    if requested is not None and requested[1] is None:
        raise DataError(
            f"text_column has value {requested[0]!r}, one column, and this task takes two.",
            "Name the column of queries and that of the texts: text_column=query,passage.",
        )
    if settings.negative_columns is None:
        negatives = tuple(name for each, name in with_texts.items() if _NEGATIVE.fullmatch(each))[
            ::-1
        ]
    else:
        negatives = tuple(listed)
    query, text = requested or _by_names(part, with_texts, bool(negatives), label)
    if text and negatives and label is None:
        return RelevanceColumns(kind=PAIRS, query=query, text=text, negatives=negatives)
    assert text is not None
    known = [by_plain[name] for name in _SCORE_NAMES if name in by_plain]
    known = [name for name in known if name not in (query, text)]
    if label is None and len(known) > 1:
        raise DataError(
            f"{part.path} has several columns that may say how well the texts belong together: "
            f"{', '.join(known)}.",
            f"Name one of them, as label_column={known[0]}.",
        )
    score = label or next(iter(known), None)
    holds_lists = pa.types.is_nested(part.table.schema.field(text).type)
    if score is not None and holds_lists:
        return RelevanceColumns(kind=LISTS, query=query, text=text, score=score)
    if holds_lists and plain(text) in LIST_NAMES[:-1] and requested is None:
        raise DataError(
            f"{part.path} has lists of texts in {text!r}, and no column says which of them belong "
            "to the query.",
            "Give a list of labels for each row in a column called labels.",
        )
    if requested is None:
        check_choices(part)
    if score is None and plain(text) not in POSITIVE_NAMES:
        _refuse_unread_judgement(part, (query, text))
    return RelevanceColumns(
        kind=PAIRS if score is None else SCORED, query=query, text=text, score=score
    )


def _refuse_unread_judgement(part: Part, read: Sequence[str]) -> None:
    """Raises DataError where a column seems to say which pairs belong together: without it, all of
    them would be taken to."""
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
                f"{read[1]!r}, which may say how well they belong together.",
                f"Give label_column={name}, with higher numbers for what belongs together; or "
                "remove the column if all texts belong to their queries.",
            )


def _by_names(
    part: Part, by_plain: Mapping[str, str], has_negatives: bool, label: str | None
) -> tuple[str, str]:
    query = next((name for name in QUERY_NAMES if name in by_plain), None)
    for known in (POSITIVE_NAMES, LIST_NAMES):
        text = next(
            (
                name
                for name in known
                # `pos` alone may be parts of speech.
                if name in by_plain and name != query and (name != "pos" or has_negatives)
            ),
            None,
        )
        is_one = known is POSITIVE_NAMES or (
            text is not None and pa.types.is_nested(part.table.schema.field(by_plain[text]).type)
        )
        if query is not None and text is not None and is_one:
            return by_plain[query], by_plain[text]
    if (pair := pair_by_name(part, label)) is not None:
        return pair
    others = [name for name in ANSWER_NAMES if name in by_plain and name != query]
    if query == "text" and others == ["title"]:
        return by_plain["title"], by_plain["text"]
    if query is not None and others:
        return by_plain[query], by_plain[others[0]]
    beside = " beside the negatives" if has_negatives else ""
    raise DataError(
        f"{part.path} has no two columns{beside} that are known to be queries and what belongs to "
        f"them: its columns are {', '.join(part.table.column_names)}.",
        "Name them: text_column=query,passage. Known are for example anchor and positive, query "
        "and passage.",
    )


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Rows as a table of SCHEMA."""
    of_columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(each, kind) for each, kind in zip(of_columns, SCHEMA.types, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


def rows_of(part: Part, columns: RelevanceColumns, notes: list[str]) -> Iterator[pa.Table]:
    """The rows of a part, some at a time, in tables of SCHEMA; those without a query or a text are
    left out, and counted in a note.

    Raises:
        DataError: a value is none that its column can have.
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
    """What a row of a part says: a row for each text that belongs to the query, or one; none
    without a query or a text."""
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
                f"{len(scores)} numbers in {columns.score!r}.",
                "Give a number for each text.",
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
                f"{part.where(at)} has several texts or numbers, and the row before has one.",
                "Give one text and one number in each row, or lists in all.",
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
    """One text, or several where the cell has a list of texts or of `{"title", "text"}`."""
    if isinstance(value, str) and value.lstrip().startswith("[") and value.rstrip().endswith("]"):
        try:
            listed = json.loads(value)
        except ValueError:
            listed = None
        if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
            value = listed
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    texts = []
    for each in values:
        if isinstance(each, Mapping) and isinstance(each.get("text"), str):
            each = f"{each.get('title') or ''} {each['text']}".strip()
        if isinstance(each, (int, float)) and not isinstance(each, bool):
            each = str(each)
        if not isinstance(each, (str, type(None))):
            raise DataError(
                f"{part.where(row)} has no text in column {column!r}, but "
                f"{json.dumps(each, default=str)[:_SHOWN]}.",
                'Give a text, a list of texts, or a list of {"title": ..., "text": ...}.',
            )
        texts.append((each or "").strip() and str(each))
    return texts


def _scores(part: Part, row: int, column: str, value: Any) -> list[float]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    names = part.class_names.get(column)
    scores = []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if names is not None and isinstance(each, int) and 0 <= each < len(names):
            each = names[each]
        try:
            number = float(each)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"{part.where(row)} has {json.dumps(each, default=str)[:_SHOWN]} in column "
                f"{column!r}, which is to say by a number how well the texts belong together.",
                "Give numbers, name their column in label_column, or leave the column out.",
            )
        scores.append(number)
    return scores
