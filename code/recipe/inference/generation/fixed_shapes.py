"""Texts that are written on a device that compiles a program for each shape.

A device has room for so many texts of so many tokens. A program reads a piece of one of them,
another one adds a token to each, a third copies one. Scores come to the host, which chooses.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from recipe.inference.generation.batch import Batch, Rows, are_same
from recipe.inference.static import programs
from recipe.inference.static.buckets import NAME, Bucket
from recipe.runtime import xla

_PIECE = 128
_STEPS = 3
"""Tokens that are added one by one where answers are held to the CPU's."""
_HOST = torch.device("cpu")
IDS, POSITIONS, PLACES, ROW, LAST = "input_ids", "position_ids", "places", "row", "last"
Pools = list[Tensor]
"""Keys and values of each layer in turn, each of shape (texts, heads, tokens, size)."""


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's keys and values of all texts, in a call that adds tokens to them."""

    def __init__(self, keys: Tensor, values: Tensor, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._inputs = inputs

    def get_seq_length(self) -> int:
        """None that positions were counted from: calls name theirs."""
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens. Returns all keys and values of the call's texts."""
        assert self.keys is not None and self.values is not None
        self.keys, keys = self._with(self.keys, key_states)
        self.values, values = self._with(self.values, value_states)
        return keys, values

    def _with(self, pool: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The pool with the tokens, and what of it the call's texts are."""
        states, places = states.to(pool.dtype), self._inputs[PLACES]
        if ROW not in self._inputs:
            there = torch.arange(pool.shape[2], device=pool.device)
            is_new = there[None, None, :, None] == places[:, None, :1, None]
            pool = torch.where(is_new, states, pool)
            return pool, pool
        row = self._inputs[ROW]
        own = pool.index_select(0, row).index_copy(2, places[0], states)
        return pool.index_copy(0, row, own), own


@dataclass(eq=False)
class _Room:
    """A text's place on the device; who holds it keeps it."""

    number: int
    ids: list[int] = field(default_factory=list)
    """The tokens that are there."""


@dataclass
class Placed(Batch):
    """Texts that are on the device."""

    rooms: list[_Room] = field(default_factory=list)
    writer: FixedRows | None = None

    def joined(self, other: Batch) -> Batch:
        """The texts of both."""
        assert isinstance(other, Placed)
        lengths, rooms = [*self.lengths, *other.lengths], [*self.rooms, *other.rooms]
        return Placed(lengths=lengths, rooms=rooms, writer=other.writer)

    def of(self, places: Sequence[int]) -> Batch:
        """The texts at these places, which may be there several times: they are copied then."""
        assert self.writer is not None
        rooms = []
        for number, place in enumerate(places):
            room = self.rooms[place]
            rooms.append(self.writer.copy(room) if place in places[:number] else room)
        lengths = [self.lengths[place] for place in places]
        return Placed(lengths=lengths, rooms=rooms, writer=self.writer)


class FixedRows(Rows):
    """A causal language model over texts of which each call has one of few shapes."""

    def __init__(self, model: Any, pad: int, bucket: Bucket) -> None:
        """
        Args:
            model: A causal language model of transformers, on the CPU.
            pad: The token that stands where nothing is.
            bucket: How many texts there is room for, and for how many tokens of each.
        """
        super().__init__(model, pad)
        self.bucket = bucket
        self._piece = min(_PIECE, bucket.length)
        self._device = self.model.device
        self._pools: Pools = []
        self._taken: weakref.WeakValueDictionary[int, _Room] = weakref.WeakValueDictionary()
        self._call: Callable[[Mapping[str, Tensor], Pools], tuple[Tensor, Pools]] = self._compute

    @property
    def device(self) -> torch.device:
        """Where scores are."""
        return _HOST

    @functools.cached_property
    def told(self) -> Any:
        """What of the model's settings is asked, with tokens on the host."""
        kind = type(self.model)
        twin = copy.copy(self.model)
        twin.__class__ = type(kind.__name__, (kind,), {"device": _HOST})
        return twin

    @torch.inference_mode()
    def extend(self, batch: Batch, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Batch]:
        """Read tokens after each text's own; as `Rows.extend`.

        Raises:
            OutOfMemoryError: There is no room for a new text.
        """
        if not isinstance(batch, Placed):
            rooms = [self._room() for _ in tokens]
            batch = Placed(lengths=[0] * len(tokens), rooms=rooms, writer=self)
        lengths = [old + len(ids) for old, ids in zip(batch.lengths, tokens, strict=True)]
        if all(batch.lengths) and all(len(ids) == 1 for ids in tokens):
            scores = self._step(batch, [ids[0] for ids in tokens])
        else:
            pairs = zip(batch.rooms, tokens, strict=True)
            scores = torch.cat([self._read(room, ids) for room, ids in pairs])
        return scores, Placed(lengths=lengths, rooms=batch.rooms, writer=self)

    @torch.inference_mode()
    def settle(self, kind: str, environ: Mapping[str, str], tokens: Sequence[int]) -> None:
        """Move the model to a device, compile every program there, and hold their answers to those
        of the CPU.

        Args:
            kind: Of the device.
            environ: AMPHORA_COMPILE.
            tokens: As many as a text may have here, at least 16.

        Raises:
            ModelError: An answer is another one than on the CPU, or another text of the same shape
                would be another program.
        """
        window = getattr(self.model.config.get_text_config(), "sliding_window", None)
        if window and window < self.bucket.length:
            raise programs.refused(
                kind,
                f"its attention reaches {window} tokens back, and a text may have "
                f"{self.bucket.length}; set {NAME} to {self.bucket.rows}x{window} or shorter",
            )
        texts = [list(tokens), list(tokens[-8:])][: 2 if self.bucket.rows > 2 else 1]
        kept = {"logits_to_keep": _STEPS + 2} if self.extra else {}
        expected = [
            self.model(input_ids=torch.tensor([ids]), **kept).logits[0, -_STEPS - 2 :].float()
            for ids in texts
        ]
        _, sample = super().extend(Batch(), [tokens[:1]])
        rows, width, dtype = self.bucket.rows, self.bucket.length, self.model.dtype
        programs.move(self.model, kind)
        self._device = torch.device(kind)
        self._pools = [
            torch.zeros(rows, part.shape[1], width, part.shape[3], dtype=part.dtype).to(kind)
            for layer in sample.layers
            for part in (layer.keys, layer.values)
        ]
        # Else the first call would compute the moved weights too, in a program of its own.
        self._hand_over()
        size = sum(pool.numel() * pool.element_size() for pool in self._pools)
        self._call = programs.compiled(self._compute, kind, environ, 2)
        began, (_, looks) = time.monotonic(), xla.work()
        print(
            f"programs: to read and write texts on {kind}, {NAME}={self.bucket} (texts x tokens), "
            f"{size / 1e6:.0f} MB of keys and values",
            flush=True,
        )
        try:
            right = self._is_right(texts, expected, 0)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            why = f"{type(self.model).__name__} takes no mask of fixed shape: {str(error)[:200]}"
            raise programs.refused(kind, why) from error
        work, start = xla.work(), time.monotonic()
        right &= self._is_right(texts, expected, 1)
        seconds = time.monotonic() - start
        if xla.work() != work or work[1] != looks:
            raise programs.refused(
                kind,
                "its code looks at numbers on the device, so that other texts of the same shape may"
                " be another program to compile",
            )
        if not right:
            raise programs.refused(
                kind, f"in {dtype} its scores differ from the CPU's by more than rounding"
            )
        print(
            f"programs: all are ready after {start - began:.0f} s; {len(tokens)} tokens are read,"
            f" and {_STEPS} written, in {seconds:.2f} s",
            flush=True,
        )

    def _is_right(self, texts: Sequence[list[int]], expected: Sequence[Tensor], end: int) -> bool:
        """Whether texts, read and then written on together, have the scores that are expected.

        Args:
            texts: One or two.
            expected: The scores after each one's last tokens.
            end: Tokens to leave out at their ends.
        """
        which = list(range(len(texts)))
        batch, pairs = Batch(), []
        for place, ids in enumerate(texts):
            scores, own = self.extend(Batch(), [ids[: -_STEPS - end]])
            batch = batch.joined(own)
            pairs.append((expected[place][-_STEPS - end - 1], scores[0]))
        for step in range(_STEPS, 0, -1):
            if step == 1 and self.bucket.rows > len(texts):
                which = [*which, 0]
                batch = batch.of(which)
            added = [[texts[place][-step - end]] for place in which]
            scores, batch = self.extend(batch, added)
            pairs += [
                (expected[place][-step - end], own)
                for place, own in zip(which, scores, strict=True)
            ]
        return all(are_same(one, other, self.model.dtype) for one, other in pairs)

    @torch.inference_mode()
    def copy(self, room: _Room) -> _Room:
        """Another text of the same tokens. Raises OutOfMemoryError if there is no room."""
        other = self._room()
        other.ids += room.ids
        source, target = (self._sent(torch.tensor([each.number])) for each in (room, other))
        self._pools = [
            pool.index_copy(0, target, pool.index_select(0, source)) for pool in self._pools
        ]
        self._hand_over()
        return other

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def _hand_over(self) -> None:
        """Let the device compute what was written: all of it at once, which is one program."""
        if self._device.type == "xla":
            xla.sync()

    def _room(self) -> _Room:
        if len(self._taken) == self.bucket.rows:
            # A text that is over may have its room yet: errors that torch.compile raises and takes
            # itself refer to themselves, and to what called it, until they are collected.
            gc.collect()
        for number in range(self.bucket.rows):
            if number not in self._taken:
                room = self._taken[number] = _Room(number)
                return room
        raise torch.OutOfMemoryError(f"{NAME} has room for {self.bucket.rows} texts at once.")

    def _step(self, batch: Placed, tokens: Sequence[int]) -> Tensor:
        """A token more of each text."""
        ids = torch.full((self.bucket.rows, 1), self.pad)
        positions = torch.zeros_like(ids)
        # Where nothing is: what a call computes for no text is written nowhere.
        places = torch.full_like(ids, self.bucket.length)
        for room, token in zip(batch.rooms, tokens, strict=True):
            positions[room.number] = places[room.number] = len(room.ids)
            ids[room.number] = token
            room.ids.append(token)
        scores = self._scores({IDS: ids, POSITIONS: positions, PLACES: places})
        return scores[[room.number for room in batch.rooms]]

    def _read(self, room: _Room, tokens: Sequence[int]) -> Tensor:
        """Tokens after those of one text, piece by piece: the scores after the last one."""
        scores, before = torch.empty(0), len(room.ids)
        room.ids += tokens
        for first in range(before, len(room.ids), self._piece):
            # What fills a piece up lies after a text's last token, where nothing is seen of it.
            # Where there is no room for that, tokens before are read again.
            start = min(first, self.bucket.length - self._piece)
            piece = room.ids[start : first + self._piece]
            places = torch.arange(self._piece)[None] + start
            ids = torch.tensor([piece + [self.pad] * (self._piece - len(piece))])
            inputs = {IDS: ids, POSITIONS: places, PLACES: places}
            inputs |= {ROW: torch.tensor([room.number]), LAST: torch.tensor([len(piece) - 1])}
            scores = self._scores(inputs)
        return scores

    def _scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        on_device = {name: self._sent(tensor) for name, tensor in inputs.items()}
        scores, self._pools = self._call(on_device, self._pools)
        self._hand_over()
        return scores.cpu()

    def _compute(self, inputs: Mapping[str, Tensor], before: Pools) -> tuple[Tensor, Pools]:
        """What a program computes: scores in float32, and the keys and values with new ones."""
        parts = zip(before[::2], before[1::2], strict=True)
        layers = [_Layer(keys, values, inputs) for keys, values in parts]
        cache: Any = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = layers, None
        there = torch.arange(self.bucket.length, device=inputs[IDS].device)
        # The numbers of places grow with those of tokens, so that nothing after one is seen.
        is_hidden = there[None, None, None, :] > inputs[PLACES][:, None, :, None]
        dtype = self.model.dtype
        mask = is_hidden.to(dtype) * torch.finfo(dtype).min
        taken = {IDS: inputs[IDS], "attention_mask": mask}
        if self.has_positions:
            taken[POSITIONS] = inputs[POSITIONS]
        if LAST in inputs and self.extra:
            taken["logits_to_keep"] = inputs[LAST]
        logits = self.model(**taken, past_key_values=cache, use_cache=True).logits
        if LAST in inputs and not self.extra:
            logits = logits.index_select(1, inputs[LAST])
        pools: Any = [part for each in layers for part in (each.keys, each.values)]
        return logits[:, -1].float(), pools
