"""Models that sentence-transformers has saved. Its modules tokenize texts and pool hidden states;
the encoder runs like any `LoadedModel`."""

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
from recipe.backend.loaded_model import LoadedModel, side_of
from recipe.backend.padded_rows import BATCH
from recipe.backend.requests.payloads import BadRequest, Inputs, Prepared, Request
from recipe.backend.rows import Pooling, TokenRow, to_device
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin, refuse_empty
from recipe.compat import UNBOUNDED, attend_fully, dtype_argument, new_weights, positions_of
from recipe.data.column_names import TYPE_IDS
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.models import packed_encoders
from recipe.tokenization.encoding import cutting

_AFTER_POOLING = {"Dense", "Normalize", "LayerNorm", "Dropout"}
"""Modules that read the pooled vector alone."""


@dataclass(frozen=True)
class SentenceVectors:
    """A SentenceTransformer that many requests share."""

    model: Any
    loaded: LoadedModel | None = None
    """The encoder; None if the library runs the model, since it has modules of other kinds."""
    parameters: frozenset[str] = frozenset(
        {
            "normalize",
            "prompt",
            "prompt_name",
            "truncate_dim",
            "truncation",
            "truncation_direction",
        }
    )
    columns: tuple[str, ...] = ()
    normalizes: bool = False
    """Whether the model ends in a Normalize, which `Embedder` applies."""

    @property
    def max_length(self) -> int:
        """Return how many tokens of a text are read."""
        return int(self.model.max_seq_length or UNBOUNDED)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer."""
        return self.model.tokenizer

    @classmethod
    def load(cls, origin: Origin, environ: Mapping[str, str] = os.environ) -> SentenceVectors:
        """Load the SentenceTransformer that `origin` names.

        Raises:
            ModelError: It cannot be loaded, does not return a vector for a text, or the device
                cannot compute it.
            ValueError: AMPHORA_DTYPE is an unsupported precision, or AMPHORA_BUCKETS is invalid.
        """
        from sentence_transformers import SentenceTransformer

        kind, name, dtype = precision.chosen(environ)
        try:
            is_static = kind in programs.DEVICES
            model = SentenceTransformer(
                origin.location,
                device="cpu" if is_static else kind,
                model_kwargs={**dtype_argument(dtype), **(programs.ATTENTION if is_static else {})},
                **origin.options,
            )
        except UNLOADABLE as error:
            raise ModelError(
                f"The sentence-transformers model {origin.location} cannot be loaded: "
                f"{why_unloadable(error)}",
                "It needs every file that its save_pretrained wrote.",
            ) from error
        inner = getattr(model[0], "auto_model", None)
        if isinstance(inner, PreTrainedModel):
            # RoBERTa's positions begin after the padding index: 512 of 514 are usable.
            model.max_seq_length = min(model.max_seq_length or UNBOUNDED, positions_of(inner))
            new_weights.check_layers(origin.location, inner, new_weights.missing_weights(inner))
            attend_fully(inner)
            if not is_static:
                packed_encoders.patch_forward_for_lengths(inner)
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
        print(
            f"model: SentenceTransformer ({_names(model)}) on {kind} in {name}, "
            f"{model.max_seq_length} tokens at most",
            flush=True,
        )
        # A request may set `normalize: false`, so the model must not run the last module.
        normalizes = type(model[-1]).__name__ == "Normalize"
        if normalizes:
            model.pop(-1)
        loaded = None
        if (encoder := _encoder_of(model)) is not None:
            longest = int(min(model.max_seq_length or UNBOUNDED, positions_of(encoder)))
            loaded = loading.laid_out(
                loading.wrap_model(encoder, model.tokenizer, longest), origin,
                kind, AutoModel, Pooling(list(model)[1:]), environ,
            )  # fmt: skip
        elif is_static:
            raise programs.refused(kind, f"of its modules ({_names(model)}) shapes are not known")
        else:
            turns.pause_before_calls(model[0])
        return cls(model, loaded, normalizes=normalizes)

    @property
    def shortened(self) -> int | None:
        """Return the width of the vectors unless a request gives one; None: the whole width."""
        width: int | None = self.model.truncate_dim
        return width

    @property
    def width(self) -> int:
        """Return the numbers of a vector."""
        get: Any = getattr(self.model, "get_embedding_dimension", None)
        # Versions before 5.3 only have the older name.
        return int((get or self.model.get_sentence_embedding_dimension)() or 0)

    def encode(self, request: Request, inputs: Inputs) -> Prepared:
        """Count the tokens of each text with its prompt. `work` has the encoded texts.

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
        tokenizer, limit = self.model.tokenizer, self.max_length
        side = side_of(request.parameters, tokenizer)
        bounds.hold(Bound.ROWS, len(inputs.values))
        # If the prompt fills the model's length, no token of the text is read.
        bounds.hold_text(prompt)
        heads: list[str] = []
        token_ids: list[list[int]] = []
        read = 0
        for piece in bounds.pieces(inputs.values, len(prompt)):
            with cutting(tokenizer, side):
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

    def rows(self, prepared: Sequence[Prepared]) -> list[list[torch.Tensor]]:
        """Return the vectors of each request's texts, at full width and not normalized. Requests
        with the same prompt are computed together."""
        alike: dict[tuple[str, str], list[Prepared]] = {}
        for some in prepared:
            side = side_of(some.parameters, self.model.tokenizer)
            key = self._prompt(some.parameters), side
            alike.setdefault(key, []).append(some)
        rows: dict[int, list[torch.Tensor]] = {}
        for group in alike.values():
            texts = [text for some in group for text in some.work]
            vectors = iter(self.vectors(texts, group[0].parameters))
            rows |= {id(some): [next(vectors) for _ in some.work] for some in group}
        return [rows[id(some)] for some in prepared]

    def vectors(
        self, texts: Sequence[str], parameters: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        """Return the vector [width] of each text, all with one request's prompt and side."""
        prompt = self._prompt(parameters)
        prompt_length: int | None = None
        vectors: list[torch.Tensor] = []
        rows: list[TokenRow] = []
        # Piece by piece, since the library pads all texts of a call to the longest one.
        for piece in bounds.pieces(texts, len(prompt)):
            with cutting(self.model.tokenizer, side_of(parameters, self.model.tokenizer)):
                some = list(texts[piece.start : piece.stop])
                tokens: dict[str, Any] = self.model.preprocess(some, prompt=prompt)
            if self.loaded is None:
                vectors.append(self._library_vectors(tokens))
            else:
                takes_types = TYPE_IDS in inspect.signature(self.loaded.model.forward).parameters
                has_types = takes_types and TYPE_IDS in tokens
                prompt_length = tokens.get("prompt_length")
                for index, is_real in enumerate(tokens["attention_mask"].bool()):
                    ids = tokens["input_ids"][index][is_real].tolist()
                    types = tokens[TYPE_IDS][index][is_real].tolist() if has_types else None
                    keep = None
                    if prompt_length is not None and not self.model[1].include_prompt:
                        keep = list(range(int(prompt_length), len(ids)))  # the positions to pool
                    rows.append(TokenRow(ids, types, keep))
        if self.loaded is None:
            return list(torch.cat(vectors).float().cpu())
        return self.loaded.forward(rows, Pooling(list(self.model)[1:], prompt_length))

    @torch.inference_mode()
    def _library_vectors(self, tokens: Mapping[str, Any]) -> torch.Tensor:
        """Return the vectors of padded texts, as the library's `encode` computes them."""
        lengths = tokens["attention_mask"].sum(1)
        order, parts = lengths.argsort(), []
        for indices in order.split(BATCH):
            longest = int(lengths[indices].max())
            batch = {
                name: value[indices][:, :longest].to(self.model.device)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in tokens.items()
            }
            parts.append(self.model(batch)["sentence_embedding"])
        back = order.argsort()
        return torch.cat(parts)[to_device(back, parts[0].device)]

    def _prompt(self, parameters: Mapping[str, Any]) -> str:
        """Return the text before each text of a request with these parameters."""
        name = parameters.get("prompt_name") or self.model.default_prompt_name or ""
        return str(parameters.get("prompt", self.model.prompts.get(name, "")))


def _encoder_of(model: Any) -> PreTrainedModel | None:
    """Return a SentenceTransformer's encoder if its first module reads tokens, its second pools
    them, and the others read the pooled vector; else None."""
    names = [type(module).__name__ for module in model]
    encoder = getattr(model[0], "auto_model", None)
    is_usual = names[:2] == ["Transformer", "Pooling"] and set(names[2:]) <= _AFTER_POOLING
    return encoder if is_usual and isinstance(encoder, PreTrainedModel) else None


def _names(model: Any) -> str:
    return ", ".join(type(module).__name__ for module in model)
