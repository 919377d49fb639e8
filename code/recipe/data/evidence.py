"""What the task of a job is recognised by: the first rows of its data, and its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_content import possible_labels
from recipe.data.column_names import (
    COMPLETION_NAMES,
    LABEL_NAMES,
    LABEL_NAMES_OF_PAIRS,
    PROMPT_NAMES,
    plain,
)
from recipe.data.columns import first_known
from recipe.data.files.part import Part, is_string
from recipe.settings import DataSettings

DECODER, WRITER, FILLER = "a decoder", "an encoder with a decoder", "an encoder with a masked head"
CLASSIFIER, ENCODER = "a classifier", "an encoder"
_ENDS = {
    DECODER: ("ForCausalLM", "LMHeadModel"),
    FILLER: ("ForMaskedLM", "ForPreTraining"),
    CLASSIFIER: ("ForSequenceClassification",),
}
"""How the names of the classes of such models end."""


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
    settings: DataSettings
    part: Part | None
    """The first rows of a file of the training data; None if it is no table (plain texts,
    pictures), or cannot be read."""
    config: Mapping[str, Any]
    """The model's config.json; empty if it cannot be read."""

    @property
    def architectures(self) -> Sequence[str]:
        """Return the names of the model's classes, such as BertForMaskedLM."""
        return self.config.get("architectures") or ()

    @property
    def model(self) -> str:
        """Return what the base model is: DECODER, WRITER, FILLER, CLASSIFIER or (else) ENCODER."""
        if self.config.get("is_encoder_decoder"):
            return WRITER
        for kind, end in _ENDS.items():
            if any(name.endswith(end) for name in self.architectures):
                return kind
        return ENCODER

    @property
    def prompts(self) -> tuple[str, str] | None:
        """Return the columns of prompts and of their completions, if there are texts in both."""
        given = self.settings
        prompt = given.prompt_column or self.named(PROMPT_NAMES)
        completion = given.completion_column or self.named(COMPLETION_NAMES)
        if prompt is None or completion is None or not is_string(self.kind(completion)):
            return None
        return prompt, completion

    def labels_beside(self, *read: str | None) -> bool:
        """Return whether a column that is not read has classes, and the name of a label column."""
        known = {*LABEL_NAMES, *LABEL_NAMES_OF_PAIRS}
        names = [] if self.part is None else self.part.table.column_names
        return bool(self.classes([n for n in names if n not in read and plain(n) in known]))

    def classes(self, names: Sequence[str]) -> list[str]:
        """Return the columns whose values repeat as those of classes do."""
        return [] if self.part is None else possible_labels(self.part, names)

    def named(self, known: Sequence[str]) -> str | None:
        """Return the column with the first of the `known` names, if there is one."""
        return None if self.part is None else first_known(self.part, known)

    def kind(self, column: str) -> pa.DataType:
        """Return the Arrow type of a column; null's if it does not exist."""
        assert self.part is not None
        at = self.part.table.schema.get_field_index(column)
        return pa.null() if at < 0 else self.part.table.schema.field(at).type

    def values(self, column: str) -> list[Any]:
        """Return what the rows have in a column, without nulls."""
        assert self.part is not None
        return [value for value in self.part.table[column].to_pylist() if value is not None]
