"""What the task of a job can be told by: some rows of its data, and its model's configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import COMPLETION_NAMES, PROMPT_NAMES, plain
from recipe.data.files.part import Part, is_string
from recipe.hyperparameters import Hyperparameters


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """That data can be of a task."""

    reason: str
    """In words: `column ner_tags holds a list of labels for each of tokens`."""
    certain: bool = True
    """Whether nothing else could be meant: else it is a candidate that a refusal lists."""
    remedy: str = ""
    """What to give instead of the task, if that alone is not enough."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a task's `recognise` is given; it answers with a `Recognised`, or None."""

    channels: Mapping[str, Path]
    hyperparameters: Hyperparameters
    part: Part | None
    """The first rows of a file of the training data; None where it is no table (plain texts,
    pictures), or cannot be read."""
    read_model: Callable[[], Mapping[str, Any]]

    @functools.cached_property
    def model(self) -> Mapping[str, Any]:
        """The model's config.json; empty where it is not known."""
        return self.read_model()

    @property
    def architectures(self) -> Sequence[str]:
        """The names of the model's classes, such as BertForMaskedLM."""
        return self.model.get("architectures") or ()

    @functools.cached_property
    def columns(self) -> Mapping[str, str]:
        """The names of the columns, by their `plain` names; of a struct `name.field`."""
        names = [] if self.part is None else self.part.table.column_names
        return {plain(name): name for name in reversed(names)}

    @property
    def prompts(self) -> tuple[str, str] | None:
        """The columns of prompts and of their completions, if there are texts in both."""
        prompt = self.hyperparameters.prompt_column or self.named(PROMPT_NAMES)
        completion = self.named(COMPLETION_NAMES)
        if prompt is None or completion is None or not is_string(self.kind(completion)):
            return None
        return prompt, completion

    def named(self, known: Sequence[str]) -> str | None:
        """The column with the first of the `known` names, if there is one."""
        return next((self.columns[name] for name in known if name in self.columns), None)

    def kind(self, column: str) -> pa.DataType:
        """The Arrow type of a column."""
        assert self.part is not None
        return self.part.table.schema.field(column).type

    def values(self, column: str) -> list[Any]:
        """What the rows have in a column, without nulls."""
        assert self.part is not None
        return [value for value in self.part.table[column].to_pylist() if value is not None]
