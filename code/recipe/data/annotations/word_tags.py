"""Load words with a tag for each: entities (IOB2), or any other tags."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import held_out, labels, values
from recipe.data.column_names import ADDRESS, TAGS, TOKENS
from recipe.data.column_settings import SPAN_KEYS
from recipe.data.files import formats
from recipe.data.files.part import OUTSIDE, UNTAGGED, Part, is_string
from recipe.data.files.spool import spooled_rows
from recipe.data.held_out import DataSets
from recipe.data.proposing import proposals
from recipe.data.reading import ReadFile, read_columns
from recipe.errors import DataError, Problems, join_names
from recipe.settings import DataSettings
from recipe.task_table import TASKS

_TAG = re.compile(r"([BIESLUMW])-(.+)", re.DOTALL)
_ODD_TAG = re.compile(r"[BIESLUM][_:./|].+|.+[-_:./|][BIESLUM]|[biesl][-_:./|].+", re.DOTALL)
_STARTING, _ENDING = set("BSUW"), set("ESLUW")
_PREFIXED = 10  # sentences
_MOST_LONE_WORDS = 20
"""If more rows than this all have one word, sentences were split into words."""
_SCHEMA = pa.schema([
    (TOKENS, pa.large_list(pa.large_string())),
    (TAGS, pa.large_list(pa.large_string())),
    (ADDRESS, pa.int64()),
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tagged(DataSets):
    """Data sets with the columns `tokens` (words) and `tags` (as many strings, or None)."""

    names: tuple[str, ...]
    """The tags; a tag's id is its position."""
    are_entities: bool
    """Whether the tags are B-, I- and O of entities."""


@dataclass(frozen=True, kw_only=True)
class _Sentences:
    part: Part
    column: str
    """The column of tags."""
    table: pa.Table
    """Columns `tokens` and `tags`, of entities in IOB2; no row is without words."""
    tags: frozenset[str]
    """The tags as they are in the file."""

    @property
    def words(self) -> Any:
        """Return the tag of each word, of entities in IOB2."""
        return pc.list_flatten(self.table[TAGS])


def load(channels: Mapping[str, Path], settings: DataSettings) -> Tagged:
    """Read and split the tagged words of a job's channels.

    Raises:
        DataError: names the channel, file, row or column that cannot be used, and the remedy.
    """
    notes: list[str] = []

    read = functools.partial(formats.read_tagged, header=settings.names_in_header)
    reading = read_columns(channels, TASKS["token-classification"], settings, notes, read)
    sentences = reading.converted(lambda file: _sentences(file, settings.class_names, notes))
    names, are_entities, summary = _tag_names(sentences["train"], notes)
    problems = Problems()
    for split, files in sentences.items():
        for file in files:
            with problems.noted():
                if strange := sorted({*file.words.unique().to_pylist()} - {None, *names}):
                    raise DataError(
                        f"{file.part.path} has the tag {strange[0]!r}, which is in the {split} "
                        f"data but not in the training data ({join_names(names)}).",
                        "Give training sentences with that tag, or remove it.",
                    )
    problems.check()
    tables = {split: [file.table for file in files] for split, files in sentences.items()}
    uses, findings = held_out.build(
        reading,
        tables,
        settings,
        "words",
        lambda rows: f"{len(rows)} sentences of {len(pc.list_flatten(rows[TAGS]))} words",
    )
    notes = [*notes, *findings, summary]
    trained = reading.files[0]
    cells = trained.part.table[trained.columns[TAGS]].slice(0, _PREFIXED).to_pylist()
    is_text = is_string(trained.part.table.schema.field(trained.columns[TOKENS]).type)
    if not is_text or any(map(_are_spaced, cells)):
        uses["inputs"] = {}  # lists of words, and requests have texts
    return Tagged(**uses, names=names, are_entities=are_entities, notes=notes)


def _tag_names(files: Sequence[_Sentences], notes: list[str]) -> tuple[tuple[str, ...], bool, str]:
    """Return the tags of the training data, whether they are entities, and a line for the log.

    Raises:
        DataError: there is one tag only, or an entity type is written in two ways.
    """
    in_use, part = {tag for file in files for tag in file.tags}, files[0].part
    what = f"Column {files[0].column!r} of {part.path}"
    if len(in_use) < 2:
        raise DataError(
            f"{what} has one tag only: {', '.join(in_use) or 'none'}.",
            "Training needs words of at least two tags.",
        )
    others = sorted(tag for tag in in_use - {OUTSIDE} if not _TAG.fullmatch(tag))
    are_entities = len(others) < len(in_use - {OUTSIDE})
    odd = sorted({*others} - {"o"})
    are_odd = len(odd) < len(in_use) and all(map(_ODD_TAG.fullmatch, odd))
    if others and (are_entities or are_odd):
        raise DataError(
            f"{what} has tags such as {(odd or others)[0]!r}, which are not entities.",
            "Write all of them as B-PER, I-PER and O, and -100 for words that are not learned.",
        )
    declared = part.class_names.get(files[0].column, [])
    counts = Counter[str]()
    for pair in [pair for file in files for pair in file.words.value_counts().to_pylist()]:
        counts[pair["values"]] += pair["counts"]
    if not are_entities:
        names = tuple(declared) if in_use <= set(declared) else tuple(sorted(in_use))
        sizes = [f"{name} ({counts[name]} words)" for name in names]
        summary = f"tags: {len(names)}: {join_names(sizes)}"
        if OUTSIDE in in_use:
            summary += (
                "; of words, since none is B-... or I-...: an entity of two words gives two answers"
            )
        return names, False, summary
    # O, and B- and I- for each type, in the declared order if there is one.
    types = sorted({match[2] for tag in {*in_use, *declared} if (match := _TAG.fullmatch(tag))})
    if not in_use <= set(declared):
        labels.check_spellings(what, types)
    iob2_names = [OUTSIDE, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]
    kept = [name for name in declared if name in iob2_names]
    if converted := sorted({tag[0] for tag in in_use - set(iob2_names)}):
        notes.append(f"tags: {', '.join(converted)} are converted to B and I (IOB2).")
    sizes = [f"{kind} ({counts[f'B-{kind}']})" for kind in types]
    summary = f"entities of {len(types)} kinds: {join_names(sizes)}"
    return (*kept, *(name for name in iob2_names if name not in kept)), True, summary


def iob2(tags: Sequence[str | None]) -> list[str | None]:
    """Convert tags in IOB1, IOB2, IO, IOE, BIOES, BILOU or BMES to IOB2.

    An entity begins at a tag that starts one, at another type, and after a tag that ends one.
    """
    converted: list[str | None] = []
    type_before, ended = None, True
    for tag in tags:
        match = _TAG.fullmatch(tag or "")
        prefix, kind = match.groups() if match else ("", None)
        begins = prefix in _STARTING or kind != type_before or ended
        converted.append(f"{'B' if begins else 'I'}-{kind}" if match else tag)
        type_before, ended = kind, match is None or prefix in _ENDING
    return converted


def _sentences(file: ReadFile, class_names: str | None, notes: list[str]) -> _Sentences:
    columns = file.columns[TOKENS], file.columns[TAGS]
    part, column = file.part, columns[1]
    proposals.check_lone_words(part)
    if column not in part.class_names and values.integers(part, column):
        if class_names is not None:
            part = part.named(column, labels.listed_names(class_names))
        else:
            notes.append(
                f"tags: column {column!r} of {part.path} has numbers without names: scored by "
                "accuracy. Name them in class_names (O,B-PER,I-PER ...) to score entities"
            )
    in_use, within, empty, begun_by_i = set[str](), 0, 0, 0
    problems = Problems()

    def sentences() -> Iterator[dict[str, Any]]:
        nonlocal within, empty, begun_by_i
        for start, batch in part.batches(list(dict.fromkeys(columns))):
            cells = (batch[name].to_pylist() for name in columns)
            for row, (text, cell) in enumerate(zip(*cells, strict=True), start):
                with problems.noted():
                    words, tags = _tags(part, row, text, cell, columns)
                    if words is None and isinstance(text, str):
                        words, tags, count = words_of(part, row, text, cell or [])
                        within += count
                    if not words:
                        empty += 1
                        continue
                    in_use.update(tag for tag in tags if tag is not None)
                    if (converted := iob2(tags)) != tags:
                        begun_by_i += sum(
                            (old or "").startswith("I-") and old != new
                            for old, new in zip(tags, converted, strict=True)
                        )
                    strings = list(map(str, words))
                    yield {TOKENS: strings, TAGS: converted, ADDRESS: part.address(row)}

    table = spooled_rows(_SCHEMA, sentences())
    problems.check()
    made = _Sentences(part=part, column=column, table=table, tags=frozenset(in_use))
    if len(made.words) == table.num_rows > _MOST_LONE_WORDS:
        raise DataError(
            f"Each of the {table.num_rows} rows of {part.path} has one word only: tags depend on "
            "the other words of a sentence.",
            "Give the words of a sentence as lists in one row, or as CoNLL: a word and its tag on "
            "each line, an empty line after each sentence.",
        )
    sentences_read = table[TOKENS][:_PREFIXED].to_pylist()
    heads = {word.partition(":")[:2] for words in sentences_read for word in words}
    # As the language in WikiANN's files: `en:Ada`.
    if len(sentences_read) == _PREFIXED and len(heads) == 1:
        head = "".join(heads.pop())
        if head[-1:] == ":":
            raise DataError(
                f"All words of {part.path} begin with {head!r}, which requests will not have.",
                f"Remove it, such as by: sed -i 's/^{head}//' {part.path.name}",
            )
    if empty:
        notes.append(f"{empty} rows of {part.path} have no words and are not used.")
    begun = pc.sum(pc.starts_with(made.words, "B-")).as_py() or 0
    check_edges(part, within, begun, notes)
    if begun_by_i:
        notes.append(
            f"{begun_by_i} of the {begun} entities of {part.path} begin with I-, read as B- (as in "
            "IOB1)"
        )
    return made


def _are_spaced(cell: object) -> bool:
    """Return whether a cell holds tags between spaces or commas: `O O B-PER`."""
    return isinstance(cell, str) and cell.strip()[:1] not in ("", *"[{(<")


def _tags(
    part: Part, row: int, text: Any, cell: Any, columns: tuple[str, str]
) -> tuple[list[Any] | None, Any]:
    """Return the words of a row and their tags, None for a word without a tag (-100); None for the
    words of a text with spans."""
    words, tags = (values.container(v) if isinstance(v, str) else v for v in (text, cell))
    if words is None and tags is None and isinstance(text, str) and _are_spaced(cell):
        words, tags = text.split(), cell.replace(",", " ").split()
    if not isinstance(words, list):
        return None, []
    for index, word in enumerate(words):
        if not isinstance(word, (str, int, float)) or isinstance(word, bool) or word != word:  # NaN
            raise DataError(
                f"{part.where(row)} has {json.dumps(word)[:60]} in place of word {index} in column "
                f"{columns[0]!r}.",
                "Give the word, or remove it with its tag.",
            )
    if not isinstance(tags, list) or len(tags) != len(words):
        count = len(tags) if isinstance(tags, list) else "no"
        raise DataError(
            f"{part.where(row)} has {len(words)} words in column {columns[0]!r} and {count} tags "
            f"in column {columns[1]!r}.",
            "Give a tag for each word.",
        )
    classes = part.class_names.get(columns[1])
    names: list[str | None] = []
    for index, tag in enumerate(tags):
        name = tag.strip() if isinstance(tag, str) else tag
        if classes is not None and str(name).lstrip("-").isdigit():
            number = int(name)  # of CSV and CoNLL
            name = classes[number] if 0 <= number < len(classes) else number
            is_known = name != number or number == UNTAGGED
        else:
            is_known = isinstance(name, (str, int)) and name != ""
        if not is_known:
            among = f" (of {len(classes)} classes, from 0)" if classes is not None else ""
            raise DataError(
                f"{part.where(row)} has the tag {json.dumps(tag)} for word {index} "
                f"({words[index]!r}) in column {columns[1]!r}{among}.",
                "Give a name, a number, or -100 for a word without a tag.",
            )
        names.append(None if name == UNTAGGED else str(name))
    return words, names


_RANGES = ("span", "offsets", "offset")
_WORDS = ("text", "word", "value", "surface")
_WORD = re.compile(r"\w+|[^\w\s]")


def _spans(value: Any) -> list[tuple[int, int, str, str | None]] | None:
    """Return start, end, label and declared text of the spans in a cell, in the order of the text;
    None if the cell does not hold spans."""
    value = values.container(value) if isinstance(value, str) else value
    if not isinstance(value, list):
        return None
    spans = []
    for item in value:
        text = None
        if isinstance(item, list) and len(item) == 3:
            start, end, label = item
        elif isinstance(item, dict):
            start, end, label = (
                next((item[name] for name in names if item.get(name) is not None), None)
                for names in SPAN_KEYS
            )
            for both in (item[name] for name in _RANGES if isinstance(item.get(name), list)):
                start, end = both if len(both) == len("se") else (start, end)
            text = next((item[name] for name in _WORDS if isinstance(item.get(name), str)), None)
        else:
            return None
        if isinstance(label, list) and len(label) == 1:
            (label,) = label
        if type(start) is not int or type(end) is not int or not isinstance(label, (str, int)):
            return None
        spans.append((start, end, str(label), text))
    return sorted(spans, key=operator.itemgetter(0, 1))


def words_of(part: Part, row: int, text: str, value: Any) -> tuple[list[str], list[str], int]:
    """Return the words of a text, a tag (B-, I- or O) for each, and how many spans begin or end
    within a word. Words are split at the edges of spans, white space at edges is left out.

    Raises:
        DataError: a span lies outside the text, is empty, overlaps another one, or does not hold
            the characters that it declares.
    """
    spans = _spans(value)
    if spans is None:
        raise _wrong(part, row, f"has no spans that can be read: {json.dumps(value)[:80]}")
    words: list[str] = []
    tags: list[str] = []
    within = begun = ended = 0
    for first, end, label, declared in spans:
        if not 0 <= first < end <= len(text):
            what = f"has a span {first} to {end} ({label})"
            raise _wrong(part, row, f"{what}, and a text of {len(text)} characters")
        inside = text[first:end]
        start = first + len(inside) - len(inside.lstrip())
        stop = end - (len(inside) - len(inside.rstrip()))
        if start >= stop:
            raise _wrong(part, row, f"has a span {first} to {end} of white space")
        if declared is not None and inside.strip() != declared.strip():
            what = f"has a span {first} to {end}, which holds {inside!r} and not {declared!r}"
            raise _wrong(part, row, f"{what}, its text")
        if start < ended:
            what = f"{text[begun:ended]!r} and {text[start:stop]!r}"
            raise _wrong(part, row, f"has spans that overlap: {what}")
        # A letter on both sides, of a script with two cases, whose words are separated by spaces.
        neighbours = [text[max(0, edge - 1) : edge + 1] for edge in (start, stop)]
        within += any(
            len(pair) == 2 and all(letter.lower() != letter.upper() for letter in pair)
            for pair in neighbours
        )
        between, named = _WORD.findall(text[ended:start]), _WORD.findall(text[start:stop])
        words += [*between, *named]
        tags += [*["O"] * len(between), f"B-{label}", *[f"I-{label}"] * (len(named) - 1)]
        begun, ended = start, stop
    rest = _WORD.findall(text[ended:])
    return [*words, *rest], [*tags, *["O"] * len(rest)], within


def check_edges(part: Part, within: int, spans: int, notes: list[str]) -> None:
    """Check that spans cover whole words; add a note if some begin or end within one.

    Raises:
        DataError: half of them do, for example because ends are inclusive or offsets count bytes.
    """
    if not within:
        return
    what = f"{within} of {spans} spans of {part.path} begin or end within a word"
    if within * 2 >= spans:
        raise DataError(
            f"{what}: they do not seem to count characters from 0, with the end excluded (but an "
            "inclusive end, bytes or UTF-16?).",
            "Count as Python does: text[start:end] is the entity.",
        )
    notes.append(f"{what}, which is cut there.")


def _wrong(part: Part, row: int, what: str) -> DataError:
    return DataError(
        f"{part.where(row)} {what}.",
        'Write {"text": "Ada sat", "entities": [{"start": 0, "end": 3, "label": "PER"}]}: '
        "characters from 0, the end excluded (from Label Studio, export JSON-MIN); or the words of "
        'a sentence: {"tokens": ["Ada", "sat"], "ner_tags": ["B-PER", "O"]}.',
    )
