"""Compare two finished runs by the files that they have written."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.errors import OutputError
from recipe.metrics import LOWER_IS_BETTER
from recipe.reports.section import MISTAKES

_CONFIGURATION = Path("input") / "config" / "hyperparameters.json"
_OUTPUT = Path("output") / "data"
_SHOWN, _SHOWN_CHARS = 5, 70
_LEFT_OUT = ("epoch", "per_second", "runtime", "total_flos")


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What is compared of a run."""

    name: str
    metrics: Mapping[str, float]
    hyperparameters: Mapping[str, str]
    mistakes: Mapping[tuple[str, ...], Mapping[str, str]] | None
    """The rows of mistakes.csv by their location and true answer."""


def read_run(folder: Path) -> FinishedRun:
    """Read a run of the folder of its job, or of that with its metrics.json.

    Raises:
        OutputError: There is no metrics.json.
    """
    output = folder if (folder / "metrics.json").is_file() else folder / _OUTPUT
    path = output / "metrics.json"
    if not path.is_file():
        raise OutputError(
            f"{folder} has no {_OUTPUT}/metrics.json, so it is not a finished run.",
            "Give the folder that `amphora train --out` names, or the one with metrics.json.",
        )
    base = output.parent.parent if output.parts[-2:] == _OUTPUT.parts else output
    given = base / _CONFIGURATION
    hyperparameters = json.loads(given.read_text()) if given.is_file() else {}
    mistakes = None
    if (output / MISTAKES).is_file():
        with (output / MISTAKES).open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        others = ("predicted", "confidence", "difference", "F1")
        mistakes = {
            tuple(value for name, value in row.items() if name not in others): row for row in rows
        }
    return FinishedRun(
        name=str(folder),
        metrics={k: v for k, v in json.loads(path.read_text()).items() if isinstance(v, float)},
        hyperparameters={name: str(value) for name, value in hyperparameters.items()},
        mistakes=mistakes,
    )


def compare(first: Path, second: Path) -> Iterator[str]:
    """Yield the lines of a comparison.

    Raises:
        OutputError: One of the folders is not a finished run.
    """
    runs = read_run(first), read_run(second)
    one, other = (run.metrics for run in runs)
    heads = [run.name for run in runs]
    names = [name for name in one if name in other and not name.endswith(_LEFT_OUT)]
    rows: list[Sequence[Any]] = []
    for name in sorted(names, key=lambda name: name.startswith("train_")):
        change = other[name] - one[name]
        is_better = change < 0 if name.endswith(LOWER_IS_BETTER) else change > 0
        mark = "" if not change else "better" if is_better else "worse"
        rows.append((name, f"{one[name]:.4g}", f"{other[name]:.4g}", f"{change:+.3g}", mark))
    yield from _aligned([("metric", *heads, "change", "of the second"), *rows])
    given = [run.hyperparameters for run in runs]
    differing = [
        (name, given[0].get(name, "-"), given[1].get(name, "-"))
        for name in sorted({*given[0], *given[1]})
        if given[0].get(name) != given[1].get(name)
    ]
    yield ""
    if differing:
        yield from _aligned([("hyperparameter", *heads), *differing])
    else:
        yield "The same hyperparameters."
    if runs[0].mistakes is None or runs[1].mistakes is None:
        return
    for title, here, there in (
        ("Wrong in the first run only", runs[0].mistakes, runs[1].mistakes),
        ("Wrong in the second run only", runs[1].mistakes, runs[0].mistakes),
    ):
        only = [row for key, row in here.items() if key not in there]
        yield ""
        yield f"{title}: {len(only)} rows"
        for row in only[:_SHOWN]:
            location = " ".join([row["file"], *(f"{unit} {row[unit]}" for unit in ("line", "row")
                                             if row.get(unit))])  # fmt: skip
            text = " ".join(row["text"].split())[:_SHOWN_CHARS]
            yield f"  {location}: {text!r} is {row['true']}, predicted {row['predicted']}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
