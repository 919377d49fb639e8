"""Inference files as users write them for the images of AWS and Hugging Face, and requests.

Those of `toolkit_files_hub` and `toolkit_files_torch` are modelled on what the toolkits document and
test: every subset of the functions, models of every kind, each of the types that the defaults read
and write. None is copied.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request, and where ours answers otherwise on purpose, what and why."""

    body: bytes
    content_type: str = JSON
    accept: str = JSON
    ours: Any = None
    """What ours answers, where it differs: a status, or the decoded answer."""
    why: str = ""


def ask(value: Any, accept: str = JSON, ours: Any = None, why: str = "") -> Question:
    """A JSON request."""
    return Question(body=json.dumps(value).encode(), accept=accept, ours=ours, why=why)


def ask_csv(text: str, accept: str = JSON, ours: Any = None, why: str = "") -> Question:
    """A CSV request."""
    return Question(body=text.encode(), content_type=CSV, accept=accept, ours=ours, why=why)


def ask_npy(value: Any, accept: str = JSON, ours: Any = None, why: str = "") -> Question:
    """An NPY request."""
    out = io.BytesIO()
    np.save(out, np.asarray(value))
    return Question(body=out.getvalue(), content_type=NPY, accept=accept, ours=ours, why=why)


def ask_bytes(body: bytes, content_type: str, ours: Any = None, why: str = "") -> Question:
    """Any other request."""
    return Question(body=body, content_type=content_type, ours=ours, why=why)


def picture() -> bytes:
    """A PNG of 4 by 3 points."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (4, 3), (200, 10, 10)).save(out, format="PNG")
    return out.getvalue()


@dataclass(frozen=True, kw_only=True)
class File:
    """One inference file: the image it is written for, its model's folder, its requests."""

    name: str
    oracle: str
    model: str
    code: str | None
    questions: Sequence[Question] = ()
    program: str = "inference.py"
    starts: bool = True
    """Whether the image takes it at start: where it does not, neither do ours."""


ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]]
