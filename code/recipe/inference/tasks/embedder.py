"""Feature extraction: one vector for each text, or each token's; and how alike texts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoModel

from recipe.inference import loaded_model as encoder
from recipe.inference.loaded_model import PARAMETERS, Encoder
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text
from recipe.inference.tasks import ranking, sentences
from recipe.inference.tasks.ranking import Ranking

TOKENS, VECTORS = "huggingface", "vectors"
"""What AMPHORA_ANSWERS may be: a vector of each token, as Hugging Face's image answers, or one of
each text."""


class Vectors(Protocol):
    """What makes a vector of each text."""

    @property
    def parameters(self) -> frozenset[str]:
        """Parameters that decide on the vectors."""

    def count(self, request: Request) -> list[int]:
        """Tokens of each text; what is cut is noted in the request."""

    def rows(self, requests: Sequence[Request]) -> list[list[torch.Tensor]]:
        """A vector for each text of each request, float32 on the CPU."""


@dataclass(frozen=True)
class Means:
    """The mean of a text's last hidden states, as sentence encoders are trained."""

    encoder: Encoder
    parameters: frozenset[str] = frozenset({"normalize"} | PARAMETERS)

    def count(self, request: Request) -> list[int]:
        """Tokens of each text."""
        return [len(ids) for ids in self.encoder.encode(request)]

    def rows(self, requests: Sequence[Request]) -> list[list[torch.Tensor]]:
        """The means; with `normalize` of length 1."""
        return [
            [_normalized(each) if request.parameters.get("normalize") else each for each in rows]
            for request, rows in zip(requests, self.encoder.rows(requests, _mean), strict=True)
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
            BadRequest: a parameter or an input is none of this task's.
        """
        request.only(self.vectors.parameters, "feature-extraction")
        asked = ranking.parts(request.texts[0]) if request.single and not request.is_read else None
        if asked is not None:
            source, texts, ranked = asked
            if ranked:
                raise BadRequest(
                    'The model makes vectors: send {"source_sentence": ..., "sentences": [...]} '
                    "for how alike texts are; a query is ranked by a cross-encoder."
                )
            request.texts, request.is_read = [source, *texts], True
            request.raw = Ranking(texts, ranked=False)
        request.read(a_text)
        return self.vectors.count(request)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request a vector for each text; of `{"source_sentence", "sentences"}` the cosine
        of each sentence's vector to the source's."""
        rows = self.vectors.rows(requests)
        return [self._answers(*each) for each in zip(requests, rows, strict=True)]

    def _answers(self, request: Request, vectors: Sequence[torch.Tensor]) -> Answers:
        if isinstance(request.raw, Ranking):
            source, *others = [_normalized(vector) for vector in vectors]
            return request.raw.answers([float(source @ other) for other in others], request)
        return Answers([vector.tolist() for vector in vectors], request.truncated)


@dataclass(frozen=True)
class TokenFeatures:
    """A saved encoder that answers texts with the last hidden state of each of their tokens."""

    encoder: Encoder

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[text])

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text.

        Raises:
            BadRequest: a parameter or an input is none of this task's.
        """
        if request.form is not None:
            return self._vectors.measure(request)
        known = {"truncation", "max_length", "tokenize_kwargs"}
        request.only(known, "feature-extraction")
        if nested := request.parameters.get("tokenize_kwargs"):
            flat = {k: v for k, v in request.parameters.items() if k != "tokenize_kwargs"}
            request.parameters = {**nested, **flat}
            request.only(known - {"tokenize_kwargs"}, "tokenize_kwargs")
        request.read(a_text)
        return [len(ids) for ids in self.encoder.encode(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request a matrix of [1, tokens, hidden size] for each text, special tokens
        included, as transformers' pipeline answers; of a text in no list that matrix alone."""
        own = [request for request in requests if request.form is None]
        matrices = zip(own, self.encoder.rows(own, _tokens), strict=True)
        answers: dict[int, Any] = {
            id(request): Answers(
                [[state.tolist()] for state in states], request.truncated, request.single
            )
            for request, states in matrices
        }
        others = [request for request in requests if request.form is not None]
        answers |= zip(map(id, others), self._vectors.predict(others), strict=True)
        return [answers[id(request)] for request in requests]

    @property
    def _vectors(self) -> Embedder:
        """What answers clients' APIs, which know vectors only."""
        return Embedder(Means(self.encoder))


def _mean(output: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    states: torch.Tensor = output.last_hidden_state.float()
    weights = mask.unsqueeze(-1).float()
    return list((states * weights).sum(1) / weights.sum(1))


def _tokens(output: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    return [
        states[: int(row.sum())] for states, row in zip(output.last_hidden_state, mask, strict=True)
    ]


def _normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def load(origin: Origin, answers: str) -> Embedder | TokenFeatures:
    """The encoder that `origin` names, without a head.

    Args:
        origin: Where it is. What sentence-transformers has saved is computed as it does.
        answers: TOKENS or VECTORS.
    """
    if answers == TOKENS:
        return TokenFeatures(encoder.load(origin, AutoModel))
    if origin.sentence_modules:
        return Embedder(sentences.load(origin))
    return Embedder(Means(encoder.load(origin, AutoModel)))
