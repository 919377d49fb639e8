"""Sentence embedding: vectors of texts whose cosines measure similarity."""

from __future__ import annotations

from recipe.data.relevance_columns import FORMS
from recipe.spec import Model, Served, TaskSpec

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
                form="text",
            ),
            "sentence-similarity": Served(
                load="tasks.sentence_embedding.serve:load_vectors", form="similarity"
            ),
            "sparse-embedding": Served(
                load="tasks.sentence_embedding.library_vectors:LibraryVectors.load",
                options={"kind": "SparseEncoder"},
            ),
            "multi-vector-embedding": Served(
                load="tasks.sentence_embedding.library_vectors:LibraryVectors.load",
                options={"kind": "MultiVectorEncoder"},
            ),
        },
    ),
)
