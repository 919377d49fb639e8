"""Describes a loaded model to the server's front, for the page at / and the routes of APIs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from recipe.backend.packed_rows import PackedRows
from recipe.backend.requests.payloads import BadRequest, Request
from recipe.compat import UNBOUNDED
from recipe.inference import registry
from recipe.inference.apis import openai, openai_forms, tei, tgi
from recipe.task_table import SERVED
from recipe.tasks.causal_lm.serve import Generator
from recipe.tasks.sentence_embedding.library_vectors import SPARSE, LibraryVectors
from recipe.tasks.sentence_embedding.serve import Embedder, TokenFeatures
from recipe.tasks.text_classification.serve import Classifier

_FORMS = {
    "table-question-answering": "table",
    "image-classification": "image",
    "image-segmentation": "image",
    "image-feature-extraction": "image",
    "image-to-text": "image",
    "depth-estimation": "image",
    "object-detection": "image",
    "automatic-speech-recognition": "audio",
    "audio-classification": "audio",
}
"""The form on the page for tasks of transformers' pipelines; JSON for the others."""


def describe(model: Any, task: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a description of the model.

    Args:
        model: The served task.
        task: The name of the task.
        environ: AMPHORA_MODEL_NAME and HF_MODEL_ID name the model.

    Returns:
        JSON values: `model`, `task`, `routes` (of APIs), `form` (of the page), and if known
        `architecture`, `max_length` (in tokens), `example_text` and `padding` (false if texts of
        different lengths cost no more together than apart).
    """
    described: dict[str, Any] = {
        "model": openai_forms.served_name(environ),
        "task": task,
        "routes": routes(model),
        "form": SERVED[task].form if task in SERVED else _FORMS.get(task, "json"),
    }
    if isinstance(model, Generator) and model.has_template:
        described["form"] = "chat"
    if isinstance(model, Embedder):
        described["form"] = "similarity"
    if isinstance(model, Classifier) and model.loaded.model.config.num_labels == 1:
        described["form"] = "rank"
    loaded = getattr(model, "loaded", None)
    computed = registry.model_of(model)
    # Packed rows have no padding, and calls of OpenVINO's graph are cut by what padding costs.
    if computed is not None and (computed.engine or isinstance(computed.layout, PackedRows)):
        described["padding"] = False
    reads = model.vectors if isinstance(model, Embedder) else loaded
    if isinstance(model, LibraryVectors):
        reads = model
    limit = None if reads is None else reads.max_length
    if limit is not None and limit < UNBOUNDED:
        described["max_length"] = limit
        if isinstance(model, Generator):
            described |= {"max_input_tokens": limit - 1, "max_total_tokens": limit}
    if loaded is not None:
        described["architecture"] = type(loaded.model).__name__
        if task == "fill-mask":
            described["example_text"] = f"Paris is the {loaded.tokenizer.mask_token} of France."
    return described


def tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of a model that answers TEI's API."""
    inner = getattr(model, "loaded", None) or getattr(model, "vectors", None) or model.model
    return inner.tokenizer


def refuse_other_apis(model: Any, request: Request) -> None:
    """Raise BadRequest if the model does not answer the request's API."""
    known = routes(model)
    if isinstance(model, Generator) and request.route == openai.CHAT:
        return  # the generator refuses chats without a chat template
    if request.route and request.route not in known:
        answered = f"answers {', '.join(known)}" if known else "answers none of these APIs"
        raise BadRequest(f"The body is one of {request.route}, but this model {answered}.")


def routes(model: Any) -> list[str]:
    """Return the routes of APIs that a model answers."""
    if isinstance(model, Generator):
        chat = [openai.CHAT] if model.has_template else []
        return [*chat, openai.COMPLETIONS, *tgi.ROUTES]
    if isinstance(model, (Embedder, TokenFeatures)):
        return [openai.EMBEDDINGS, tei.EMBED, tei.SIMILARITY, tei.TOKENIZE]
    if isinstance(model, LibraryVectors):
        return [tei.EMBED_SPARSE if model.kind == SPARSE else tei.EMBED_ALL, tei.TOKENIZE]
    if isinstance(model, Classifier):
        ranks = model.loaded.model.config.num_labels == 1
        ranking = [tei.RERANK, tei.RERANK_DOCUMENTS, tei.RERANK_2] if ranks else []
        return [tei.PREDICT, *ranking, tei.TOKENIZE]
    return []
