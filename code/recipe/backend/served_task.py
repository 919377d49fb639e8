"""The base class of the tasks that `serve` modules and transformers' pipelines answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from recipe.backend.requests.payloads import Request


class ServedTask(ABC):
    """A loaded model that answers requests."""

    def example(self, text: str) -> Request | None:
        """Return a cheap request with a text, to warm up; None if the task has none."""
        return Request(texts=[text])

    @abstractmethod
    def measure(self, request: Request) -> list[int]:
        """Read a request's inputs, once, and return the tokens of each.

        Raises:
            BadRequest: A parameter or an input is not one of the task's.
        """

    @abstractmethod
    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return the prediction for each request, or an exception in its place."""
