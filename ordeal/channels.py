"""Strategies of hypothesis for channels and configurations: files of all shapes, some damaged."""

# ruff: noqa: E501
from __future__ import annotations

import gzip
import io
import json
from typing import Any

import hypothesis.strategies as st

ODD = [
    "",
    " ",
    "\0",
    "\ufeff",
    "\u2028",
    '"',
    "'",
    "1",
    "1.0",
    "nan",
    "-",
    "\ud800",
    "a" * 5000,
    "\r",
]
CELLS = st.one_of(st.text(max_size=12), st.sampled_from(ODD), st.integers().map(str))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=9)
    | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
KEYS = st.sampled_from(["text", "label", "sentence", "labels", "id", "", "TEXT", "text "])
ROWS = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=20),
              st.sampled_from(["pos", "neg", "ü b"])), min_size=4, max_size=12,
)  # fmt: skip
GOOD = ROWS.map(
    lambda rows: "".join(json.dumps({"text": t, "label": b}) + "\n" for t, b in rows).encode()
)
RECORDS = st.lists(st.dictionaries(KEYS, JSON, max_size=4), max_size=12)
NAMES = st.sampled_from([
    "train.csv", "train.tsv", "a.json", "a.jsonl", "b.csv.gz", "c.parquet", "d.arrow", "e", ".hidden",
    "test.csv", "validation.json", "x.txt", "data.JSON", "f.manifest", "deep/g.csv", "ü.csv",
])  # fmt: skip


def encoded(text: str, encoding: str) -> bytes:
    """Encode a text; replace what the encoding lacks."""
    return text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")


@st.composite
def delimited(draw: Any) -> bytes:
    """Draw delimited cells, quoted or not, in rows of equal or unequal length."""
    rows = draw(st.lists(st.lists(CELLS, max_size=4), max_size=12))
    header = draw(
        st.sampled_from([[], ["text", "label"], ["a", "b", "a"], ["review", "rating", "x"]])
    )
    delimiter = draw(st.sampled_from([",", ";", "\t", "|", ":"]))
    quote = draw(st.booleans())
    lines = [[f'"{cell}"' if quote else cell for cell in row] for row in [header, *rows] if row]
    text = draw(st.sampled_from(["\n", "\r\n", "\r"])).join(map(delimiter.join, lines))
    return encoded(text, draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"])))


@st.composite
def documents(draw: Any) -> bytes:
    """Draw JSON of some shape, or bytes that only begin like it."""
    records = draw(RECORDS)
    shape = draw(st.sampled_from(["list", "lines", "columns", "any", "deep", "digits"]))
    if shape == "deep":
        return draw(st.sampled_from([b"[", b'{"a":', b'{"text":['])) * draw(st.integers(1, 60_000))
    if shape == "digits":
        return b'[{"text": "a", "label": ' + b"9" * draw(st.integers(1, 9000)) + b"}]"
    values = {"list": records, "any": draw(JSON)}
    values["columns"] = {key: [record.get(key) for record in records] for key in ("text", "label")}
    if shape == "lines":
        return "\n".join(json.dumps(record) for record in records).encode()
    return json.dumps(values[shape], ensure_ascii=draw(st.booleans())).encode(
        errors="surrogatepass"
    )


@st.composite
def tables(draw: Any) -> bytes:
    """Draw Parquet or Arrow files of columns of any type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = [
        pa.string(), pa.large_string(), pa.int8(), pa.uint64(), pa.float16(), pa.bool_(), pa.binary(),
        pa.list_(pa.int64()), pa.list_(pa.string()), pa.null(), pa.date32(), pa.decimal128(9, 2),
        pa.struct([("a", pa.int32())]), pa.dictionary(pa.int8(), pa.string()), pa.timestamp("us"),
        pa.list_(pa.float32()), pa.duration("s"),
    ]  # fmt: skip
    rows = draw(st.integers(0, 5))
    columns = {}
    for name in ("text", "label"):
        kind = draw(st.sampled_from(kinds))
        values = draw(st.lists(JSON, min_size=rows, max_size=rows))
        try:
            columns[name] = pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, UnicodeError):
            columns[name] = pa.nulls(rows, kind)
    table, stream = pa.table(columns), io.BytesIO()
    try:
        if draw(st.booleans()):
            pq.write_table(table, stream)
        else:
            with pa.ipc.new_stream(stream, table.schema) as writer:
                writer.write_table(table)
    except pa.ArrowException:
        return b"PAR1"
    return stream.getvalue()


@st.composite
def damaged(draw: Any) -> bytes:
    """Draw one of these, whole, cut, with a byte changed, or compressed."""
    some = st.one_of(GOOD, GOOD, delimited(), documents(), tables(), st.binary(max_size=300))
    data = bytearray(draw(some))
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from(["cut", "flip", "pack", "nul"]))
        offset = draw(st.integers(0, max(0, len(data) - 1)))
        if how == "cut":
            del data[offset:]
        elif how == "flip" and data:
            data[offset] ^= draw(st.integers(1, 255))
        elif how == "nul":
            data[offset:offset] = b"\0" * 4
        elif how == "pack":
            data = bytearray(gzip.compress(bytes(data)))
    return bytes(data)


CHANNEL = st.dictionaries(NAMES, damaged(), min_size=1, max_size=3)
FILES = st.sampled_from(["hyperparameters", "inputdataconfig", "resourceconfig"])
CONFIG = st.dictionaries(
    FILES,
    st.one_of(
        documents(),
        st.dictionaries(st.text(max_size=6) | KEYS, JSON, max_size=4).map(
            lambda value: json.dumps(value).encode()
        ),
        st.builds(
            lambda hosts, current: json.dumps({"hosts": hosts, "current_host": current}).encode(),
            JSON | st.just(["algo-1"]), JSON | st.just("algo-1"),
        ),
    ),
    max_size=3,
)  # fmt: skip
