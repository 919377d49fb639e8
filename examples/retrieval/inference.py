"""Serve a sparse encoder (SPLADE) or one of late interaction (ColBERT).

A request is {"inputs": a text or a list, "parameters": {"task": "query" or "document"}}. A text is
answered by its tokens' weights, [{"index": 7, "value": 1.2}, ...], or by a vector for each token.
Put this file into the folder code/ of a model that sentence-transformers has saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentence_transformers


def model_fn(model_dir: str) -> Any:
    """Load the model by the class that saved it."""
    settings = json.loads((Path(model_dir) / "config_sentence_transformers.json").read_text())
    return getattr(sentence_transformers, settings["model_type"])(model_dir)


def predict_fn(body: dict[str, Any], model: Any) -> list[Any]:
    """Return what the library computes for each text."""
    inputs = body["inputs"]
    texts = [inputs] if isinstance(inputs, str) else inputs
    encoded = model.encode(texts, show_progress_bar=False, **body.get("parameters", {}))
    if not isinstance(model, sentence_transformers.SparseEncoder):
        return [vectors.tolist() for vectors in encoded]
    rows = [row.coalesce() for row in encoded]
    return [
        [
            {"index": index, "value": value}
            for index, value in zip(row.indices()[0].tolist(), row.values().tolist(), strict=True)
        ]
        for row in rows
    ]
