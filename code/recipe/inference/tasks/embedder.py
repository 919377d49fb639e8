"""Feature extraction: one vector for each text, or each token's; and how alike texts are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoModel

from recipe.inference import bounds, loading, turns
from recipe.inference.bounds import Bound
from recipe.inference.loaded_model import PARAMETERS, LoadedModel
from recipe.inference.payloads import Answers, BadRequest, Request, a_text
from recipe.inference.rows import Reading
from recipe.inference.saved.origin import Origin
from recipe.inference.tasks import ranking
from recipe.inference.tasks.ranking import Ranking
from recipe.inference.tasks.sentences import SentenceVectors

TOKENS, VECTORS = "huggingface", "vectors"
"""What AMPHORA_ANSWERS may be: a vector of each token, as Hugging Face's image answers, or one of
each text."""


class Vectors(Protocol):
    """What makes a vector of each text."""

    @property
    def parameters(self) -> frozenset[str]:
        """Parameters that decide on the vectors."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of texts that the model was trained on, if it says so."""

    @property
    def width(self) -> int:
        """Numbers of a vector."""

    def count(self, request: Request) -> list[int]:
        """Tokens of each text; what is cut is noted in the request."""

    def rows(self, requests: Sequence[Request]) -> list[list[torch.Tensor]]:
        """A vector for each text of each request, float32 on the CPU."""


@dataclass(frozen=True)
class Means:
    """The mean of a text's last hidden states, as sentence encoders are trained."""

    loaded: LoadedModel
    parameters: frozenset[str] = frozenset({"normalize"} | PARAMETERS)

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of texts that the model was trained on, if it says so."""
        return self.loaded.columns

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.loaded.width

    def count(self, request: Request) -> list[int]:
        """Tokens of each text."""
        return [len(ids) for ids in self.loaded.encode(request)]

    def rows(self, requests: Sequence[Request]) -> list[list[torch.Tensor]]:
        """The means; with `normalize` of length 1."""
        means = self.loaded.rows(requests, Reading.MEAN)
        return [
            [_normalized(row) for row in rows] if request.parameters.get("normalize") else rows
            for request, rows in zip(requests, means, strict=True)
        ]


@dataclass(frozen=True)
class Embedder:
    """A saved encoder that answers texts with a vector for each."""

    vectors: Vectors

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[text])

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text.

        Raises:
            BadRequest: A parameter or an input is not one of this task's.
        """
        request.check_parameters(self.vectors.parameters, "feature-extraction")
        compared = (
            ranking.parts(request.texts[0]) if request.single and not request.is_read else None
        )
        if compared is not None:
            source, texts, ranked = compared
            if ranked:
                raise BadRequest(
                    'The model makes vectors: send {"source_sentence": ..., "sentences": [...]} '
                    "for how alike texts are; a query is ranked by a cross-encoder."
                )
            request.texts, request.is_read = [source, *texts], True
            request.raw = Ranking(texts, ranked=False)
        request.read(a_text, self.vectors.columns)
        if not isinstance(request.raw, Ranking):
            count, width = len(request.texts), self.vectors.width
            width = min(width, request.parameters.get("truncate_dim", width))
            bounds.hold(Bound.ANSWER, count * width, f"{count:,} vectors of {width:,}")
        return self.vectors.count(request)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request a vector for each text; of `{"source_sentence", "sentences"}` the cosine
        of each sentence's vector to the source's."""
        answers = []
        for request, vectors in zip(requests, self.vectors.rows(requests), strict=True):
            if isinstance(request.raw, Ranking):
                source, *others = [_normalized(vector) for vector in vectors]
                cosines = [float(source @ other) for other in others]
                answers.append(request.raw.answers(cosines, request))
            else:
                answers.append(Answers([vector.tolist() for vector in vectors], request.truncated))
        return answers


@dataclass(frozen=True)
class TokenFeatures:
    """A saved encoder that answers texts with the last hidden state of each of their tokens."""

    loaded: LoadedModel

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[text])

    @property
    def embedder(self) -> Embedder:
        """What answers clients' APIs, which know vectors only."""
        return Embedder(Means(self.loaded))

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text.

        Raises:
            BadRequest: A parameter or an input is not one of this task's.
        """
        if request.form is not None:
            return self.embedder.measure(request)
        known = {"truncation", "max_length", "tokenize_kwargs"}
        request.check_parameters(known, "feature-extraction")
        if nested := request.parameters.get("tokenize_kwargs"):
            flat = {k: v for k, v in request.parameters.items() if k != "tokenize_kwargs"}
            request.parameters = {**nested, **flat}
            request.check_parameters(known - {"tokenize_kwargs"}, "tokenize_kwargs")
        request.read(a_text, self.loaded.columns)
        counts = [len(ids) for ids in self.loaded.encode(request)]
        tokens, width = sum(counts), self.loaded.width
        bounds.hold(Bound.ANSWER, tokens * width, f"{tokens:,} tokens, a vector of {width:,} each")
        return counts

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request a matrix of [1, tokens, hidden size] for each text, special tokens
        included, as transformers' pipeline answers; of a text in no list that matrix alone."""
        own = [request for request in requests if request.form is None]
        answers: dict[int, Any] = {}
        for request, states in zip(own, self.loaded.rows(own, Reading.TOKENS), strict=True):
            matrices = []
            for state in states:
                turns.pause()
                matrices.append([state.tolist()])
            answers[id(request)] = Answers(matrices, request.truncated, request.single)
        others = [request for request in requests if request.form is not None]
        answers |= zip(map(id, others), self.embedder.predict(others), strict=True)
        return [answers[id(request)] for request in requests]


def _normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def load_vectors(origin: Origin) -> Embedder:
    """The encoder that `origin` names, without a head, for a vector of each text: what
    sentence-transformers has saved computes it as that library does."""
    if origin.sentence_modules:
        return Embedder(SentenceVectors.load(origin))
    return Embedder(Means(loading.load(origin, AutoModel, means=True)))


def load_features(
    origin: Origin, environ: Mapping[str, str] = os.environ
) -> Embedder | TokenFeatures:
    """The encoder that `origin` names, for vectors of texts or of tokens: AMPHORA_ANSWERS decides.

    Raises:
        ValueError: AMPHORA_ANSWERS is neither TOKENS nor VECTORS.
    """
    named = environ.get("AMPHORA_ANSWERS", "")
    if named and named not in (TOKENS, VECTORS):
        raise ValueError(f"AMPHORA_ANSWERS is {named!r}. Give {TOKENS} or {VECTORS}.")
    # Hugging Face's image serves a model without a head only if HF_TASK says so: its clients read a
    # matrix. If nobody asked for that, texts have vectors.
    is_named = environ.get("HF_TASK") == "feature-extraction" and not origin.sentence_modules
    answers = named or (TOKENS if is_named else VECTORS)
    what = "each token" if answers == TOKENS else "each text"
    other = VECTORS if answers == TOKENS else TOKENS
    print(f"answers: a vector of {what} (AMPHORA_ANSWERS={other} for the other)", flush=True)
    if answers == VECTORS:
        return load_vectors(origin)
    return TokenFeatures(loading.load(origin, AutoModel))
