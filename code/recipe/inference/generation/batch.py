"""Texts that a model reads together and that begin and end at any token: rows with a cache.

The rows of a batch share a cache that is padded on the left, as `generate` pads prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_SPARE = 64
"""Tokens for which a layer that has grown has room: most steps then copy nothing."""


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's keys and values, each of shape (rows, heads, tokens, size), with room to grow."""

    keys: Any
    values: Any
    _rooms: Any = None

    @classmethod
    def of(cls, rooms: Sequence[torch.Tensor], end: int) -> GrowingLayer:
        """A layer with these rooms for keys and values, which hold `end` tokens."""
        layer: GrowingLayer = cls()
        layer._rooms = rooms
        layer.dtype, layer.device, layer.is_initialized = rooms[0].dtype, rooms[0].device, True
        layer.keys, layer.values = (room[..., :end, :] for room in rooms)
        return layer

    @property
    def rooms(self) -> Sequence[torch.Tensor]:
        """Where keys and values stand, with what follows them."""
        return self._rooms or (self.keys, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens. Returns all keys and values."""
        added = (key_states, value_states)
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            # What a model splits into queries, keys and values would be kept as a whole.
            self.keys, self.values = (states.contiguous() for states in added)
            return self.keys, self.values
        before = self.keys.shape[-2]
        end = before + key_states.shape[-2]
        rooms = self._rooms
        if rooms is None or rooms[0].shape[-2] < end:
            rooms = []
            for old in (self.keys, self.values):
                room = old.new_empty((*old.shape[:-2], end + _SPARE, old.shape[-1]))
                room[..., :before, :] = old
                rooms.append(room)
            self._rooms = rooms
        for room, states in zip(rooms, added, strict=True):
            room[..., before:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in rooms)
        return self.keys, self.values


@dataclass
class Batch:
    """The keys and values of rows."""

    layers: list[GrowingLayer] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row; those of the longest are all there, the others are padded before."""

    @property
    def padded(self) -> int:
        """Tokens of each row with padding."""
        return max(self.lengths, default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes of a row's token in all layers."""
        size: int = sum(
            part.numel() * part.element_size()
            for layer in self.layers
            for part in (layer.keys, layer.values)
        )
        return -(-size // max(1, len(self.lengths) * self.padded))

    def joined(self, other: Batch) -> Batch:
        """The rows of both."""
        if not self.lengths:
            return other
        longest = max(self.padded, other.padded)
        count = len(self.lengths)

        def both(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            _, heads, _, size = old.shape
            room = old.new_empty((count + len(new), heads, longest + _SPARE, size))
            for rows, part in ((slice(count), old), (slice(count, None), new)):
                missing = longest - part.shape[-2]
                room[rows, :, :missing] = 0
                room[rows, :, missing:longest] = part
            return room

        layers = [
            GrowingLayer.of((both(own.keys, new.keys), both(own.values, new.values)), longest)
            for own, new in zip(self.layers, other.layers, strict=True)
        ]
        return Batch(layers, [*self.lengths, *other.lengths])

    def of(self, places: Sequence[int]) -> Batch:
        """The rows at these places, which may be there several times."""
        lengths = [self.lengths[place] for place in places]
        end = max(lengths, default=0)
        first = self.padded - end
        layers = []
        for layer in self.layers:
            index = torch.tensor(places, dtype=torch.long, device=layer.keys.device)
            layers.append(GrowingLayer.of([room[index, :, first:] for room in layer.rooms], end))
        return Batch(layers, lengths)


class Rows:
    """A causal language model over batches."""

    def __init__(self, model: Any, pad: int) -> None:
        """
        Args:
            model: A causal language model of transformers.
            pad: The token that stands where nothing is.
        """
        self.model = model
        self.pad = pad
        taken = inspect.signature(model.forward).parameters
        self.extra = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self.has_positions = "position_ids" in taken

    @property
    def device(self) -> torch.device:
        """Where scores are."""
        device: torch.device = self.model.device
        return device

    @property
    def told(self) -> Any:
        """What of the model's settings is asked, with tokens where scores are."""
        return self.model

    @torch.inference_mode()
    def extend(self, batch: Batch, tokens: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Batch]:
        """Read tokens after each row's own.

        Args:
            batch: The rows, not to be used any more; without any, the tokens are those of new ones.
            tokens: For each row as many as for every other, if there are rows before.

        Returns:
            The scores of what comes next, float32 of shape (rows, vocabulary), and the new rows.
        """
        before = batch.lengths or [0] * len(tokens)
        device = self.model.device
        width = max(map(len, tokens))
        padded = [[self.pad] * (width - len(ids)) + list(ids) for ids in tokens]
        lengths = [old + len(ids) for old, ids in zip(before, tokens, strict=True)]
        whole = batch.padded + width
        mask = torch.tensor([[0] * (whole - length) + [1] * length for length in lengths])
        inputs: dict[str, Any] = {"input_ids": torch.tensor(padded, device=device), **self.extra}
        if self.has_positions:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -width:]
            inputs["position_ids"] = positions.to(device)
        # As `generate` does: without padding, kernels that need no mask are taken.
        if min(lengths) < whole:
            inputs["attention_mask"] = mask.to(device)
        cache: Any = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = list(batch.layers), GrowingLayer
        output = self.model(**inputs, past_key_values=cache, use_cache=True)
        return output.logits[:, -1].float(), Batch(output.past_key_values.layers, lengths)

    @torch.inference_mode()
    def is_faithful(self, tokens: Sequence[int]) -> bool:
        """Whether rows that join, leave and are read in pieces have the scores of each text alone.

        Args:
            tokens: At least 14, of which two texts are made.
        """
        first, second = list(tokens[:6]), list(tokens[:14])
        if not has_lasting_positions(self.model.config):
            return False
        try:
            alone = [
                self.model(input_ids=torch.tensor([ids], device=self.model.device)).logits[0]
                for ids in (first, second[3:])
            ]
            second = second[3:]
            seen: list[tuple[int, int, torch.Tensor]] = []
            scores, own = self.extend(Batch(), [first[:3]])
            seen.append((0, 3, scores[0]))
            _, new = self.extend(Batch(), [second[:4]])
            scores, new = self.extend(new, [second[4:8]])
            seen.append((1, 8, scores[0]))
            both = own.joined(new)
            for step in range(2):
                scores, both = self.extend(both, [[first[3 + step]], [second[8 + step]]])
                seen += [(0, 4 + step, scores[0]), (1, 9 + step, scores[1])]
            scores, _ = self.extend(both.of([0]), [[first[5]]])
            seen.append((0, 6, scores[0]))
            scores, _ = self.extend(Batch(), [first[:4], second])
            seen += [(0, 4, scores[0]), (1, 11, scores[1])]
        except Exception as error:
            print(f"batches: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return False
        return all(
            are_same(alone[text][length - 1].float(), scores, self.model.dtype)
            for text, length, scores in seen
        )


def are_same(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether scores differ by no more than the order of sums in a precision makes of them,
    beside how much they differ among each other. A neighbour that is seen changes them by far
    more."""
    spread = float((one - one.mean()).norm())
    difference = float(((one - one.mean()) - (other - other.mean())).norm())
    return difference <= (1e-3 if dtype == torch.float32 else 0.08) * max(spread, 1e-6)


def has_lasting_positions(config: Any) -> bool:
    """Whether a token's place is told to a model alike whatever else is read beside it.

    Rotary embeddings of some kinds change for all rows with the longest one, attention in chunks
    with where a chunk begins.
    """
    config = config.get_text_config()
    kinds: list[str] = []
    parameters = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    while parameters:
        for name, value in parameters.pop().items():
            if isinstance(value, dict):
                parameters.append(value)
            elif name in ("rope_type", "type"):
                kinds.append(str(value))
    layers = set(getattr(config, "layer_types", None) or ())
    return (
        not any("dynamic" in kind or kind in ("longrope", "su") for kind in kinds)
        and layers <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attention_chunk_size", None)
    )
