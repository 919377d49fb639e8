"""Feature extraction: a vector for each text or token, and the similarity of texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel

from recipe.backend import bounds, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import PARAMETERS, LoadedModel
from recipe.backend.requests import ranking
from recipe.backend.requests.payloads import (
    Answers,
    BadRequest,
    Inputs,
    Prepared,
    Request,
    TokenIds,
    a_text,
    check_ids,
)
from recipe.backend.requests.ranking import Ranking
from recipe.backend.rows import Reading
from recipe.backend.saved.origin import Origin
from recipe.backend.served_task import ServedTask
from recipe.console import log
from recipe.tasks.sentence_embedding.spec import SPECS
from recipe.tasks.sentence_embedding.vectors import SentenceVectors

_SAME = {"truncate": "truncation", "dimensions": "truncate_dim"}
"""The names of parameters in TEI and its clients."""
TOKENS, VECTORS = "huggingface", "vectors"
"""The values of AMPHORA_ANSWERS: a vector for each token, as in Hugging Face's image, or one for
each text."""


@dataclass(frozen=True)
class MeanPooling:
    """The mean of a text's last hidden states, as sentence encoders are trained."""

    loaded: LoadedModel
    parameters: frozenset[str] = frozenset({"normalize", "truncate_dim"} | PARAMETERS)
    normalizes: bool = False
    shortened: int | None = None

    @property
    def max_length(self) -> int:
        """Return how many tokens of a text are read."""
        return self.loaded.max_length

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer."""
        return self.loaded.tokenizer

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the text columns that the model was trained on; empty if unknown."""
        return self.loaded.columns

    @property
    def width(self) -> int:
        """Return the numbers of a vector."""
        return self.loaded.width

    def encode(self, request: Request, inputs: Inputs) -> Prepared:
        """Return the tokens of each text."""
        return self.loaded.encode(request, inputs)

    def rows(self, prepared: Sequence[Prepared]) -> list[list[torch.Tensor]]:
        """Return the means."""
        return self.loaded.rows(prepared, Reading.MEAN)


@dataclass(frozen=True)
class Embedder(ServedTask):
    """A saved encoder that answers texts with a vector for each."""

    served = SPECS[0].served["sentence-similarity"]
    vectors: MeanPooling | SentenceVectors

    @property
    def loaded_model(self) -> LoadedModel | None:
        return self.vectors.loaded

    @property
    def tokenizer(self) -> Any:
        return self.vectors.tokenizer

    @property
    def max_length(self) -> int:
        return self.vectors.max_length

    def prepare(self, request: Request) -> Prepared:
        request = request.renamed(_SAME)
        request = request.checked(self.vectors.parameters, "feature-extraction")
        compared = ranking.parts(request)
        if compared is not None:
            source, texts, ranked = compared
            if ranked:
                raise BadRequest(
                    'The model makes vectors: send {"source_sentence": ..., "sentences": [...]} '
                    "for the similarity of texts; ranking a query needs a cross-encoder."
                )
            inputs: Inputs = Ranking([source, *texts], texts=texts, ranked=False)
        else:
            inputs = request.read(self._text, self.vectors.columns)
            count, width = len(inputs.values), self.vectors.width
            width = min(width, request.parameters.get("truncate_dim", width))
            bounds.hold(Bound.ANSWER, count * width, f"{count:,} vectors of {width:,}")
        return self.vectors.encode(request, inputs)

    def _text(self, value: Any) -> str:
        """Return a text; token ids are decoded.

        Raises:
            BadRequest: It is neither, or the ids are not from the model's tokenizer: a model would
                answer any ids.
        """
        if not isinstance(value, TokenIds):
            return a_text(value)
        tokenizer = self.vectors.tokenizer
        text: str = tokenizer.decode(check_ids(value, len(tokenizer)), skip_special_tokens=True)
        if tokenizer(text, verbose=False)["input_ids"] != list(value):
            raise BadRequest(
                "The token ids are not the output of the model's tokenizer for a text, with "
                "special tokens. Send the text."
            )
        return text

    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Return for each request a vector for each text; of `{"source_sentence", "sentences"}` the
        cosine of each sentence's vector to the source's."""
        answers: list[Any] = []
        for prepared, rows in zip(requests, self.vectors.rows(requests), strict=True):
            parameters = prepared.parameters
            vectors = torch.stack(list(rows))  # [texts, width]
            if self.vectors.normalizes and "normalize" not in parameters:
                vectors = _normalized(vectors)
            width = parameters.get("truncate_dim", self.vectors.shortened)
            if width is not None and width > (most := vectors.shape[1]):
                error = BadRequest(
                    (
                        f"The request asks for {width} dimensions, but the model's vectors have "
                        f"{most}."
                    ),
                    "dimensions",
                )
                answers.append(error)
                continue
            vectors = vectors[:, :width]
            if parameters.get("normalize"):
                vectors = _normalized(vectors)
            if isinstance(prepared.inputs, Ranking):
                source, *others = [_normalized(vector) for vector in vectors]
                cosines = [float(source @ other) for other in others]
                answers.append(prepared.inputs.answers(cosines, prepared))
            else:
                answers.append(Answers([vector.tolist() for vector in vectors], prepared.truncated))
        return answers


@dataclass(frozen=True)
class TokenFeatures(ServedTask):
    """A saved encoder that answers texts with the last hidden state of each of their tokens."""

    served = SPECS[0].served["feature-extraction"]
    loaded: LoadedModel

    @property
    def embedder(self) -> Embedder:
        """Return the embedder that answers clients' APIs, which have text vectors only."""
        return Embedder(MeanPooling(self.loaded))

    def prepare(self, request: Request) -> Prepared:
        if request.form is not None:
            return self.embedder.prepare(request)
        request = request.renamed({"truncate": "truncation"})
        known = {"truncation", "truncation_direction", "max_length", "tokenize_kwargs"}
        request = request.checked(known, "feature-extraction").flattened("tokenize_kwargs")
        request = request.checked(known - {"tokenize_kwargs"}, "tokenize_kwargs")
        prepared = self.loaded.encode(request, request.read(a_text, self.loaded.columns))
        tokens, width = prepared.tokens, self.loaded.width
        bounds.hold(Bound.ANSWER, tokens * width, f"{tokens:,} tokens, a vector of {width:,} each")
        return prepared

    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Return for each request a matrix of [1, tokens, hidden size] for each text, special
        tokens included, as transformers' pipeline answers; of a text in no list that matrix alone.
        """
        plain = [some for some in requests if some.request.form is None]
        answers: dict[int, Any] = {}
        for some, states in zip(plain, self.loaded.rows(plain, Reading.TOKENS), strict=True):
            matrices = []
            for state in states:
                turns.pause()
                matrices.append([state.tolist()])
            answers[id(some)] = Answers(matrices, some.truncated, some.request.single)
        others = [some for some in requests if some.request.form is not None]
        answers |= zip(map(id, others), self.embedder.predict(others), strict=True)
        return [answers[id(some)] for some in requests]


def _normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def load_vectors(origin: Origin) -> Embedder:
    """Load the encoder that `origin` names, for a vector of each text. What sentence-transformers
    has saved is computed as by that library."""
    if origin.sentence_modules:
        return Embedder(SentenceVectors.load(origin))
    return Embedder(MeanPooling(loading.load(origin, AutoModel, reading=Reading.MEAN)))


def load_features(
    origin: Origin, environ: Mapping[str, str] = os.environ
) -> Embedder | TokenFeatures:
    """Load the encoder that `origin` names, for vectors of texts or of tokens, as AMPHORA_ANSWERS
    says.

    Raises:
        ValueError: AMPHORA_ANSWERS is neither TOKENS nor VECTORS.
    """
    named = environ.get("AMPHORA_ANSWERS", "")
    if named and named not in (TOKENS, VECTORS):
        raise ValueError(f"AMPHORA_ANSWERS is {named!r}. Give {TOKENS} or {VECTORS}.")
    # Hugging Face's image serves a model without a head only if HF_TASK is feature-extraction, and
    # its clients read a matrix. Otherwise a text has one vector.
    is_named = environ.get("HF_TASK") == "feature-extraction" and not origin.sentence_modules
    answers = named or (TOKENS if is_named else VECTORS)
    kinds = {TOKENS: "each token", VECTORS: "each text"}
    other = VECTORS if answers == TOKENS else TOKENS
    log(f"answers: a vector of {kinds[answers]} (AMPHORA_ANSWERS={other}: of {kinds[other]})")
    if answers == VECTORS:
        return load_vectors(origin)
    return TokenFeatures(loading.load(origin, AutoModel))
