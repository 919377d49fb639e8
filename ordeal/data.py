"""Channels and configurations that hypothesis makes up: read in-process, and by real jobs.

A call must give a result or an error that a user can act on, which names the file. What is written
rightly must be read as it was.
"""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, seed, settings

from ordeal.common import ROOT, Trial, configure, failure, made_elsewhere, start

ERRORS = "a channel is read, or refused by an error that names a file, a channel or a key"
RIGHT = "rows that are written rightly are read as they were"
CONFIGS = "a configuration is read, or refused by a ConfigError that names the file or the key"
HANGS = "no call takes longer than 10 s"
PROCESS = "a real job ends by itself, and its failure text says what is wrong without a traceback"
PROMISES = (ERRORS, RIGHT, CONFIGS, HANGS, PROCESS)

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
    """Text in an encoding, what it lacks replaced."""
    return text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")


@st.composite
def delimited(draw: Any) -> bytes:
    """Cells with some delimiter, quoted or not, in rows of equal or unequal length."""
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
    """JSON of some shape, or what only begins like it."""
    records = draw(RECORDS)
    shape = draw(st.sampled_from(["list", "lines", "columns", "any", "deep", "digits"]))
    if shape == "deep":
        return draw(st.sampled_from([b"[", b'{"a":', b'{"text":['])) * draw(st.integers(1, 60_000))
    if shape == "digits":
        return b'[{"text": "a", "label": ' + b"9" * draw(st.integers(1, 9000)) + b"}]"
    values = {"list": records, "any": draw(JSON)}
    values["columns"] = {key: [each.get(key) for each in records] for key in ("text", "label")}
    if shape == "lines":
        return "\n".join(json.dumps(each) for each in records).encode()
    return json.dumps(values[shape], ensure_ascii=draw(st.booleans())).encode(
        errors="surrogatepass"
    )


@st.composite
def tables(draw: Any) -> bytes:
    """Parquet or Arrow of columns of any type."""
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
    """Any of these, whole, cut, with a byte changed, or packed."""
    some = st.one_of(GOOD, GOOD, delimited(), documents(), tables(), st.binary(max_size=300))
    data = bytearray(draw(some))
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from(["cut", "flip", "pack", "nul"]))
        at = draw(st.integers(0, max(0, len(data) - 1)))
        if how == "cut":
            del data[at:]
        elif how == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif how == "nul":
            data[at:at] = b"\0" * 4
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


def run(trial: Trial) -> None:
    """In-process first, then a share as real jobs."""
    sys.path[:0] = [str(ROOT / "code"), str(ROOT / "container")]
    import recipe.data  # noqa: F401  # its seconds are not those of a call

    count = 100 if trial.short else 6000
    kept: list[dict[str, bytes]] = []
    _generate(trial, count, CONFIG, lambda value: _config(trial, value))
    _generate(trial, count // 3, ROWS, lambda value: _rows(trial, value))
    _generate(trial, count, CHANNEL, lambda value: _channel(trial, value, kept))
    model = made_elsewhere(trial.folder / "pretrained")
    for number in range(1 if trial.short else 30):
        if kept and trial.has_time():
            _process(trial, number, kept[trial.random.randrange(len(kept))], model)


class Over(BaseException):
    """The time is; an Exception would be an example to hypothesis."""


def _generate(trial: Trial, count: int, what: Any, judge: Callable[[Any], None]) -> None:
    @seed(trial.random.randrange(2**32))
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(what)
    def one(value: Any) -> None:
        if not trial.has_time():
            raise Over
        began = time.monotonic()
        judge(value)
        took = time.monotonic() - began
        trial.check(HANGS, took < 10, f"{took:.1f} s: {value!r}")

    with contextlib.suppress(Over):
        one()


def _written(trial: Trial, files: dict[str, bytes]) -> Path:
    folder = trial.folder / "channel"
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    choice = trial.random.randrange(20)
    if choice < 3:
        target = ("loop", "/nowhere", ".")[choice]
        (folder / "loop").symlink_to(target)
    return folder


def _channel(trial: Trial, files: dict[str, bytes], kept: list[dict[str, bytes]]) -> None:
    from recipe import data
    from recipe.arguments import Hyperparameters
    from recipe.errors import RecipeError

    folder = _written(trial, files)
    try:
        data.load({"train": folder}, Hyperparameters())
        trial.count("channels read")
        trial.check(ERRORS, True)
    except RecipeError as error:
        trial.count("channels refused")
        kept.append(files)
        trial.check(ERRORS, str(folder) in str(error) or "rows" in str(error), error)
    except Exception:
        trial.check(ERRORS, False, f"{_said()} {files!r}")


def _config(trial: Trial, files: dict[str, bytes]) -> None:
    from amphora import contract, devices, environment, errors, launch

    base = trial.folder / "config"
    shutil.rmtree(base, ignore_errors=True)
    folder = base / "input" / "config"
    folder.mkdir(parents=True)
    for stem, content in files.items():
        (folder / f"{stem}.json").write_bytes(content)
    try:
        job = contract.read_job({"SAGEMAKER_BASE_DIR": str(base)})
        _ = (job.rank, job.channels, job.framework_params, job.instance_groups, job.instance_type)
        host = devices.Devices(gpus=0, neuron_cores=0, cpus=2, efa=False, reason="ordeal")
        environment.sm_variables(job, host, {})
        launch.arguments(job)
        trial.count("configurations read")
        trial.check(CONFIGS, True)
    except errors.AmphoraError as error:
        trial.count("configurations refused")
        trial.check(CONFIGS, ".json" in str(error) or "'" in str(error), error)
    except Exception:
        trial.check(CONFIGS, False, f"{_said()} {files!r}")


def _said() -> str:
    lines = traceback.format_exc().splitlines()
    ours = [line.strip() for line in lines if "recipe" in line or "amphora" in line]
    return f"{lines[-1][:200]} {' '.join(ours[-1:])}"


def _rows(trial: Trial, rows: list[tuple[str, str]]) -> None:
    from recipe import formats

    folder = trial.folder / "rows"
    folder.mkdir(exist_ok=True)
    expected = [(text, label) for text, label in rows if text or label]
    delimiter = trial.random.choice(",;\t|")
    path = folder / "train.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([("text", "label"), *expected])
    lines = folder / "train.jsonl"
    lines.write_text("".join(json.dumps({"text": t, "label": b}) + "\n" for t, b in expected))
    for each in (path, lines):
        try:
            table = formats.read(each).table
            read = list(zip(*(table[name].to_pylist() for name in ("text", "label")), strict=True))
            trial.check(RIGHT, read == expected, (delimiter, expected, read))
        except Exception:
            trial.check(RIGHT, False, f"{_said()} {rows!r}")


def _process(trial: Trial, number: int, files: dict[str, bytes], model: Path) -> None:
    base = trial.folder / f"job-{number}"
    shutil.copytree(_written(trial, files), base / "input" / "data" / "train", symlinks=True)
    configure(
        base, {"model_name_or_path": str(model), "max_steps": 1}, inputdataconfig={"train": {}}
    )
    code = start(base, "train", trial.folder / f"job-{number}.log").wait(120)
    said = failure(base).partition("\n\n")[0]
    fine = code != 0 and said and "Traceback" not in said and "Error: " in said.splitlines()[0]
    trial.check(PROCESS, bool(fine), (code, said))
    trial.check(PROCESS, not list((base / "model").glob("*")), "a model was written")
