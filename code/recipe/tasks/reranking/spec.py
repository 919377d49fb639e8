"""Reranking: how relevant texts are to a query."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.option_fields import option
from recipe.spec import INT8_OPTIONS, Model, TaskSpec
from recipe.tasks.relevance_columns import FORMS, LISTS


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    listwise: bool = option(
        False,
        "reranking: train on the list of each query (ListNet), not on single pairs (binary "
        "cross-entropy). batch_size then counts queries.",
    )


SPECS = (
    TaskSpec(
        name="reranking",
        folder="reranking",
        served_as="text-classification",
        forms=(*LISTS, *FORMS),
        mixes_forms=True,
        models=frozenset({Model.CLASSIFIER}),
        options=Options,
        shared_options=INT8_OPTIONS,
        learning_rates=(2e-5, 1e-4),
    ),
)
