"""Sentence embedding: vectors of texts whose cosines measure similarity."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.option_fields import ABOVE_0, option
from recipe.spec import INT8_OPTIONS, Model, Served, TaskSpec
from recipe.tasks.relevance_columns import FORMS

_ROUTES = ("/v1/embeddings", "/embed")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    scale: float = option(
        20.0,
        "sentence-embedding: factor of the cosine similarities in the loss (1 / temperature).",
        valid=ABOVE_0,
    )
    matryoshka_dims: str | None = option(
        None,
        "sentence-embedding: dimensions to which vectors can be truncated, separated by commas.",
        separator=",",
    )
    query_prompt: str | None = option(
        None,
        "sentence-embedding: prompt of each query. Default: the model's; none turns it off.",
        off="",
    )
    document_prompt: str | None = option(
        None,
        "sentence-embedding: prompt of each document. Default: the model's; none turns it off.",
        off="",
    )


SPECS = (
    TaskSpec(
        name="sentence-embedding",
        folder="sentence_embedding",
        forms=FORMS,
        mixes_forms=True,
        models=frozenset({Model.ENCODER, Model.MASKED}),
        options=Options,
        shared_options=INT8_OPTIONS,
        learning_rates=(2e-5, 1e-4),
        served={
            "feature-extraction": Served(
                load="tasks.sentence_embedding.serve:load_features",
                adapters=("FEATURE_EXTRACTION",),
                routes=_ROUTES,
                form="text",
            ),
            "sentence-similarity": Served(
                load="tasks.sentence_embedding.serve:load_vectors",
                routes=_ROUTES,
                form="similarity",
            ),
        },
    ),
)
