"""Serve a text classifier: what `amphora serve` calls for a model without code of its own.

Requests: `{"inputs": "text"}`, `{"inputs": ["text", ...], "parameters": {"top_k": 2}}`, a bare
string or list, JSON Lines, CSV with a text in each row, or plain text. Answers: a list with
`{"label": name, "score": probability}` for each text; with top_k, a list of those for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipe import classifier, wire
from recipe.classifier import Classifier
from recipe.wire import Label, Request


def model_fn(model_dir: str) -> Classifier:
    """The model and tokenizer in `model_dir`."""
    return classifier.load(model_dir)


def input_fn(body: bytes, content_type: str) -> Request:
    """The texts of a request.

    Raises:
        ValueError: the body is wrong; the message says how, with an example of what is right.
        TypeError: the content type is not supported (`recipe.wire.UnsupportedContentType`).
    """
    return wire.read_request(body, content_type)


def predict_fn(data: Request, model: Classifier) -> list[Label | list[Label]]:
    """A label and score for each text; lists of them where the request has top_k."""
    return model.classify(data.texts, data.top_k)


def output_fn(prediction: Sequence[Label | list[Label]], accept: str) -> bytes:
    """The answer as JSON, JSON Lines or CSV, as `accept` asks.

    Raises:
        TypeError: `accept` names none of them (`recipe.wire.UnsupportedContentType`).
    """
    return wire.write_answer(prediction, accept)
