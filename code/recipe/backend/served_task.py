"""The base class of the tasks that `serve` modules and transformers' pipelines answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from functools import cached_property
from typing import Any, ClassVar

from recipe.backend.loaded_model import LoadedModel
from recipe.backend.packed_rows import PackedRows
from recipe.backend.requests.payloads import TEXT_KEYS, Request
from recipe.backend.requests.probes import TEXTS
from recipe.backend.shared_encoder import LoadedAdapters
from recipe.compat import UNBOUNDED
from recipe.spec import PAIRS, Served


class ServedTask(ABC):
    """A loaded model that answers requests."""

    served = Served(load="")
    """What the task's spec declares."""

    generates: ClassVar[bool] = False
    """Whether the model generates text."""

    @property
    def lacking(self) -> Set[str]:
        """Return the routes of the spec that this model does not answer."""
        return frozenset()

    @property
    def loaded_model(self) -> LoadedModel | None:
        """Return the task's model; None if a library computes it."""
        model: LoadedModel | None = getattr(self, "loaded", None)
        return model

    @cached_property
    def adapters(self) -> LoadedAdapters:
        """Return the adapters that requests may name."""
        return LoadedAdapters()

    @property
    def may_adapt(self) -> bool:
        """Return whether adapters by name are for such models: encoders."""
        return self.loaded_model is not None and not self.generates

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return None if self.loaded_model is None else self.loaded_model.tokenizer

    @property
    def max_length(self) -> int:
        """Return how many tokens of an input are read."""
        return UNBOUNDED if self.loaded_model is None else self.loaded_model.max_length

    @property
    def routes(self) -> list[str]:
        """Return the routes of APIs that the model answers."""
        return [route for route in self.served.routes if route not in self.lacking]

    @property
    def form(self) -> str:
        """Return the form of the page at / to try the model with."""
        return self.served.form

    def describe(self) -> dict[str, Any]:
        """Return what is known of `architecture`, `engine`, `max_length` (in tokens),
        `example_text`, `example_body` (of the form json), `columns` (of the training data, by the
        keys of an input) and `padding` (false if texts of different lengths cost no more together
        than apart); and how the server reads `bodies`: the names of texts and pairs, and the
        settings of generation."""
        described: dict[str, Any] = {"routes": self.routes, "form": self.form}
        described["bodies"] = {"texts": TEXT_KEYS, "pairs": PAIRS}
        if (loaded := self.loaded_model) is not None:
            described["architecture"] = type(loaded.model).__name__
            described["engine"] = "CTranslate2 in int8" if loaded.engine else "PyTorch"
            if loaded.columns:
                described["columns"] = loaded.columns
            # Neither packed rows nor CTranslate2 compute padding.
            if loaded.engine or isinstance(loaded.layout, PackedRows):
                described["padding"] = False
        if self.max_length < UNBOUNDED:
            described["max_length"] = self.max_length
        return described

    def example(self, text: str) -> Request | None:
        """Return a cheap request with a text, to warm up; None if the task has none."""
        return Request(inputs=[text])

    def probes(self) -> Sequence[Request]:
        """Return the requests that a model's proof answers (docs/SERVING.md)."""
        requests = [self.example(text) for text in TEXTS]
        return [request for request in requests if request is not None]

    def prompt_ids(self, prepared: Request) -> Sequence[int]:
        """Return the tokens of a request's only prompt, if the model generates text."""
        raise NotImplementedError

    def continue_prompt(self, prepared: Request) -> list[int]:
        """Return the generated tokens of a request's only prompt, of an encoder-decoder all of its
        decoder."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self, request: Request) -> Request:
        """Read a request's inputs and prepare them for the model. Raise BadRequest if a parameter
        or an input is not one of the task's."""

    @abstractmethod
    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return the prediction for each request, or an exception in its place."""
