"""Feature extraction: a vector for each text or token, and the similarity of texts.

Of models that sentence-transformers has saved, its modules tokenize texts and pool hidden states;
the encoder runs like any `LoadedModel`.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from recipe.backend import bounds, loading, precision, programs, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import PARAMETERS, LoadedModel
from recipe.backend.requests import ranking
from recipe.backend.requests.payloads import BadRequest, Request, a_text
from recipe.backend.rows import Pooling, Reading, TokenRow
from recipe.backend.saved import weights
from recipe.backend.served_task import ServedTask
from recipe.backend.shared_encoder import HostedOrigin
from recipe.compat import UNBOUNDED, dtype_argument, positions_of
from recipe.console import log
from recipe.data.column_names import TYPE_IDS
from recipe.models import packed_encoders
from recipe.models.sources import tokenizers
from recipe.models.sources.origin import Origin, refuse_empty
from recipe.tasks.sentence_embedding.spec import SPECS

_SAME = {"truncate": "truncation", "dimensions": "truncate_dim"}
"""The names of parameters in TEI and its clients."""
TOKENS, VECTORS = "huggingface", "vectors"
"""The values of AMPHORA_ANSWERS: a vector for each token, as in Hugging Face's image, or one for
each text."""


@dataclass(frozen=True)
class Embedder(ServedTask):
    """A saved encoder that answers texts with a vector for each: the mean of its last hidden
    states, as sentence encoders are trained."""

    served = SPECS[0].served["sentence-similarity"]
    parameters = frozenset({"normalize", "truncate_dim"} | PARAMETERS)
    loaded: LoadedModel
    normalizes: bool = False
    """Whether vectors are normalized unless a request sets `normalize`."""
    shortened: int | None = None
    """The width of the vectors unless a request gives one; None: the whole width."""

    @property
    def width(self) -> int:
        """Return the numbers of a vector."""
        return self.loaded.width

    def encode(self, request: Request, texts: Sequence[str]) -> Request:
        """Return the tokens of each text."""
        return self.loaded.encode(request, texts)

    def rows(self, prepared: Sequence[Request]) -> list[list[torch.Tensor]]:
        """Return the vectors of each request's texts, at full width and not normalized."""
        return self.loaded.rows(prepared, Reading.MEAN)

    def prepare(self, request: Request) -> Request:
        request = request.renamed(_SAME)
        request = request.checked(self.parameters, "feature-extraction")
        compared = ranking.parts(request)
        if compared is not None:
            source, texts, ranked = compared
            if ranked:
                raise BadRequest(
                    'The model makes vectors: send {"source_sentence": ..., "sentences": [...]} '
                    "for the similarity of texts; ranking a query needs a cross-encoder."
                )
            values = [source, *texts]
        else:
            values = request.read(a_text)
            count, width = len(values), self.width
            width = min(width, request.parameters.get("truncate_dim", width))
            bounds.hold(Bound.ANSWER, count * width, f"{count:,} vectors of {width:,}")
        return self.encode(request, values)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request a vector for each text; of `{"source_sentence", "sentences"}` the
        cosine of each sentence's vector to the source's."""
        answers: list[Any] = []
        for prepared, rows in zip(requests, self.rows(requests), strict=True):
            parameters = prepared.parameters
            vectors = torch.stack(list(rows))  # [texts, width]
            if self.normalizes and "normalize" not in parameters:
                vectors = _normalized(vectors)
            width, most = parameters.get("truncate_dim"), vectors.shape[1]
            if width is not None and width > most:
                reason = (
                    f"The request asks for {width} dimensions, but the model's vectors have {most}."
                )
                answers.append(BadRequest(reason, "dimensions"))
                continue
            vectors = vectors[:, : width or self.shortened]
            if parameters.get("normalize"):
                vectors = _normalized(vectors)
            if ranking.parts(prepared) is not None:
                source, *others = [_normalized(vector) for vector in vectors]
                answers.append(prepared.answer([float(source @ other) for other in others]))
            else:
                answers.append(prepared.answer([vector.tolist() for vector in vectors]))
        return answers


@dataclass(frozen=True)
class SentenceVectors(Embedder):
    """A SentenceTransformer that many requests share."""

    parameters = frozenset({"normalize", "prompt", "prompt_name", "truncate_dim", "truncation",
                            "truncation_direction"})  # fmt: skip
    model: Any = None

    @classmethod
    def load(cls, origin: Origin, environ: Mapping[str, str] = os.environ) -> SentenceVectors:
        """Load the SentenceTransformer that `origin` names.

        Raises:
            ModelError: It cannot be loaded, does not return a vector for a text, or the device
                cannot compute it.
            ValueError: AMPHORA_DTYPE is an unsupported precision, or AMPHORA_BUCKETS is invalid.
        """
        kind, name, dtype = precision.chosen(environ)
        is_static = kind in programs.DEVICES
        options = {**dtype_argument(dtype), **(programs.ATTENTION if is_static else {})}
        model = weights.read_sentences(origin, "cpu" if is_static else kind, options)
        encoder = model[0].auto_model
        # RoBERTa's positions begin after the padding index: 512 of 514 are usable.
        model.max_seq_length = min(model.max_seq_length or UNBOUNDED, positions_of(encoder))
        if not is_static:
            packed_encoders.patch_forward_for_lengths(encoder)
        # Dense layers are loaded separately, in float32.
        model = model.to(dtype).eval()
        weights.refuse_broken(model, origin)
        first = (origin.sentence_modules or [{}])[0].get("path", "")
        if not origin.adapter:
            refuse_empty(model.tokenizer, str(Path(origin.location) / first))
        tokenizers.log_replacement(model.tokenizer)
        shown = ", ".join(type(module).__name__ for module in model)
        log(
            f"model: SentenceTransformer ({shown}) on {kind} in {name}, {model.max_seq_length} "
            "tokens at most"
        )
        normalizes, limit = _leave_out_normalize(model), int(model.max_seq_length)

        def read_exactly() -> LoadedModel:
            exact = weights.read_sentences(
                origin, encoder.device.type, dtype_argument(torch.float32)
            )
            return loading.wrap_model(exact[0].auto_model.eval(), model.tokenizer, limit).alone()

        loaded = loading.laid_out(
            loading.wrap_model(encoder, model.tokenizer, limit), origin, kind, AutoModel,
            Pooling(list(model)[1:]), environ, read_exactly,
        )  # fmt: skip
        loaded = replace(loaded, positions=0)  # no request may exceed the model's length
        return cls(loaded, normalizes=normalizes, shortened=model.truncate_dim, model=model)

    @classmethod
    def adapt(
        cls, origin: HostedOrigin, environ: Mapping[str, str] = os.environ
    ) -> SentenceVectors:
        """Load an adapter of the served encoder, with the modules and prompts in its folder. Raise
        ModelError if it does not fit."""
        shared = origin.shared
        tokenizer = copy.copy(shared.loaded.tokenizer)  # for its own length
        tokenizer.model_max_length = shared.max_length(origin)
        model = weights.surround(shared.sentences, origin, tokenizer)
        normalizes, parts = _leave_out_normalize(model), nn.ModuleList(list(model)[1:])
        weights.refuse_broken(parts.to(shared.loaded.model.dtype), origin)
        loaded = replace(loading.load(origin, AutoModel, environ, Pooling([*parts])), positions=0)
        return cls(loaded, normalizes=normalizes, shortened=model.truncate_dim, model=model)

    @property
    def width(self) -> int:
        return int(self.model.get_embedding_dimension() or 0)

    def encode(self, request: Request, texts: Sequence[str]) -> Request:
        """Tokenize each text after its prompt, as the library does.

        Raises:
            BadRequest: The model does not have the `prompt_name`, a prompt is named twice, or a
                text is too long and may not be truncated.
        """
        name, prompts = request.parameters.get("prompt_name"), self.model.prompts
        if name is not None and "prompt" in request.parameters:
            raise BadRequest("prompt and prompt_name are both given. Give one.")
        if name is not None and name not in prompts:
            known = f"has {', '.join(sorted(prompts))}" if prompts else "has none"
            raise BadRequest(f"The prompt_name {name!r} is not one of the model, which {known}.")
        named = prompts.get(name or self.model.default_prompt_name or "", "")
        prompt = str(request.parameters.get("prompt", named))
        # If the prompt fills the model's length, no token of the text is read.
        bounds.hold_text(prompt)
        takes_types = TYPE_IDS in inspect.signature(self.loaded.model.forward).parameters

        def tokenize(texts: Sequence[str], limit: int) -> list[TokenRow]:
            heads = [bounds.beginning(self.tokenizer, text, limit) for text in texts]
            # The library pads all texts of a call to the longest one.
            tokens: dict[str, Any] = self.model.preprocess(
                [head[len(prompt) :] for head in heads], prompt=prompt
            )
            first = None if self.model[1].include_prompt else tokens.get("prompt_length")
            rows = []
            for index, is_real in enumerate(tokens["attention_mask"].bool()):
                ids = tokens["input_ids"][index][is_real].tolist()
                types = None
                if takes_types and TYPE_IDS in tokens:
                    types = tokens[TYPE_IDS][index][is_real].tolist()
                keep = None if first is None else list(range(int(first), len(ids)))
                rows.append(TokenRow(ids, types, keep))
            return rows

        return self.loaded.encode(request, texts, prompt, tokenize=tokenize)

    def rows(self, prepared: Sequence[Request]) -> list[list[torch.Tensor]]:
        """Return the vectors. Texts whose pooling leaves out as many tokens of a prompt are
        computed together."""
        alike: dict[int | None, list[TokenRow]] = {}
        for row in (row for some in prepared for row in some.work):
            alike.setdefault(_prompt_length(row), []).append(row)
        vectors = {
            length: iter(self.loaded.forward(rows, Pooling(list(self.model)[1:], length)))
            for length, rows in alike.items()
        }
        return [[next(vectors[_prompt_length(row)]) for row in some.work] for some in prepared]


def _prompt_length(row: TokenRow) -> int | None:
    """Return how many tokens at the beginning of a row are not pooled; None if all are."""
    return None if row.keep is None else len(row.ids) - len(row.keep)


@dataclass(frozen=True)
class TokenFeatures(ServedTask):
    """A saved encoder that answers texts with the last hidden state of each of their tokens, but
    no client's API, in which a text has one vector."""

    served = replace(SPECS[0].served["feature-extraction"], routes=())
    loaded: LoadedModel

    def prepare(self, request: Request) -> Request:
        request = request.renamed({"truncate": "truncation"})
        known = {"truncation", "truncation_direction", "max_length"}
        request = request.checked(known, "feature-extraction")
        prepared = self.loaded.encode(request, request.read(a_text))
        tokens, width = prepared.tokens, self.loaded.width
        bounds.hold(Bound.ANSWER, tokens * width, f"{tokens:,} tokens, a vector of {width:,} each")
        return prepared

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request a matrix of [1, tokens, hidden size] for each text, special
        tokens included, as transformers' pipeline answers; of a text in no list that matrix alone.
        """
        answers: list[Any] = []
        for some, states in zip(requests, self.loaded.rows(requests, Reading.TOKENS), strict=True):
            matrices = []
            for state in states:
                turns.pause()
                matrices.append([state.tolist()])
            answers.append(some.answer(matrices, single=some.single))
        return answers


def _leave_out_normalize(model: Any) -> bool:
    """Remove the last module of a SentenceTransformer if it normalizes, which a request may turn
    off. Return whether it did."""
    normalizes = type(model[-1]).__name__ == "Normalize"
    if normalizes:
        model.pop(-1)
    return normalizes


def _normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def load_vectors(origin: Origin) -> Embedder:
    """Load an encoder that returns a vector for each text. If sentence-transformers saved it, the
    vectors are those of that library."""
    if Origin(origin.holder("modules.json"), origin.options).sentence_modules:
        if isinstance(origin, HostedOrigin):
            return SentenceVectors.adapt(origin)
        return SentenceVectors.load(origin)
    return Embedder(loading.load(origin, AutoModel, reading=Reading.MEAN))


def load_features(
    origin: Origin, environ: Mapping[str, str] = os.environ
) -> Embedder | TokenFeatures:
    """Load an encoder for vectors of texts or of tokens, by AMPHORA_ANSWERS.

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
