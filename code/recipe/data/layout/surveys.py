"""What a pass over files of training data tells of each, kept for other processes and restarts."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.files.part import Part
from recipe.runtime import turns, xla

_FORMAT = "surveys 1"
Told = Mapping[str, Any]
"""What JSON can hold."""


def of_files(
    paths: Sequence[Path], how: Mapping[str, Any], tell: Callable[[Path, list[str]], list[Told]]
) -> Iterator[tuple[list[Told], list[str]]]:
    """What `tell` says of each file, and the notes that it adds; asked in the first process of each
    host only, and not again where files and `how` are those of a start before.

    All processes call it together. Where the disk cannot keep it, each asks for itself.

    Args:
        how: What decides on it beside the files: columns, hyperparameters.
    """
    if not paths:
        return
    stats = [(path, path.stat()) for path in paths]
    written = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    named = json.dumps([_FORMAT, pa.__version__, written, how], sort_keys=True, default=str)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "surveys"
    kept = folder / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json"
    # torch-xla has a rendezvous of its own.
    with contextlib.nullcontext() if xla.in_use() else turns.first_of_host():
        content = _read(kept)
        if content is None:
            content = []
            for path in paths:
                notes: list[str] = []
                content.append([list(tell(path, notes)), notes])
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                aside = kept.with_name(f".{kept.name}.{os.getpid()}")
                aside.write_text(json.dumps(content))
                aside.replace(kept)
    yield from ((told, notes) for told, notes in content)


def _read(path: Path) -> list[Any] | None:
    try:
        content: list[Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


def packed(part: Part) -> Told:
    """A part of few rows as JSON."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, part.table.schema) as stream:
        stream.write_table(part.table)
    return {
        "path": str(part.path),
        "format": part.format,
        "table": base64.b64encode(sink.getvalue()).decode(),
        "lines": None if part.lines is None else np.asarray(part.lines).tolist(),
        "places": None if part.places is None else list(part.places),
        "rows": None if part.rows is None else part.rows.tolist(),
        "class_names": dict(part.class_names),
        "mixed": dict(part.mixed),
    }


def unpacked(told: Told) -> Part:
    """The part that `packed` had."""
    with pa.ipc.open_stream(base64.b64decode(told["table"])) as stream:
        table = stream.read_all()
    rows = told["rows"]
    return Part(
        path=Path(told["path"]),
        format=told["format"],
        table=table,
        lines=told["lines"],
        places=told["places"],
        rows=None if rows is None else np.array(rows, np.int64),
        class_names=told["class_names"],
        mixed=told["mixed"],
    )
