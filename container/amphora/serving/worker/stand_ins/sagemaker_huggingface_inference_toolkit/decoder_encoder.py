"""Reads requests and writes answers as Hugging Face's toolkit does."""

from __future__ import annotations

from typing import Any

from amphora.serving.api import toolkit, write


def decode(content: str | bytes, content_type: str = "application/json") -> Any:
    """Return a request's data: JSON unchanged, of CSV and images `{"inputs": ...}`."""
    return toolkit.decode(content, content_type)


def encode(content: Any, accept_type: str = "application/json") -> Any:
    """Return a prediction as the body of an answer."""
    return write.encode(content, accept_type)[0]
