"""transformers' own pipelines: around a model that is loaded already."""

from __future__ import annotations

from typing import Any

import transformers

from recipe.inference.loaded_model import Encoder


def around(task: str, loaded: Encoder) -> Any:
    """transformers' pipeline for the task, with the model and the tokenizer that are loaded."""
    make: Any = transformers.pipeline
    # The pipeline cuts texts at what the tokenizer says, which of some folders is nothing.
    loaded.tokenizer.model_max_length = loaded.max_length
    device = loaded.model.device
    return make(task, model=loaded.model, tokenizer=loaded.tokenizer, device=device)
