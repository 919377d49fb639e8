"""Data and labels of a job that only evaluates or predicts (`do_train=False`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoConfig

from recipe.data.classification import Splits
from recipe.data.column_names import LABEL, split_of
from recipe.data.labels import SINGLE, Labels
from recipe.errors import ModelError
from recipe.models.pretrained import Source
from recipe.settings import ModelSettings


def channels(folders: Mapping[str, Path], trains: bool) -> Mapping[str, Path]:
    """Return a job's channels. A job that does not train reads its evaluation data in place of
    missing training data."""
    splits = {split_of(name): path for name, path in folders.items()}
    judged = splits.get("test", splits.get("validation"))
    if trains or "train" in splits or judged is None:
        return folders
    return {**folders, "train": judged}


def with_labels_of(source: Source, splits: Splits, settings: ModelSettings) -> Splits:
    """Return the data with the class ids of the model in `source`.

    Raises:
        ModelError: the model does not know the labels of the data.
    """
    try:
        config: Any = AutoConfig.from_pretrained(
            source.name, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError):
        return splits  # loading the model gives a better error
    known = splits.labels
    names = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    if names == known.names:
        return splits
    if known.problem != SINGLE or not set(known.names) <= set(names):
        raise ModelError(
            f"The model {source.name} answers with the labels {', '.join(names)}, and the data "
            f"has {', '.join(known.names)}: do_train=False cannot compare them.",
            "Give data with the model's labels, or train.",
        )
    ids = [names.index(name) for name in known.names]

    def renumbered(split: datasets.Dataset | None) -> datasets.Dataset | None:
        if split is None:
            return None
        column = [ids[number] for number in split[LABEL]]
        return split.remove_columns(LABEL).add_column(LABEL, column)

    train, evaluation = renumbered(splits.train), renumbered(splits.evaluation)
    assert train is not None and evaluation is not None
    return dataclasses.replace(
        splits,
        labels=Labels(names, known.problem),
        train=train,
        evaluation=evaluation,
        test=renumbered(splits.test),
    )
