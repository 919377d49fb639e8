"""Feature extraction: a vector for each text or token, and the similarity of texts.

Of models that sentence-transformers has saved, its modules tokenize texts and pool hidden states;
the encoder runs like any `LoadedModel`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from recipe.backend import bounds, loaded_model, loading, precision, programs, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import PARAMETERS, LoadedModel, side_of
from recipe.backend.padded_rows import BATCH
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
from recipe.backend.rows import Pooling, Reading, TokenRow
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin, refuse_empty
from recipe.backend.served_task import ServedTask
from recipe.compat import UNBOUNDED, attend_fully, dtype_argument, new_weights, positions_of
from recipe.console import log
from recipe.data.column_names import TYPE_IDS
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.models import packed_encoders
from recipe.tasks.sentence_embedding.spec import SPECS
from recipe.tokenization.encoding import cutting

_SAME = {"truncate": "truncation", "dimensions": "truncate_dim"}
"""The names of parameters in TEI and its clients."""
TOKENS, VECTORS = "huggingface", "vectors"
"""The values of AMPHORA_ANSWERS: a vector for each token, as in Hugging Face's image, or one for
each text."""
_AFTER_POOLING = {"Dense", "Normalize", "LayerNorm", "Dropout"}
"""Modules that read the pooled vector alone."""


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
        """Return the vectors of each request's texts, at full width and not normalized."""
        return self.loaded.rows(prepared, Reading.MEAN)

    def prepare(self, request: Request) -> Prepared:
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
            inputs: Inputs = Ranking([source, *texts], texts=texts, ranked=False)
        else:
            inputs = request.read(self._text, self.columns)
            count, width = len(inputs.values), self.width
            width = min(width, request.parameters.get("truncate_dim", width))
            bounds.hold(Bound.ANSWER, count * width, f"{count:,} vectors of {width:,}")
        return self.encode(request, inputs)

    def _text(self, value: Any) -> str:
        """Return a text; token ids are decoded.

        Raises:
            BadRequest: It is neither, or the ids are not from the model's tokenizer: a model would
                answer any ids.
        """
        if not isinstance(value, TokenIds):
            return a_text(value)
        tokenizer = self.tokenizer
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
        for prepared, rows in zip(requests, self.rows(requests), strict=True):
            parameters = prepared.parameters
            vectors = torch.stack(list(rows))  # [texts, width]
            if self.normalizes and "normalize" not in parameters:
                vectors = _normalized(vectors)
            width = parameters.get("truncate_dim", self.shortened)
            if width is not None and width > (most := vectors.shape[1]):
                reason = (
                    f"The request asks for {width} dimensions, but the model's vectors have {most}."
                )
                answers.append(BadRequest(reason, "dimensions"))
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
class SentenceVectors(Embedder):
    """A SentenceTransformer that many requests share."""

    parameters = frozenset({"normalize", "prompt", "prompt_name", "truncate_dim", "truncation",
                            "truncation_direction"})  # fmt: skip
    columns = ()
    loaded: Any
    """The encoder; None if the library runs the model, since it has modules of other kinds."""
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
        model = library_model("SentenceTransformer", origin, "cpu" if is_static else kind, options)
        encoder = getattr(model[0], "auto_model", None)
        if isinstance(encoder, PreTrainedModel):
            # RoBERTa's positions begin after the padding index: 512 of 514 are usable.
            model.max_seq_length = min(model.max_seq_length or UNBOUNDED, positions_of(encoder))
            new_weights.check_layers(origin.location, encoder, new_weights.missing_weights(encoder))
            attend_fully(encoder)
            if not is_static:
                packed_encoders.patch_forward_for_lengths(encoder)
        # Dense layers are loaded separately, in float32.
        model = model.to(dtype).eval()
        weights.refuse_broken(model, origin)
        if not hasattr(model.tokenizer, "vocab_files_names"):
            reader = type(model.tokenizer).__name__
            raise ModelError(
                f"The first module of {origin.location} is a {reader}.",
                "These handlers serve models that begin with a transformer: bring an inference.py.",
            )
        first = (origin.sentence_modules or [{}])[0].get("path", "")
        refuse_empty(model.tokenizer, str(Path(origin.location) / first))
        parts = [type(module).__name__ for module in model]
        shown = ", ".join(parts)
        print(
            f"model: SentenceTransformer ({shown}) on {kind} in {name}, "
            f"{model.max_seq_length} tokens at most",
            flush=True,
        )
        # A request may set `normalize: false`, so the model must not run the last module.
        normalizes = parts[-1] == "Normalize"
        if normalizes:
            model.pop(-1)
        loaded = None
        is_usual = parts[:2] == ["Transformer", "Pooling"] and set(parts[2:]) <= _AFTER_POOLING
        if is_usual and isinstance(encoder, PreTrainedModel):
            loaded = loading.laid_out(
                loading.wrap_model(encoder, model.tokenizer, int(model.max_seq_length)), origin,
                kind, AutoModel, Pooling(list(model)[1:]), environ,
            )  # fmt: skip
        elif is_static:
            raise programs.refused(kind, f"of its modules ({shown}) shapes are not known")
        else:
            turns.pause_before_calls(model[0])
        return cls(loaded, normalizes=normalizes, shortened=model.truncate_dim, model=model)

    @property
    def max_length(self) -> int:
        return int(self.model.max_seq_length or UNBOUNDED)

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def width(self) -> int:
        return int(self.model.get_embedding_dimension() or 0)

    def encode(self, request: Request, inputs: Inputs) -> Prepared:
        """Count the tokens of each text with its prompt.

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
        prompt = self._prompt(request.parameters)
        return encode_beginnings(self.tokenizer, self.max_length, request, inputs, prompt)

    def rows(self, prepared: Sequence[Prepared]) -> list[list[torch.Tensor]]:
        """Return the vectors, those of requests with the same prompt computed together."""
        alike: dict[tuple[str, str], list[Prepared]] = {}
        for some in prepared:
            key = self._prompt(some.parameters), side_of(some.parameters, self.tokenizer)
            alike.setdefault(key, []).append(some)
        rows: dict[int, list[torch.Tensor]] = {}
        for (prompt, side), group in alike.items():
            texts = [text for some in group for text in some.work]
            vectors = iter(self._vectors(texts, prompt, side))
            rows |= {id(some): [next(vectors) for _ in some.work] for some in group}
        return [rows[id(some)] for some in prepared]

    def _vectors(self, texts: list[str], prompt: str, side: str) -> Sequence[torch.Tensor]:
        """Return the vector [width] of each text after a prompt, truncated on a side."""
        if self.loaded is None:
            with cutting(self.tokenizer, side):
                vectors: torch.Tensor = self.model.encode(
                    texts, prompt=prompt, batch_size=BATCH, show_progress_bar=False,
                    convert_to_tensor=True, truncate_dim=UNBOUNDED,
                )  # fmt: skip
            return list(vectors.float().cpu())
        takes_types = TYPE_IDS in inspect.signature(self.loaded.model.forward).parameters
        prompt_length: int | None = None
        rows: list[TokenRow] = []
        # Piece by piece, since the library pads all texts of a call to the longest one.
        for piece in bounds.pieces(texts, len(prompt)):
            with cutting(self.tokenizer, side):
                tokens: dict[str, Any] = self.model.preprocess(
                    texts[piece.start : piece.stop], prompt=prompt
                )
            prompt_length = tokens.get("prompt_length")
            for index, is_real in enumerate(tokens["attention_mask"].bool()):
                ids = tokens["input_ids"][index][is_real].tolist()
                types = None
                if takes_types and TYPE_IDS in tokens:
                    types = tokens[TYPE_IDS][index][is_real].tolist()
                keep = None
                if prompt_length is not None and not self.model[1].include_prompt:
                    keep = list(range(int(prompt_length), len(ids)))  # the positions to pool
                rows.append(TokenRow(ids, types, keep))
        results: list[torch.Tensor] = self.loaded.forward(
            rows, Pooling(list(self.model)[1:], prompt_length)
        )
        return results

    def _prompt(self, parameters: Mapping[str, Any]) -> str:
        """Return the text before each text of a request with these parameters."""
        name = parameters.get("prompt_name") or self.model.default_prompt_name or ""
        return str(parameters.get("prompt", self.model.prompts.get(name, "")))


def encode_beginnings(
    tokenizer: Any, limit: int, request: Request, inputs: Inputs, prompt: str = ""
) -> Prepared:
    """Count the tokens of each text, which a library tokenizes again. `work` has the beginnings of
    the texts that determine the tokens.

    Args:
        limit: How many tokens are read.
        request: Sets the side on which texts are truncated.
        prompt: The text before each text.

    Raises:
        BadRequest: A text is too long and may not be truncated.
    """
    bounds.hold(Bound.ROWS, len(inputs.values))
    # If the prompt fills the model's length, no token of the text is read.
    bounds.hold_text(prompt)
    heads: list[str] = []
    token_ids: list[list[int]] = []
    read = 0
    for piece in bounds.pieces(inputs.values, len(prompt)):
        with cutting(tokenizer, side_of(request.parameters, tokenizer)):
            some = [
                bounds.beginning(tokenizer, prompt + text, limit)
                for text in inputs.values[piece.start : piece.stop]
            ]
        heads += [text[len(prompt) :] for text in some]
        token_ids += tokenizer(some, verbose=False)["input_ids"]
        read += sum(min(limit, len(ids)) for ids in token_ids[piece.start :])
        bounds.hold(Bound.READ, read)
    inputs = inputs.with_tokens(request, token_ids)
    heads = [head for head, ids in zip(heads, token_ids, strict=True) if ids]
    lengths = [len(ids) for ids in token_ids if ids]
    truncated = [index for index, length in enumerate(lengths) if length > limit]
    loaded_model.refuse_uncut(request, truncated, limit)
    sizes = [min(limit, length) for length in lengths]
    return Prepared(
        request=request, inputs=inputs, sizes=sizes, tokens=sum(sizes), truncated=truncated,
        work=heads,
    )  # fmt: skip


def library_model(kind: str, origin: Origin, device: str, options: Mapping[str, Any]) -> Any:
    """Load the model of a class of sentence-transformers that `origin` names.

    Args:
        kind: The name of the class.
        options: Keyword arguments with which transformers loads its encoder.

    Raises:
        ModelError: It cannot be loaded, or the installed library has no such class.
    """
    import sentence_transformers

    model_class = getattr(sentence_transformers, kind, None)
    if model_class is None:
        raise ModelError(
            f"{origin.location} is a {kind}, which sentence-transformers "
            f"{sentence_transformers.__version__} does not have.",
            "Serve it by the image with the current transformers.",
        )
    try:
        return model_class(origin.location, device=device, model_kwargs=options, **origin.options)
    except (*UNLOADABLE, KeyError, TypeError) as error:
        raise ModelError(
            f"The {kind} {origin.location} cannot be loaded: {why_unloadable(error)}",
            "It needs every file that its save_pretrained wrote.",
        ) from error


@dataclass(frozen=True)
class TokenFeatures(ServedTask):
    """A saved encoder that answers texts with the last hidden state of each of their tokens."""

    served = SPECS[0].served["feature-extraction"]
    loaded: LoadedModel

    @property
    def embedder(self) -> Embedder:
        """Return the embedder that answers clients' APIs, which have text vectors only."""
        return Embedder(self.loaded)

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
    """Load an encoder that returns a vector for each text. If sentence-transformers saved it, the
    vectors are those of that library."""
    if origin.sentence_modules:
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
