"""Reranking: how relevant texts are to a query."""

from __future__ import annotations

from recipe.data.relevance_columns import FORMS, LISTS
from recipe.spec import Model, TaskSpec

SPECS = (
    TaskSpec(
        name="reranking",
        folder="reranking",
        forms=(*LISTS, *FORMS),
        mixes_forms=True,
        models=frozenset({Model.CLASSIFIER}),
        hyperparameters=("text_pair_column", "label_column", "negative_columns", "listwise"),
        learning_rates=(2e-5, 1e-4),
    ),
)
