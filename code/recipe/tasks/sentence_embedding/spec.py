"""Sentence embedding: vectors of texts whose cosines measure similarity."""

from __future__ import annotations

from recipe.backend.requests import routes
from recipe.data.relevance_columns import FORMS
from recipe.spec import Model, Served, TaskSpec

_ROUTES = (routes.EMBEDDINGS, routes.EMBED, routes.SIMILARITY, routes.TOKENIZE)
_OF_LIBRARY = (routes.EMBED_SPARSE, routes.EMBED_ALL, routes.TOKENIZE)

SPECS = (
    TaskSpec(
        name="sentence-embedding",
        folder="sentence_embedding",
        forms=FORMS,
        mixes_forms=True,
        models=frozenset({Model.ENCODER, Model.MASKED}),
        hyperparameters=(
            *("text_pair_column", "label_column", "negative_columns", "scale", "mini_batch_size"),
            *("matryoshka_dims", "query_prompt", "document_prompt"),
        ),
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
            "sparse-embedding": Served(
                load="tasks.sentence_embedding.library_vectors:LibraryVectors.load",
                options={"kind": "SparseEncoder"},
                routes=_OF_LIBRARY,
            ),
            "multi-vector-embedding": Served(
                load="tasks.sentence_embedding.library_vectors:LibraryVectors.load",
                options={"kind": "MultiVectorEncoder"},
                routes=_OF_LIBRARY,
            ),
        },
    ),
)
