"""Reads requests and writes answers as Hugging Face's toolkit does."""

from __future__ import annotations

from typing import Any

from recipe.backend.requests import serialization
from recipe.inference.defaults import huggingface


def decode(content: str | bytes, content_type: str = "application/json") -> Any:
    """Return a request's data: JSON unchanged, of CSV and images `{"inputs": ...}`."""
    return huggingface.decode(content, content_type)


def encode(content: Any, accept_type: str = "application/json") -> Any:
    """Return a prediction as the body of an answer."""
    return serialization.encode(content, accept_type)[0]
