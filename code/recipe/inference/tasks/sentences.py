"""Models that sentence-transformers has saved: its own modules compute their vectors (pooling,
dense layers, normalisation, prompts, the longest text)."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.compat import attend_fully, in_precision, new_weights, positions_of
from recipe.data.column_names import TYPE_IDS
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.inference import bounds, loaded_model, packed_rows, precision, turns
from recipe.inference.bounds import Bound
from recipe.inference.engines import choice as engines
from recipe.inference.engines.batches import PaddedRows
from recipe.inference.loaded_model import BATCH, LoadedModel
from recipe.inference.packed_rows import PackedRows
from recipe.inference.payloads import BadRequest, Request
from recipe.inference.rows import Coming, TokenRow, Values, lay_out, sent
from recipe.inference.saved import weights
from recipe.inference.saved.origin import Origin, refuse_empty
from recipe.inference.static import programs as static
from recipe.inference.static.buckets import Buckets
from recipe.inference.static.programs import Programs
from recipe.models import packed_encoders

_AFTER_POOLING = {"Dense", "Normalize", "LayerNorm", "Dropout"}
"""Modules that read the pooled vector alone."""


@dataclass(frozen=True)
class SentenceVectors:
    """A SentenceTransformer that many requests share."""

    model: Any
    packed: PackedRows | PaddedRows | None = None
    """How texts share a row end to end, or a call of OpenVINO's; None if the library pads them."""
    programs: Programs | None = None
    """What computes on a device that compiles a program for each shape; None on others."""
    parameters: frozenset[str] = frozenset(
        {"normalize", "prompt", "prompt_name", "truncate_dim", "truncation"}
    )
    columns: tuple[str, ...] = ()

    @classmethod
    def load(cls, origin: Origin, environ: Mapping[str, str] = os.environ) -> SentenceVectors:
        """The SentenceTransformer that `origin` names, in the precision that is fastest here.

        Raises:
            ModelError: It cannot be loaded, does not make a vector of a text, or the device is one
                that cannot compute it.
            ValueError: AMPHORA_DTYPE names a precision that it does not have, or AMPHORA_BUCKETS
                shapes.
        """
        from sentence_transformers import SentenceTransformer

        kind, name, dtype = precision.chosen(environ)
        if name == "int8":
            raise ValueError("AMPHORA_DTYPE is 'int8', which sentence-transformers has not here.")
        try:
            is_static = kind in static.DEVICES
            model = SentenceTransformer(
                origin.place,
                device="cpu" if is_static else kind,
                model_kwargs={**in_precision(dtype), **(static.ATTENTION if is_static else {})},
                **origin.options,
            )
        except UNLOADABLE as error:
            raise ModelError(
                f"The sentence-transformers model {origin.place} cannot be loaded: "
                f"{why_unloadable(error)}",
                "It needs every file that its save_pretrained wrote.",
            ) from error
        encoder = getattr(model[0], "auto_model", None)
        if isinstance(encoder, PreTrainedModel):
            new_weights.check_layers(origin.place, encoder, new_weights.of_encoder(encoder))
            attend_fully(encoder)
        # Dense layers are loaded apart, in float32.
        model = model.to(dtype).eval()
        weights.refuse_broken(model, origin)
        turns.pause_before_calls(model[0])
        if not hasattr(model.tokenizer, "vocab_files_names"):
            reader = type(model.tokenizer).__name__
            raise ModelError(
                f"The first module of {origin.place} reads texts by a {reader}.",
                "These handlers serve models that begin with a transformer: bring an inference.py.",
            )
        first = (origin.sentence_modules or [{}])[0].get("path", "")
        refuse_empty(model.tokenizer, str(Path(origin.place) / first))
        modules = ", ".join(type(module).__name__ for module in model)
        print(
            f"model: SentenceTransformer ({modules}) on {kind} in {name}, "
            f"{model.max_seq_length} tokens at most",
            flush=True,
        )
        if is_static:
            return cls(model, programs=_programs(model, kind, environ))
        if _is_openvinos(model):
            return cls(model, PaddedRows(_longest(model)))
        packed = _laid_out(model, environ)
        if packed is None and isinstance(encoder, PreTrainedModel):
            packed_encoders.take_lengths(encoder)
        return cls(model, packed)

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        get: Any = getattr(self.model, "get_embedding_dimension", None)
        # Versions before 5.3 know the older name only.
        return int((get or self.model.get_sentence_embedding_dimension)() or 0)

    def count(self, request: Request) -> list[int]:
        """Tokens of each text with its prompt; what is longer than the model reads is noted.

        Raises:
            BadRequest: The model does not have the `prompt_name`, a prompt is named twice, or a
                text is too long and is not to be cut.
        """
        if request.token_ids is None:
            name, prompts = request.parameters.get("prompt_name"), self.model.prompts
            if name is not None and "prompt" in request.parameters:
                raise BadRequest("prompt and prompt_name are both there. Give one.")
            if name is not None and name not in prompts:
                known = f"has {', '.join(sorted(prompts))}" if prompts else "has none"
                raise BadRequest(
                    f"The prompt_name {name!r} is not one of the model, which {known}."
                )
            prompt = self._prompt(request.parameters)
            tokenizer, limit = self.model.tokenizer, self.model.max_seq_length or 1 << 30
            bounds.hold(Bound.ROWS, len(request.texts))
            # Of a prompt that fills what is read, nothing else would be read.
            bounds.hold_text(prompt)
            request.token_ids, heads, read = [], [], 0
            for piece in bounds.pieces(request.texts, len(prompt)):
                some = [
                    bounds.beginning(tokenizer, prompt + text, limit)
                    for text in request.texts[piece.start : piece.stop]
                ]
                heads += [text[len(prompt) :] for text in some]
                request.token_ids += tokenizer(some, verbose=False)["input_ids"]
                read += sum(min(limit, len(ids)) for ids in request.token_ids[piece.start :])
                bounds.hold(Bound.READ, read)
            request.texts = heads
            request.keep_those_with_tokens(request.token_ids)
            lengths = [len(ids) for ids in request.token_ids]
            request.truncated = [place for place, n in enumerate(lengths) if n > limit]
            loaded_model.refuse_uncut(request, limit)
            request.token_ids = [ids[:limit] for ids in request.token_ids]
        return [len(ids) for ids in request.token_ids]

    def rows(self, requests: Sequence[Request]) -> list[list[torch.Tensor]]:
        """What `SentenceTransformer.encode` makes of each text: requests of equal parameters go
        through the model together."""
        alike: dict[str, list[Request]] = {}
        for request in requests:
            self.count(request)
            alike.setdefault(json.dumps(request.parameters, sort_keys=True), []).append(request)
        rows: dict[int, list[torch.Tensor]] = {}
        for group in alike.values():
            texts = [text for request in group for text in request.texts]
            vectors = iter(Coming(Values(self.encode(texts, group[0].parameters))).wait())
            rows |= {id(request): [next(vectors) for _ in request.texts] for request in group}
        return [rows[id(request)] for request in requests]

    def encode(self, texts: Sequence[str], parameters: Mapping[str, Any]) -> torch.Tensor:
        """The vectors [texts, width] of texts, all with a request's parameters."""
        if self.programs is not None:
            tokens = self.model.preprocess(list(texts), prompt=self._prompt(parameters))
            vectors = self.programs.values(_rows(self.model, tokens))
            return self._finished(torch.stack(vectors), parameters)
        if self.packed is not None:
            # A single text, too: the library's `encode` moves a model whose weights are not all on
            # one device, and those that are laid out for the CPU's kernels are on none.
            return self._encode_packed(self.packed, texts, parameters)
        encoded: torch.Tensor = self.model.encode(
            list(texts),
            batch_size=BATCH,
            show_progress_bar=False,
            convert_to_tensor=True,
            normalize_embeddings=parameters.get("normalize", False),
            prompt=parameters.get("prompt"),
            prompt_name=parameters.get("prompt_name"),
            truncate_dim=parameters.get("truncate_dim"),
        )
        return encoded

    @torch.inference_mode()
    def _encode_packed(
        self, packed: PackedRows | PaddedRows, texts: Sequence[str], parameters: Mapping[str, Any]
    ) -> torch.Tensor:
        """The same, without the library's padding: it makes the texts' tokens, and vectors of the
        tokens' states."""
        prompt = self._prompt(parameters)
        rows: list[TokenRow] = []
        for piece in bounds.pieces(texts, len(prompt)):
            # The library pads all of a call to its longest text.
            tokens = self.model.preprocess(list(texts[piece.start : piece.stop]), prompt=prompt)
            rows += _rows(self.model, tokens)
        parts, order, tokens_of = [], [], [len(row.ids) for row in rows]
        for places in packed.cuts(tokens_of):
            together = [rows[place] for place in places]
            states, lengths = packed.states(self.model[0].auto_model, together)
            starts = torch.tensor([0, *lengths.cumsum()], dtype=torch.int32)
            # As the library gives its pooling what flash attention has computed without padding.
            features = {
                "token_embeddings": states[None],
                "cu_seq_lens_q": sent(starts, states.device),
            }
            if "prompt_length" in tokens:
                features["prompt_length"] = tokens["prompt_length"]
            for module in list(self.model)[1:]:
                features = module(features)
            parts.append(features["sentence_embedding"])
            order += places
            turns.pause()
        back = torch.tensor(order).argsort()
        return self._finished(torch.cat(parts)[sent(back, parts[0].device)], parameters)

    def _finished(self, vectors: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
        """The vectors as a request's parameters want them: shortened, of length 1."""
        width = parameters.get("truncate_dim") or self.model.truncate_dim
        is_normal = parameters.get("normalize", False)
        shortened = vectors[:, :width]
        return torch.nn.functional.normalize(shortened, dim=1) if is_normal else shortened

    def _prompt(self, parameters: Mapping[str, Any]) -> str:
        """What stands before each text of a request with these parameters."""
        name = parameters.get("prompt_name") or self.model.default_prompt_name or ""
        return str(parameters.get("prompt", self.model.prompts.get(name, "")))


def _rows(model: Any, tokens: Mapping[str, Any]) -> list[TokenRow]:
    """What the library has made of texts, without its padding; each keeps the tokens that are
    pooled."""
    takes_types = TYPE_IDS in inspect.signature(model[0].auto_model.forward).parameters
    has_types = takes_types and TYPE_IDS in tokens
    rows = [
        TokenRow(
            tokens["input_ids"][place][is_real].tolist(),
            tokens[TYPE_IDS][place][is_real].tolist() if has_types else None,
        )
        for place, is_real in enumerate(tokens["attention_mask"].bool())
    ]
    if "prompt_length" not in tokens or model[1].include_prompt:
        return rows
    first = int(tokens["prompt_length"])
    return [replace(row, keep=list(range(first, len(row.ids)))) for row in rows]


def _programs(model: Any, kind: str, environ: Mapping[str, str]) -> Programs:
    """What computes a SentenceTransformer on a device that compiles a program for each shape.

    Raises:
        ModelError: It has modules of which that is not known, or answers otherwise there.
        ValueError: AMPHORA_BUCKETS has no such shapes.
    """
    encoder = getattr(model[0], "auto_model", None)
    if not _is_usual(model) or not isinstance(encoder, PreTrainedModel):
        names = ", ".join(type(module).__name__ for module in model)
        raise static.refused(kind, f"of its modules ({names}) shapes are not known")
    inputs = frozenset(inspect.signature(encoder.forward).parameters)

    def compute(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        taken = {name: tensor for name, tensor in batch.items() if name in inputs}
        states = encoder(**taken)[0]
        features = {"token_embeddings": states, "attention_mask": batch[static.POOLED]}
        for module in list(model)[1:]:
            features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    @torch.no_grad()
    def expected(row: TokenRow) -> torch.Tensor:
        features = {"input_ids": torch.tensor([row.ids])}
        features["attention_mask"] = torch.ones_like(features["input_ids"])
        if has_types:
            features[TYPE_IDS] = torch.zeros_like(features["input_ids"])
        vector: torch.Tensor = model(features)["sentence_embedding"][0].float()
        return vector

    has_types = TYPE_IDS in inputs and TYPE_IDS in model.tokenizer.model_input_names
    pad = model.tokenizer.pad_token_id or 0
    longest = _longest(model)
    layout = static.Layout(pad=pad, has_types=has_types, pools=True)
    buckets = Buckets.read(environ, longest)
    call = static.compiled(compute, kind, environ, len(buckets.shapes))
    programs = Programs(call, layout, buckets, kind)
    texts = ["d e f " * min(longest, 4096), "a b c"]
    first, second = (_rows(model, model.preprocess([text]))[0] for text in texts)
    prove = programs.prepare(first, second, expected, encoder.dtype)
    model.to(kind)
    prove()
    return programs


def _is_usual(model: Any) -> bool:
    """Whether its first module reads tokens, its second pools them, and others read what that
    gives."""
    names = [type(module).__name__ for module in model]
    return names[:2] == ["Transformer", "Pooling"] and set(names[2:]) <= _AFTER_POOLING


def _laid_out(model: Any, environ: Mapping[str, str]) -> PackedRows | None:
    """How the texts of a SentenceTransformer share a row, its weights laid out as kernels read
    them; None if the library is to pad them, or if its vectors would be others."""
    packed = _packing(model, environ)
    if packed is not None:
        served, texts = SentenceVectors(model, packed), ["a b c", "d " * 12]
        lay_out(model[0].auto_model, environ, lambda: list(served.encode(texts, {}).float()))
    return packed


def _longest(model: Any) -> int:
    """Return how many tokens of a text a SentenceTransformer's encoder reads at most."""
    return int(min(model.max_seq_length or 1 << 30, positions_of(model[0].auto_model)))


def _is_openvinos(model: Any) -> bool:
    """Return whether OpenVINO is to compute a SentenceTransformer's encoder.

    Raises:
        ModelError: AMPHORA_ENGINE is openvino, and it cannot.
    """
    encoder = getattr(model[0], "auto_model", None)
    if not _is_usual(model) or not isinstance(encoder, PreTrainedModel):
        names = ", ".join(type(module).__name__ for module in model)
        engines.refuse(f"the model's modules are {names}")
        return False
    inputs = frozenset(inspect.signature(encoder.forward).parameters)
    loaded = LoadedModel(
        model=encoder,
        tokenizer=model.tokenizer,
        max_length=_longest(model),
        inputs=inputs & {"input_ids", "attention_mask", TYPE_IDS},
    )
    return engines.Candidate.of(loaded).take()


def _packing(model: Any, environ: Mapping[str, str]) -> PackedRows | None:
    """How the texts of a SentenceTransformer share a row; None if the library is to pad them, or if
    its vectors would be others."""
    encoder = getattr(model[0], "auto_model", None)
    names = [type(module).__name__ for module in model]
    if not _is_usual(model) or not isinstance(encoder, PreTrainedModel):
        packed_rows.tell_padded(f"the model's modules are {', '.join(names)}", environ)
        return None
    inputs = frozenset(inspect.signature(encoder.forward).parameters)
    packed = PackedRows.of(encoder, "AutoModel", inputs, environ)
    texts = ["d " * 12, "a b c", "a b d", "d " * 11]
    return packed_rows.checked(
        encoder, packed, lambda how: list(SentenceVectors(model, how).encode(texts, {}).float())
    )
