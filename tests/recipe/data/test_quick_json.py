"""JSON read some rows at a time: the values, types and places of all rows read together."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from recipe.data.files import formats, json_rows, spool
from recipe.errors import DataError


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.random()
    if depth < 2 and kind < 0.15:
        return {draw.choice("abc"): value(draw, depth + 1) for _ in range(draw.randint(0, 3))}
    if depth < 2 and kind < 0.3:
        return [value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    numbers = [1, 0, -5, 2**53 + 1, 2**63, 2**70, 0.5, 1.0, True, float("nan")]
    return draw.choice([None, *numbers, "x", "", "2020-01-01T00:00:00Z", "é🙂"])


def cell(draw: random.Random, kind: str) -> Any:
    if kind == "text":
        return draw.choice(["x", "", "2020-01-01", None])
    if kind == "number":
        return draw.choice([1, 2.5, None, 2**53 + 1]) if draw.random() < 0.2 else 1
    if kind == "record":
        return dict.fromkeys(draw.sample("abcd", draw.randint(0, 3)), 1)
    if kind == "messages":
        return [{"role": "user", **({"name": "n"} if draw.random() < 0.1 else {})}] * 2
    return value(draw)


def together(rows: list[dict[str, Any]]) -> pa.Table:
    """Columns of all values, as Arrow makes them; of no common type, as text."""
    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            as_texts = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
            columns[name] = pa.array(as_texts)
    return pa.table(columns)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_all_together(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(json_rows, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(json_rows, "_CHARACTERS_AT_ONCE", draw.choice([7, 60, 1_000]))
    names = draw.sample(["text", "label", "more", "x"], draw.randint(1, 4))
    kinds = {name: draw.choice(["text", "number", "record", "messages", "any"]) for name in names}
    rows = [
        {name: cell(draw, kind) for name, kind in kinds.items() if draw.random() < 0.95}
        for _ in range(draw.choice([2, 5, 12, 30]))
    ]
    expected = together(rows)
    texts = [json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows]
    gaps = [draw.randint(0, 1) for _ in rows]
    lines, document = tmp_path / "train.jsonl", tmp_path / "train.json"
    lines.write_text("".join("\n" * gap + text + "\n" for gap, text in zip(gaps, texts)))  # noqa: B905
    document.write_text(f" [{draw.choice([',', ' ,', ', '])[:3].join(texts)} ]\n")
    read = json_rows.read_json_objects(lines, "utf-8-sig")
    within = tmp_path / f"within.{draw.choice(['json', 'jsonl'])}"
    within.write_text(f'{{ "data":{document.read_text().strip()}}}\n')
    from_object = json_rows.read_json_objects(within, "utf-8-sig")
    for part in (read, json_rows.read_json(document, "utf-8-sig"), from_object):
        assert part.table.schema == expected.schema
        assert repr(part.table.to_pylist()) == repr(expected.to_pylist())  # NaN is not equal
        strings = {field.name for field in expected.schema if pa.types.is_string(field.type)}
        for name in names:
            first = next((position for position, row in enumerate(rows)
                          if isinstance(row.get(name), (list, dict))), None)  # fmt: skip
            is_mixed = name in strings and first is not None
            assert part.mixed.get(name) == (part.where(first or 0) if is_mixed else None)
    index = [sum(gaps[: row + 1]) + row + 1 for row in range(len(rows))]
    assert list(map(int, read.lines if read.lines is not None else [])) == index


def test_many_rows_are_a_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(spool, "_IN_MEMORY", 10_000)
    monkeypatch.setattr(json_rows, "_ROWS_AT_ONCE", 100)
    rows = [
        {"text": f"text {index}", "label": index % 2 if index < 2_900 else "odd"}
        for index in range(3_000)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    before = pa.total_allocated_bytes()
    part = formats.read(tmp_path / "train.jsonl")
    assert pa.total_allocated_bytes() - before < 10_000, "the rows are in no memory"
    assert not list((tmp_path / "cache").iterdir())
    assert part.table["label"].to_pylist()[-101:-99] == ["1", "odd"], "of types that come last"
    assert part.where(2_999).endswith("line 3000")


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.mark.parametrize(
    ("name", "document", "rows", "indent"),
    [
        (name, document, rows, indent)
        for name, document, rows in [
    ("a.jsonl", {"messages": MESSAGES}, 1),
    ("a.json", {"messages": MESSAGES}, 1),
    ("a.json", {"text": "Ada", "entities": [{"start": 0}, {"start": 1}]}, 1),
    ("a.jsonl", {"tokens": ["a", "b"], "tags": ["O", "O"]}, 1),
    ("a.ndjson", {"text": "x", "turns": MESSAGES}, 1),
    ("a.json", {"version": 2, "data": MESSAGES}, 2),
    ("a.jsonl", {"data": MESSAGES}, 2),
    ("a.json", {"articles": MESSAGES}, 2),
]
        # Lines hold an object each.
        for indent in ([None, 1] if name.endswith(".json") else [None])
    ],
)  # fmt: skip
def test_an_object_alone_is_a_row_or_holds_rows(
    name: str, document: dict[str, Any], rows: int, indent: int | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(document, indent=indent))
    assert formats.read(tmp_path / name).table.num_rows == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"a": 1},]', "not valid JSON"),
        ('[{"a": 1}', "not valid JSON"),
        ('[{"a": 1}] {"a": 1}', "not valid JSON: Extra data"),
        ('[{"a": 1} {"a": 2}]', "not valid JSON"),
        ('[{"a": 1}, 5]', "row 1 is not an object, but 5"),
        ('[{"a": "b"}, {"a": "\\ud83d"}]', "row 1 holds half of a surrogate pair"),
    ],
)
def test_what_is_wrong_in_a_list_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(DataError, match=says):
        formats.read(tmp_path / "train.json")
