"""Sparse and multi-vector encoders of sentence-transformers: the library computes their vectors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from recipe.backend import bounds, precision, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import side_of
from recipe.backend.padded_rows import BATCH
from recipe.backend.requests import routes
from recipe.backend.requests.payloads import Answers, BadRequest, Prepared, Request, a_text
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin, refuse_empty
from recipe.backend.served_task import ServedTask
from recipe.compat import UNBOUNDED, dtype_argument
from recipe.tasks.sentence_embedding.serve import encode_beginnings, library_model
from recipe.tasks.sentence_embedding.spec import SPECS
from recipe.tokenization.encoding import cutting

SPARSE, MULTI_VECTOR = "SparseEncoder", "MultiVectorEncoder"
_PARAMETERS = frozenset({"prompt_name", "truncation", "truncation_direction"})
_SIDES = ("query", "document")


@dataclass(frozen=True)
class LibraryVectors(ServedTask):
    """A sparse encoder (SPLADE) or one of late interaction (ColBERT)."""

    served = SPECS[0].served["sparse-embedding"]
    kind: str
    """The class of sentence-transformers: SPARSE or MULTI_VECTOR."""
    model: Any

    @classmethod
    def load(cls, origin: Origin, kind: str, environ: Mapping[str, str] = os.environ) -> Any:
        """Load the model that `origin` names.

        Raises:
            ModelError: It cannot be loaded, the installed library has no such class, or the device
                needs fixed shapes.
            ValueError: AMPHORA_DTYPE is a precision that it does not have.
        """
        device, name, dtype = precision.library_precision(environ, f"a {kind}")
        model = library_model(kind, origin, device, dtype_argument(dtype))
        weights.refuse_broken(model, origin)
        refuse_empty(model.tokenizer, origin.location)
        turns.pause_before_calls(model[0])
        print(f"model: {kind} on {device} in {name}, by sentence-transformers", flush=True)
        return cls(kind, model.eval())

    @property
    def max_length(self) -> int:
        return int(self.model.max_seq_length or UNBOUNDED)

    @property
    def lacking(self) -> Set[str]:
        """Return the route for the other kind of vectors."""
        return {routes.EMBED_ALL if self.kind == SPARSE else routes.EMBED_SPARSE}

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def prepare(self, request: Request) -> Prepared:
        request = request.checked(_PARAMETERS, self.kind)
        inputs = request.read(a_text)
        name, known = request.parameters.get("prompt_name"), {*_SIDES, *self.model.prompts}
        if name is not None and name not in known:
            raise BadRequest(f"The prompt_name {name!r} is not one of {', '.join(sorted(known))}.")
        prepared = encode_beginnings(self.tokenizer, self.max_length, request, inputs)
        if self.kind == MULTI_VECTOR:
            read, width = prepared.tokens, self.model.get_embedding_dimension()
            bounds.hold(Bound.ANSWER, read * width, f"{read:,} tokens of {width:,} numbers")
        return prepared

    @torch.inference_mode()
    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Answer each text with `[{"index", "value"}, ...]`, the tokens' numbers and weights that
        are not 0, or with a vector for each of its tokens.
        """
        answers = []
        for prepared in requests:
            name = prepared.parameters.get("prompt_name")
            # A query may be encoded differently from a document, with or without a prompt.
            options = {
                "task": name if name in _SIDES else None,
                "prompt_name": name if name in self.model.prompts else None,
            }
            tokenizer = self.tokenizer
            with cutting(tokenizer, side_of(prepared.parameters, tokenizer)):
                encoded = self.model.encode(
                    prepared.work, batch_size=BATCH, show_progress_bar=False, **options
                )
            entries: list[Any] = []
            for vectors in encoded:
                if self.kind == MULTI_VECTOR:
                    entries.append(vectors.float().tolist())
                    continue
                row = vectors.coalesce()
                pairs = zip(row.indices()[0].tolist(), row.values().float().tolist(), strict=True)
                entries.append([{"index": index, "value": value} for index, value in pairs])
            answers.append(Answers(entries, prepared.truncated))
        return answers
