"""What a job makes of rows: its task and the columns that it reads, or its refusal."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features

from recipe import task_table
from recipe.arguments import parse
from recipe.errors import RecipeError
from recipe.hyperparameters import Hyperparameters
from recipe.plan import detection

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "encoder": {"architectures": ["BertModel"]},
    "masked": {"architectures": ["BertForMaskedLM"]},
    "classifier": {"architectures": ["BertForSequenceClassification"]},
    "decoder": {"architectures": ["LlamaForCausalLM"]},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
    "vit": {"architectures": ["ViTForImageClassification"]},
}
_NAMES = [field.name for field in dataclasses.fields(Hyperparameters)]
_PAIR = rf"(?:{'|'.join(_NAMES)})=(?:'[^']*'|\"[^\"]*\"|[^\s;'\"]+)"
_LINE = re.compile(rf"(?<![\w:]){_PAIR}(?: {_PAIR})*")


@dataclasses.dataclass(frozen=True)
class Table:
    """The files of a channel, and the model that learns them."""

    files: Mapping[str, str | Sequence[Any]]
    """Texts, or rows for JSON and JSON Lines (Parquet, if `features` are given), by file names."""
    model: str
    features: Features | None = None

    def write(self, folder: Path) -> tuple[str, Path]:
        """Return the folder of the model and that of the data."""
        model, data = folder / "model", folder / "train"
        for path in (model, data):
            path.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIGURATIONS[self.model]))
        for name, content in self.files.items():
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                (data / name).write_text(content)
            elif name.endswith(".json"):
                (data / name).write_text(json.dumps(content))
            elif self.features is not None:
                Dataset.from_list(list(content), features=self.features).to_parquet(data / name)
            else:
                (data / name).write_text("\n".join(map(json.dumps, content)))
        return str(model), data


def read(table: Table, folder: Path, given: Mapping[str, str]) -> tuple[str, Any]:
    """Return the task that is found and its data sets.

    Raises:
        RecipeError: The job would end before it trains.
    """
    model, data = table.write(folder)
    argv = [word for key, value in given.items() for word in (f"--{key}", value)]
    parsed = parse(["--model_id", model, "--eval_strategy", "no", *argv])
    channels = {"train": data}
    task, _ = detection.find(parsed, channels)
    return task, task_table.load(task)(channels, dataclasses.replace(parsed, task=task))


def lines(refusal: RecipeError) -> list[dict[str, str]]:
    """Return the lines of hyperparameters that a message proposes."""
    proposed: list[dict[str, str]] = []
    for match in _LINE.finditer(str(refusal)):
        line = {}
        for pair in re.findall(_PAIR, match[0]):
            name, _, value = pair.partition("=")
            if value[0] in "'\"":
                value = value[1:-1]
            elif not value.endswith("..."):
                value = value.rstrip(".,;:)")
            line[name] = value
        if line not in proposed and not any("..." in value for value in line.values()):
            proposed.append(line)
    return proposed


def describe(task: str, made: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the task, and the column from which each role is read: `causal-lm text=review`.

    A role that is no column as it stands has its first value, as JSON.
    """
    # Of columns that hold the same, the one that the log says is read.
    read = " ".join(made.found)
    columns = dict(sorted(_columns(rows).items(), key=lambda item: repr(item[0]) not in read))
    words = [task]
    for role in made.train.column_names:
        if role in ("place", "bytes"):  # of an image
            continue
        cells = [_shown(cell, role, made) for cell in made.train[role]]
        names = [name for name, values in columns.items() if values[: len(cells)] == cells]
        words.append(f"{role}={names[0] if names else cells[0]}")
    return " ".join(words)


def _columns(rows: Sequence[Any]) -> dict[str, list[str]]:
    flat = [dict(_flat("", row)) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    return {name: [_shown(row.get(name)) for row in flat] for name in names}


def _flat(prefix: str, row: Any) -> Iterator[tuple[str, Any]]:
    for name, value in row.items() if isinstance(row, dict) else ():
        yield f"{prefix}{name}", value
        yield from _flat(f"{prefix}{name}.", value)


def _shown(value: Any, role: str = "", made: Any = None) -> str:
    labels = getattr(getattr(made, "data", None), "labels", None)
    if role == "label" and labels is not None:
        value = labels.show(np.asarray(value).tolist()) if value is not None else value
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        try:
            value = json.loads(value) if value[:1] in "[{" else value
        except ValueError:
            return value
    return value if isinstance(value, str) else json.dumps(value, default=str)
