"""Models that sentence-transformers has saved: its own modules compute their vectors (pooling,
dense layers, normalisation, prompts, the longest text)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.backend import bounds, loaded_model, packed_rows, precision, turns
from recipe.backend.bounds import Bound
from recipe.backend.engines import conversion
from recipe.backend.engines.batches import PaddedRows
from recipe.backend.engines.graph import Forward
from recipe.backend.loaded_model import BATCH, side_of
from recipe.backend.packed_rows import PackedRows
from recipe.backend.requests.payloads import BadRequest, Request
from recipe.backend.rows import (
    Coming,
    Reading,
    TokenRow,
    Values,
    lay_out,
    of_padded,
    padded,
    sent,
)
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin, refuse_empty
from recipe.backend.static import programs as static
from recipe.backend.static.buckets import Buckets
from recipe.backend.static.programs import Programs
from recipe.compat import UNBOUNDED, attend_fully, in_precision, new_weights, positions_of
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
    packed: PackedRows | PaddedRows | None = None
    """How texts share a row end to end, or a call of OpenVINO's; None if the library pads them."""
    programs: Programs | None = None
    """What computes on a device that compiles a program for each shape; None on others."""
    engine: Forward | None = None
    """OpenVINO's graph of the encoder; None: PyTorch computes it."""
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
    """Whether the model ends in a Normalize, which is left to what finishes the vectors."""

    @property
    def max_length(self) -> int:
        """How many tokens of a text are read."""
        return int(self.model.max_seq_length or UNBOUNDED)

    @property
    def tokenizer(self) -> Any:
        """What makes tokens of texts."""
        return self.model.tokenizer

    @property
    def prompts(self) -> Mapping[str, str]:
        """What may stand before texts, by its names."""
        prompts: Mapping[str, str] = self.model.prompts
        return prompts

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
        print(
            f"model: SentenceTransformer ({_names(model)}) on {kind} in {name}, "
            f"{model.max_seq_length} tokens at most",
            flush=True,
        )
        # A request may say `normalize: false`, so that the last module is not for the model to run.
        normalizes = type(model[-1]).__name__ == "Normalize"
        if normalizes:
            model.pop(-1)
        served = partial(cls, model, normalizes=normalizes)
        if is_static:
            return served(programs=_programs(model, kind, environ))
        if conversion.is_requested(environ):
            return served(PaddedRows(_longest(model)), engine=_by_openvino(model))
        packed = _laid_out(model, environ)
        if packed is None and isinstance(encoder, PreTrainedModel):
            packed_encoders.take_lengths(encoder)
        return served(packed)

    @property
    def shortened(self) -> int | None:
        """How many numbers of a vector are given unless a request says."""
        width: int | None = self.model.truncate_dim
        return width

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
            tokenizer, limit = self.model.tokenizer, self.max_length
            side = side_of(request.parameters)
            bounds.hold(Bound.ROWS, len(request.texts))
            # Of a prompt that fills what is read, nothing else would be read.
            bounds.hold_text(prompt)
            request.token_ids, heads, read = [], [], 0
            for piece in bounds.pieces(request.texts, len(prompt)):
                with cutting(tokenizer, side):
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
        """What the model makes of each text, not shortened and not normalized at the end: requests
        of one prompt go through the model together."""
        alike: dict[tuple[str, str], list[Request]] = {}
        for request in requests:
            self.count(request)
            asked = self._prompt(request.parameters), side_of(request.parameters)
            alike.setdefault(asked, []).append(request)
        rows: dict[int, list[torch.Tensor]] = {}
        for group in alike.values():
            texts = [text for request in group for text in request.texts]
            vectors = iter(Coming(Values(self.encode(texts, group[0].parameters))).wait())
            rows |= {id(request): [next(vectors) for _ in request.texts] for request in group}
        return [rows[id(request)] for request in requests]

    def states(self, request: Request) -> list[torch.Tensor]:
        """The last hidden state of each token of each text, before they are pooled.

        Raises:
            BadRequest: The device computes whole vectors only.
        """
        if self.programs is not None:
            raise BadRequest("The vectors of tokens are not computed on this device.")
        self.count(request)
        rows = [
            replace(row, keep=None)
            for tokens in self._tokens(request.texts, request.parameters)
            for row in _rows(self.model, tokens)
        ]
        encoder = self.model[0].auto_model
        states: list[torch.Tensor] = []
        for start in range(0, len(rows), BATCH):
            some = rows[start : start + BATCH]
            longest = max(len(row.ids) for row in some)
            batch = padded(some, longest, self.tokenizer.pad_token_id or 0, encoder.device)
            states += self._states(encoder, batch, some)
            turns.pause()
        return states

    @torch.inference_mode()
    def _states(
        self, encoder: Any, batch: dict[str, torch.Tensor], rows: Sequence[TokenRow]
    ) -> list[torch.Tensor]:
        values = of_padded(Reading.TOKENS, encoder(**batch), batch["attention_mask"], rows)
        return Coming(values).wait()

    def encode(self, texts: Sequence[str], parameters: Mapping[str, Any]) -> torch.Tensor:
        """The vectors [texts, width] of texts, all with a request's prompt and side."""
        if self.programs is None and self.packed is None:
            # The library's `encode` does this for each batch, which then has its own turn.
            return torch.cat(
                [self._encode_padded(some) for some in self._tokens(texts, parameters)]
            )
        rows: list[TokenRow] = []
        prompt_length = None
        for tokens in self._tokens(texts, parameters):
            rows += _rows(self.model, tokens)
            prompt_length = tokens.get("prompt_length")
        if self.programs is not None:
            return torch.stack(self.programs.values(rows))
        assert self.packed is not None
        return self._encode_packed(self.packed, rows, prompt_length)

    @torch.inference_mode()
    def _encode_padded(self, tokens: Mapping[str, Any]) -> torch.Tensor:
        """The vectors of texts that are padded, as the library's own `encode` computes them."""
        lengths = tokens["attention_mask"].sum(1)
        order, parts = lengths.argsort(), []
        for places in order.split(BATCH):
            longest = int(lengths[places].max())
            batch = {
                name: value[places][:, :longest].to(self.model.device)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in tokens.items()
            }
            parts.append(self.model(batch)["sentence_embedding"])
        back = order.argsort()
        return torch.cat(parts)[sent(back, parts[0].device)]

    @torch.inference_mode()
    def _encode_packed(
        self, packed: PackedRows | PaddedRows, rows: Sequence[TokenRow], prompt_length: Any
    ) -> torch.Tensor:
        """The same, without the library's padding, of what it has made of the texts."""
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
            if prompt_length is not None:
                features["prompt_length"] = prompt_length
            for module in list(self.model)[1:]:
                features = module(features)
            parts.append(features["sentence_embedding"])
            order += places
            turns.pause()
        back = torch.tensor(order).argsort()
        return torch.cat(parts)[sent(back, parts[0].device)]

    def _tokens(
        self, texts: Sequence[str], parameters: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """What the library makes of texts for its model, piece by piece: it pads all of a call to
        its longest text."""
        prompt = self._prompt(parameters)
        for piece in bounds.pieces(texts, len(prompt)):
            with cutting(self.model.tokenizer, side_of(parameters)):
                some = list(texts[piece.start : piece.stop])
                tokens: dict[str, Any] = self.model.preprocess(some, prompt=prompt)
            yield tokens

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
    if (encoder := _encoder_of(model)) is None:
        raise static.refused(kind, f"of its modules ({_names(model)}) shapes are not known")
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
    call = static.compiled(compute, kind, len(buckets.shapes))
    programs = Programs(call, layout, buckets, kind)
    texts = ["d e f " * min(longest, 4096), "a b c"]
    first, second = (_rows(model, model.preprocess([text]))[0] for text in texts)
    prove = programs.prepare(first, second, expected, encoder.dtype)
    model.to(kind)
    prove()
    return programs


def _encoder_of(model: Any) -> PreTrainedModel | None:
    """Return a SentenceTransformer's encoder if its first module reads tokens, its second pools
    them, and others read what that gives; else None."""
    names = [type(module).__name__ for module in model]
    encoder = getattr(model[0], "auto_model", None)
    is_usual = names[:2] == ["Transformer", "Pooling"] and set(names[2:]) <= _AFTER_POOLING
    return encoder if is_usual and isinstance(encoder, PreTrainedModel) else None


def _names(model: Any) -> str:
    return ", ".join(type(module).__name__ for module in model)


def _laid_out(model: Any, environ: Mapping[str, str]) -> PackedRows | None:
    """Return how the texts of a SentenceTransformer share a row, with its weights laid out as
    kernels read them; None if the library is to pad them, or if its vectors would be others."""
    if (encoder := _encoder_of(model)) is None:
        packed_rows.tell_padded(f"the model's modules are {_names(model)}", environ)
        return None

    def vectors(how: PackedRows | None, texts: Sequence[str]) -> list[torch.Tensor]:
        return list(SentenceVectors(model, how).encode(texts, {}).float())

    inputs = frozenset(inspect.signature(encoder.forward).parameters)
    several = ["d " * 12, "a b c", "a b d", "d " * 11]
    packed = packed_rows.checked(
        encoder,
        PackedRows.of(encoder, "AutoModel", inputs, environ),
        lambda how: vectors(how, several),
    )
    if packed is not None:
        lay_out(encoder, environ, lambda: vectors(packed, ["a b c", "d " * 12]))
    return packed


def _longest(model: Any) -> int:
    """Return how many tokens of a text a SentenceTransformer's encoder reads at most."""
    return int(min(model.max_seq_length or 1 << 30, positions_of(model[0].auto_model)))


def _by_openvino(model: Any) -> Forward:
    """Return what computes a SentenceTransformer's encoder by OpenVINO.

    Raises:
        ModelError: It cannot.
    """
    if (encoder := _encoder_of(model)) is None:
        raise conversion.refused(f"the model's modules are {_names(model)}")
    known = {"input_ids", "attention_mask", TYPE_IDS} & set(
        inspect.signature(encoder.forward).parameters
    )
    inputs = sorted(known - ({TYPE_IDS} - set(model.tokenizer.model_input_names)))
    return conversion.converted(encoder, inputs, _longest(model))
