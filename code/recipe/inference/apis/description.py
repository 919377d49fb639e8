"""What a loaded model is, for the server's front: its page at / and the clients' routes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from recipe.inference.apis import openai, openai_forms, tei
from recipe.inference.generation.generator import Generator
from recipe.inference.payloads import BadRequest, Request
from recipe.inference.tasks.classifier import Classifier
from recipe.inference.tasks.embedder import Embedder, TokenFeatures
from recipe.inference.tasks.text_to_text import TextGenerator

_FORMS = {
    "text-generation": "text",
    "text-classification": "pair",
    "token-classification": "text",
    "feature-extraction": "text",
    "sentence-similarity": "similarity",
    "zero-shot-classification": "labels",
    "fill-mask": "mask",
    "question-answering": "question",
    "document-question-answering": "json",
    "table-question-answering": "table",
    "summarization": "text",
    "translation": "text",
    "text2text-generation": "text",
    "image-classification": "image",
    "image-segmentation": "image",
    "image-feature-extraction": "image",
    "image-to-text": "image",
    "depth-estimation": "image",
    "object-detection": "image",
    "automatic-speech-recognition": "audio",
    "audio-classification": "audio",
}
"""The form of the page for each task; JSON for the others."""
_SENTENCES, _NEW_TOKENS = (1, 2, 4, 8), 16
"""Of examples: sentences of six tokens or so, and what is written where texts are."""


def describe(model: Any, task: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The model, its task, the routes of clients' APIs that it answers, and how it is tried.

    Args:
        model: What `registry.load` returned.
        task: Its task.
        environ: AMPHORA_MODEL_NAME and HF_MODEL_ID name the model.

    Returns:
        What JSON holds: `model`, `task`, `routes`, `form` (of the page), and if they are known
        `architecture`, `max_length` (in tokens), `example_text`, `examples` (bodies of requests),
        and `padding` (false where texts of different lengths cost no more together than apart).
    """
    described: dict[str, Any] = {
        "model": openai_forms.served_name(environ),
        "task": task,
        "routes": routes(model),
        "form": _FORMS.get(task, "json"),
    }
    if isinstance(model, Generator) and model.has_template:
        described["form"] = "chat"
    if isinstance(model, Embedder):
        described["form"] = "similarity"
    if isinstance(model, Classifier) and model.loaded.model.config.num_labels == 1:
        described["form"] = "rank"
    if requests := examples(model, described["form"]):
        described["examples"] = requests
    loaded = getattr(model, "loaded", None)
    vectors = getattr(model, "vectors", None)
    computes = loaded or getattr(vectors, "loaded", vectors)
    # Rows without padding; or calls cut by what theirs costs, which nobody needs to do before.
    if any(getattr(computes, name, None) is not None for name in ("packed", "cuts")):
        described["padding"] = False
    if loaded is not None:
        described["architecture"] = type(loaded.model).__name__
        if loaded.max_length < 1 << 30:
            described["max_length"] = loaded.max_length
        if task == "fill-mask":
            described["example_text"] = f"Paris is the {loaded.tokenizer.mask_token} of France."
    return described


def examples(model: Any, form: str) -> list[Any]:
    """Bodies of requests with texts of usual lengths, which the model answers; none where a form of
    the page knows none. By them the server measures (AMPHORA_WORKERS)."""
    loaded = getattr(model, "loaded", None)
    bodies: list[Any] = []
    for length in _SENTENCES:
        text = " ".join(["A sentence to measure with."] * length)
        if form in ("text", "pair", "similarity", "rank", "chat"):
            is_pair = isinstance(model, Classifier) and len(model.loaded.columns) > 1
            body: Any = {"inputs": {"text": text, "text_pair": text} if is_pair else text}
            if isinstance(model, (Generator, TextGenerator)):
                body["parameters"] = {"max_new_tokens": _NEW_TOKENS}
        elif form == "question":
            body = {"inputs": {"question": "What is it?", "context": text}}
        elif form == "labels":
            body = {"inputs": text, "parameters": {"candidate_labels": ["one", "other"]}}
        elif form == "mask" and loaded is not None:
            body = {"inputs": f"{loaded.tokenizer.mask_token} {text}"}
        else:
            return []
        bodies.append(body)
    return bodies


def refuse_other_apis(model: Any, request: Request) -> None:
    """Raises BadRequest if the request is of an API that the model does not answer."""
    own = routes(model)
    if isinstance(model, Generator) and request.route == openai.CHAT:
        return  # if there is no chat template, the generator says so
    if request.route and request.route not in own:
        answered = f"answers {', '.join(own)}" if own else "answers none of these APIs"
        raise BadRequest(f"The body is one of {request.route}, and this model {answered}.")


def routes(model: Any) -> list[str]:
    """The routes of clients' APIs that a model answers."""
    if isinstance(model, Generator):
        chat = [openai.CHAT] if model.has_template else []
        return [*chat, openai.COMPLETIONS]
    if isinstance(model, (Embedder, TokenFeatures)):
        return [openai.EMBEDDINGS, tei.EMBED, tei.SIMILARITY]
    if isinstance(model, Classifier):
        ranks = model.loaded.model.config.num_labels == 1
        return [tei.PREDICT, *([tei.RERANK] if ranks else [])]
    return []
