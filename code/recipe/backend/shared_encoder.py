"""One encoder in memory that many LoRA adapters share.

A call computes the base's products for texts of several adapters together. After each linear layer
the low-rank products are added to the tokens of each adapter's texts, and each adapter's head reads
the states of its own texts. (`peft`'s mixed batches need the same head and padded rows; kernels for
many adapters, such as punica's, are for decoders on GPUs.)
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from recipe.backend import bounds
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import CallLayout, LoadedModel, PendingCalls
from recipe.backend.packed_rows import HEADS, PackedRows
from recipe.backend.rows import OutputKind, TokenRow, Values
from recipe.backend.saved import weights
from recipe.compat import dtype_argument
from recipe.compat.new_weights import unread_weights
from recipe.errors import ModelError, join_names
from recipe.models import sentence_encoders
from recipe.models.sources.lora_files import LoraFiles, LowRank
from recipe.models.sources.origin import Origin
from recipe.storage import checksums

Span = tuple[slice, Mapping[nn.Module, LowRank]]
"""Tokens of a call, and the products that are added to theirs."""
_AFTER_STATES = "pooler"
"""The only module of an encoder that reads its last hidden states, and so may differ."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class AdaptedModel(LoadedModel):
    """A model with an adapter: the shared encoder, the adapter's products and its head."""

    products: Mapping[nn.Module, LowRank]
    shared: SharedEncoder

    def call(self, layout: CallLayout, rows: Sequence[TokenRow], reading: OutputKind) -> Values:
        with self.shared.applied([(slice(None), self.products)]):
            return super().call(layout, rows, reading)


@dataclass(frozen=True)
class HostedOrigin(Origin):
    """An adapter's folder whose base is served already."""

    shared: SharedEncoder = field(kw_only=True)


class EncoderShare(NamedTuple):
    """Rows that one model computes in a call with others."""

    loaded: LoadedModel
    rows: Sequence[TokenRow]
    reading: OutputKind


def takes_adapters(environ: Mapping[str, str]) -> bool:
    """Return whether a served model may get adapters."""
    return environ.get("AMPHORA_ADAPTERS", "0").strip() not in ("", "0")


class SharedEncoder:
    """The encoder of a served model, to whose products adapters add theirs."""

    def __init__(self, loaded: LoadedModel, origin: Origin) -> None:
        """Raise ModelError if adapters cannot share the model."""
        why_not = ""
        if loaded.engine is not None:
            why_not = "CTranslate2 computes it in int8. Set AMPHORA_DTYPE to bfloat16 or float32"
        elif loaded.layout is not None and not isinstance(loaded.layout, PackedRows):
            why_not = "its device computes programs of fixed shapes"
        elif origin.base:
            why_not = "it is an adapter itself. Serve its base"
        if why_not:
            raise ModelError(f"The model {origin.location} takes no adapters: {why_not}.")
        if isinstance(loaded.layout, PackedRows):  # a graph has no adapter's products
            loaded = replace(loaded, layout=replace(loaded.layout, graphs=None, shapes=()))
        self.loaded = loaded
        self.origin = origin
        self.encoder: Any = loaded.model.base_model
        self._spans: Sequence[Span] = ()
        self._hooked = weakref.WeakSet[nn.Module]()
        self._tokenizers: set[str] = set()
        """Digests of files of tokenizers that read as the base's."""

    @contextlib.contextmanager
    def applied(self, spans: Sequence[Span]) -> Iterator[None]:
        """Add products to the tokens of a call, within the block; never pause in it."""
        self._spans = spans
        try:
            yield
        finally:
            self._spans = ()

    def _add(self, layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        pairs = [(tokens, products.get(layer)) for tokens, products in self._spans]
        adding = [(tokens, product) for tokens, product in pairs if product is not None]
        if not adding:
            return
        given = inputs[0].reshape(-1, inputs[0].shape[-1])
        total = outputs.view(-1, outputs.shape[-1])  # added to in place
        dtype = adding[0][1].down.dtype
        given = given.to(dtype)
        added = total if total.dtype is dtype else torch.zeros_like(total, dtype=dtype)
        for tokens, product in adding:
            product.add(given[tokens], added[tokens])
        if added is not total:
            total += added

    def adapt(self, origin: Origin, architecture: Any) -> AdaptedModel:
        """Return the served model with the adapter in `origin`, and the head of an Auto class.
        Raise ModelError if it does not fit."""
        loaded, served = self.loaded, self.loaded.model
        files = LoraFiles.read(origin.location, served.device, served.dtype)
        if architecture.__name__ not in HEADS:
            raise files.misfit(f"it has a head for {architecture.__name__}")
        self._check_tokenizer(origin, files)
        model = self._assembled(origin, architecture, files)
        layout = loaded.layout
        if isinstance(layout, PackedRows):
            layout = replace(layout, head=HEADS[architecture.__name__])
        # Vectors need no pooler.
        layers = files.layers(model, _AFTER_STATES if architecture is AutoModel else "")
        for layer in layers.keys() - {*self._hooked}:
            layer.register_forward_hook(self._add)
            self._hooked.add(layer)
        values = {item.name: getattr(loaded, item.name) for item in fields(loaded)}
        values |= {"model": model, "layout": layout, "max_length": self.max_length(origin)}
        return AdaptedModel(**values, products=layers, shared=self)

    def _assembled(self, origin: Origin, architecture: Any, files: LoraFiles) -> PreTrainedModel:
        """Return a model of the shared encoder and the adapter's head, without other memory."""
        trusts = bool(self.origin.options.get("trust_remote_code"))
        with torch.device("meta"), origin.explained(architecture=architecture.__name__):
            model = architecture.from_config(origin.config(), trust_remote_code=trusts)
        inner, encoder = model.base_model, self.encoder
        if type(inner) is not type(encoder):
            raise files.misfit(f"it is for {type(inner).__name__}, not {type(encoder).__name__}")
        shapes = {name: weight.shape for name, weight in encoder.named_parameters()}
        for name, weight in inner.named_parameters():
            if name in shapes and weight.shape != shapes[name]:
                sizes = f"{[*weight.shape]} instead of {[*shapes[name]]}"
                raise files.misfit(f"its config.json has {sizes} for {name}")
        prefix = "" if inner is model else f"{model.base_model_prefix}."
        inside = {name: w for name, w in files.full.items() if name.startswith(prefix)}
        if deep := [n for n in inside if n.removeprefix(prefix).split(".")[0] != _AFTER_STATES]:
            raise files.misfit(f"it has own weights of the encoder, {join_names(deep, 3)}")
        if not prefix:
            return encoder  # type: ignore[no-any-return]
        if hasattr(encoder, _AFTER_STATES):
            pooler = getattr(inner, _AFTER_STATES)
            if pooler is not None and inside:
                _fill(pooler, inside, f"{prefix}{_AFTER_STATES}.", files)
            elif pooler is not None:
                pooler = self._saved_pooler
            encoder = copy.copy(encoder)
            encoder._modules = dict(encoder._modules)
            setattr(encoder, _AFTER_STATES, pooler)
        setattr(model, model.base_model_prefix, encoder)
        served: Any = self.loaded.model
        for name, part in [*model.named_children()]:
            brought = {key: w for key, w in files.full.items() if key.startswith(f"{name}.")}
            if name == model.base_model_prefix:
                continue
            if (
                not brought
                and type(served) is type(model)
                and _are_alike(part, getattr(served, name))
            ):
                setattr(model, name, getattr(served, name))
            else:
                _fill(part, brought, f"{name}.", files)
        used = {name for name, _ in model.named_parameters()}
        if surplus := sorted(files.full.keys() - used):
            raise files.misfit(f"there is no place for its {join_names(surplus, 3)}")
        return model.eval()  # type: ignore[no-any-return]

    @cached_property
    def _saved_pooler(self) -> nn.Module:
        """Return the pooler of the base's files, which a model with another head, or the mean of
        its states, does not need. Raise ModelError if they have none."""
        first = (self.origin.sentence_modules or [{}])[0].get("path", "")
        folder = replace(self.origin, location=str(Path(self.origin.location, first)))
        whole, report = (folder if first else self.origin).read(AutoModel, self.loaded.model.dtype)
        if lacking := [name for name in unread_weights(report) if _AFTER_STATES in name]:
            raise ModelError(
                f"Neither the adapter nor its base {self.origin.location} has {lacking[0]}.",
                "Save the adapter with its head (modules_to_save).",
            )
        pooler: nn.Module = getattr(whole, _AFTER_STATES).eval().to(self.loaded.model.device)
        return pooler

    @cached_property
    def sentences(self) -> Any:
        """Return the base's SentenceTransformer, or one that means its states, around this encoder.
        Raise ModelError if the library cannot load it."""
        device, dtype = str(self.loaded.model.device), dtype_argument(self.loaded.model.dtype)
        sentences = weights.read_sentences(self.origin, device, dtype)
        sentence_encoders.set_encoder(sentences[0], self.encoder)
        return sentences

    def _check_tokenizer(self, origin: Origin, files: LoraFiles) -> None:
        """Raise ModelError if an adapter has another tokenizer than its base, which they share."""
        path = Path(files.location, _TOKENIZERS[0])
        digest = checksums.digest(path) if path.is_file() else ""
        if digest and digest not in self._tokenizers:
            # transformers rebuilds some tokenizers when it loads them.
            if _reading_of(origin.tokenizer()) != _reading_of(self.loaded.tokenizer):
                raise files.misfit("its tokenizer is another one")
            self._tokenizers.add(digest)

    def max_length(self, origin: Origin) -> int:
        """Return how many tokens of a text an adapter reads: as many as its training."""
        loaded, settings = self.loaded, {}
        if (path := Path(origin.location, _TOKENIZERS[1])).is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
        named = settings.get("model_max_length") or loaded.max_length
        return int(min(named, max(loaded.positions, loaded.max_length)))

    def forward(self, parts: Sequence[EncoderShare]) -> list[list[Tensor]]:
        """Compute rows of several models with this encoder together. Return for each part the
        values of its rows, in float32 on the CPU, with a pause after each call."""
        layout = self.loaded.layout
        if not isinstance(layout, PackedRows):
            return [part.loaded.forward(part.rows, part.reading) for part in parts]
        owners = [number for number, part in enumerate(parts) for _ in part.rows]
        rows = [row for part in parts for row in part.rows]
        calls = PendingCalls(len(rows), self.loaded.model.device.type)
        held = 0
        for call in layout.cuts([len(row.ids) for row in rows]):
            call.sort(key=owners.__getitem__)
            groups = itertools.groupby(call, key=owners.__getitem__)
            shares = [
                EncoderShare(
                    parts[owner].loaded, [rows[index] for index in members], parts[owner].reading
                )
                for owner, members in groups
            ]
            values = self._call(layout, shares)
            held += sum(part.whole.numel() for part in values)
            bounds.hold(Bound.SCORES, held)
            calls.add(call, [part.copy() for part in values])
        rest = iter(calls.finish())
        return [[next(rest) for _ in part.rows] for part in parts]

    @torch.inference_mode()
    def _call(self, layout: PackedRows, parts: Sequence[EncoderShare]) -> list[Values]:
        """Return the values of each part of one call: the states of all of them at once, then the
        head of each part."""
        spans: list[Span] = []
        end = 0
        for loaded, rows, _ in parts:
            start, end = end, end + sum(len(row.ids) for row in rows)
            products = loaded.products if isinstance(loaded, AdaptedModel) else {}
            spans.append((slice(start, end), products))
        with self.applied(spans):
            states = layout.states(self.loaded.model, [r for part in parts for r in part.rows])
        results = []
        for part, (tokens, products) in zip(parts, spans, strict=True):
            reader = part.loaded.layout
            assert isinstance(reader, PackedRows)
            with self.applied([(slice(None), products)]):
                values = reader.read(part.loaded.model, states[tokens], part.rows, part.reading)
            results.append(values)
        return results


@dataclass
class LoadedAdapters:
    """The adapters of a served model."""

    tasks: dict[str, Any] = field(default_factory=dict)
    """The task of each, by its name."""
    shared: SharedEncoder | None = None
    """Their encoder, once one was loaded."""


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules have weights of the same names and shapes."""
    shapes = [{name: w.shape for name, w in part.named_parameters()} for part in (one, other)]
    return shapes[0] == shapes[1]


def _fill(part: nn.Module, given: Mapping[str, Tensor], prefix: str, files: LoraFiles) -> None:
    """Set the weights of a part of a head, whose names begin with `prefix`."""
    names = [prefix + name for name, _ in part.named_parameters()]
    if lacking := [name for name in names if name not in given]:
        raise files.misfit(f"neither it nor its base has {join_names(lacking, 3)}")
    for name, weight in [*part.named_parameters()]:
        new = given[prefix + name]
        if new.shape != weight.shape:
            sizes = f"{[*new.shape]}, and its config.json {[*weight.shape]}"
            raise files.misfit(f"it has {prefix + name} of {sizes}")
        path, _, last = name.rpartition(".")
        setattr(part.get_submodule(path), last, nn.Parameter(new, requires_grad=False))


def _reading_of(tokenizer: Any) -> Any:
    """Return what determines the ids of a tokenizer, without the lengths that a call sets."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return tokenizer.get_vocab()
    document = json.loads(backend.to_str())
    return {key: document[key] for key in document if key not in ("truncation", "padding")}
