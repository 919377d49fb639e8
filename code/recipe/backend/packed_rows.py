"""Texts end to end in one row of tokens: nothing is padded but the row's end.

The families of models that can be packed, their heads and their attention are those of training
(`recipe.models.packed_encoders`, `recipe.models.flat_attention`). A row has one of few lengths,
since each shape has kernels of its own to make, and room for few enough tokens that what a layer
writes stays in a core's cache (docs/LAB.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.backend.rows import (
    Pooling,
    Reading,
    TokenRow,
    Values,
    Wanted,
    are_close,
    places_kept,
    sent,
    tolerance_of,
)
from recipe.data.column_names import TYPE_IDS
from recipe.models import flat_attention, packed_encoders
from recipe.models.packed_encoders import Family
from recipe.runtime import device

ROW_TOKENS: Mapping[str, int] = {"cpu": 2048, "cuda": 16384}
"""The most tokens of a row that holds several texts, by device."""
_STEP = 64
"""Lengths of rows are multiples of it, or powers of two below it."""
_LEAST = 16
_HEADS: Mapping[str, str] = {
    "AutoModel": "",
    "AutoModelForSequenceClassification": "head",
    "AutoModelForTokenClassification": "tags",
    "AutoModelForQuestionAnswering": "spans",
    "AutoModelForMaskedLM": "masked",
}
"""By transformers' Auto class: what a `Family` calls the head; nothing for hidden states."""


@dataclass(frozen=True)
class PackedRows:
    """How one model takes texts end to end."""

    family: Family
    head: str
    """What `family` calls the model's head; empty for none."""
    most: int
    """Tokens of a row of several texts."""
    takes_types: bool

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        architecture: str,
        inputs: frozenset[str],
        environ: Mapping[str, str],
    ) -> PackedRows | None:
        """Return how a model is packed, or None if its family, its head or its device is unknown
        here, or AMPHORA_PACKING is 0.

        Args:
            model: On its device, in its precision.
            architecture: The name of the Auto class that loaded it.
            inputs: What its forward takes.
            environ: AMPHORA_PACKING.

        Raises:
            ValueError: AMPHORA_PACKING is neither 0 nor 1.
        """
        layouts = "texts end to end, if the model allows it", "padded texts"
        if not device.is_on(environ, "AMPHORA_PACKING", *layouts):
            return None
        family = packed_encoders.family_of(model.config)
        is_of_library = type(model).__module__.startswith("transformers.models.")
        kind = model.device.type
        why_not = ""
        if family is None or not is_of_library:
            why_not = f"it is not known how texts share a row of {type(model).__name__}"
        elif architecture not in _HEADS:
            why_not = f"it is not known how {architecture} reads a row of several texts"
        elif kind not in ROW_TOKENS:
            why_not = f"the device is {kind}"
        elif kind == "cuda":
            why_not = flat_attention.why_not(model.config, model.device, model.dtype) or ""
        if family is None or why_not:
            print(f"batches: texts are padded: {why_not}", flush=True)
            return None
        return cls(family, _HEADS[architecture], ROW_TOKENS[kind], TYPE_IDS in inputs)

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the places of the texts that share a row, shorter ones first."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        start = tokens = 0
        for end, place in enumerate(order):
            if tokens + lengths[place] > self.most and end > start:
                yield order[start:end]
                start, tokens = end, 0
            tokens += lengths[place]
        if order:
            yield order[start:]

    def states(self, model: PreTrainedModel, rows: Sequence[TokenRow]) -> tuple[Tensor, Any]:
        """Compute the last hidden states of the texts of one row.

        Returns:
            [tokens, hidden] on the model's device, and the tokens of each text.
        """
        lengths = np.asarray([len(row.ids) for row in rows], dtype=np.int64)
        real = int(lengths.sum())
        pad = int(getattr(model.config, "pad_token_id", None) or 0)
        ids = np.full(_rounded(real), pad, dtype=np.int64)
        ids[:real] = list(itertools.chain.from_iterable(row.ids for row in rows))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if real < len(ids):
            starts = np.append(starts, len(ids))
        parts = [ids, self._positions(model.config, ids, lengths), starts]
        if self.takes_types and any(row.types for row in rows):
            types = np.zeros_like(ids)
            filled = (row.types or [0] * len(row.ids) for row in rows)
            types[:real] = list(itertools.chain.from_iterable(filled))
            parts.append(types)
        # One copy to the device instead of one for each array.
        numbers = sent(torch.from_numpy(np.concatenate(parts)), model.device)
        sizes = [len(part) for part in parts]
        longest = max(int(lengths.max()), len(ids) - real)
        return self.computed(model, torch.split(numbers, sizes), longest)[:real], lengths

    def computed(self, model: PreTrainedModel, parts: Sequence[Tensor], longest: int) -> Tensor:
        """Compute the last hidden states [tokens, hidden] of a row.

        Args:
            model: A model on its device.
            parts: int64 on the same device: ids [tokens], positions [tokens], the begin of each
                text and the end of the last [texts + 1], and maybe types [tokens].
            longest: Tokens of the longest text.
        """
        ids, positions, starts, *types = parts
        inputs: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "starts": starts.to(torch.int32),
            "longest": longest,
        }
        if types:
            inputs[TYPE_IDS] = types[0][None]
        # A row without blocks looks at the segments for their shape only.
        return packed_encoders.states(model, self.family, inputs, positions[None])[0]

    @torch.inference_mode()
    def values(self, model: PreTrainedModel, rows: Sequence[TokenRow], reading: Wanted) -> Values:
        """Return the values of each text of one row."""
        hidden, lengths = self.states(model, rows)
        begins = np.cumsum(lengths) - lengths
        if isinstance(reading, Pooling):
            starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
            # As the library gives its pooling what flash attention has computed without padding.
            vectors = reading.vectors(hidden[None], cu_seq_lens_q=sent(starts, hidden.device))
            return Values(vectors)
        if reading is Reading.TOKENS:
            counts = lengths.tolist()
            if any(row.keep is not None for row in rows):
                places, counts = places_kept(rows, begins)
                hidden = hidden[sent(places, hidden.device)]
            head = getattr(self.family, self.head) if self.head else None
            return Values(hidden if head is None else head(model, hidden), counts)
        of_mean = reading is Reading.MEAN
        if of_mean or self.family.pools_mean(model.config):
            owners = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
            sums = hidden.new_zeros((len(rows), hidden.shape[-1]), dtype=torch.float32)
            sums.index_add_(0, sent(owners, hidden.device), hidden.float())
            means = sums / sent(torch.from_numpy(lengths), hidden.device)[:, None]
            if of_mean:
                return Values(means)
            pooled = means.to(hidden.dtype)
        else:
            pooled = hidden[sent(torch.from_numpy(begins), hidden.device)]
        return Values(self.family.head(model, pooled))

    def _positions(self, config: Any, ids: Any, lengths: Any) -> Any:
        """Return position ids [length], which begin anew for each text and for the row's end."""
        first, real = self.family.first_position(config), int(lengths.sum())
        positions = np.full(len(ids), first, dtype=np.int64)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        if first:
            # RoBERTa and models like it do not count padding tokens, which a text may contain.
            counted = np.concatenate([[0], np.cumsum(ids[:real] != first - 1)])
            count = counted[1:] - counted[begins]
            positions[:real] = first - 1 + np.where(ids[:real] != first - 1, count, 0)
        else:
            positions[:real] = np.arange(real) - begins
        return positions


def checked(
    model: PreTrainedModel,
    packed: PackedRows | None,
    answers: Callable[[PackedRows | None], Sequence[Tensor]],
) -> PackedRows | None:
    """Return `packed` if the model's answers stay the same with it and the attention that it needs,
    else None.

    Args:
        model: Its attention is restored if its answers differ, and a log line says so.
        packed: How its texts share a row; None if that is unknown.
        answers: Computes answers to several texts by `packed`, or for None each alone.
    """
    if packed is None:
        return None
    usual = model.config._attn_implementation
    expected = answers(None)
    tolerance = tolerance_of(expected, model.dtype, exact=1e-4)
    try:
        flat_attention.use(model)
        is_same = all(are_close(answers(how), expected, tolerance) for how in (packed, None))
        why_not = "" if is_same else "its answers would differ"
    except Exception as error:
        why_not = f"{type(error).__name__}: {str(error)[:200]}"
    if not why_not:
        return packed
    print(f"batches: texts are padded, not end to end: {why_not}", flush=True)
    model.set_attn_implementation(usual)
    return None


def _rounded(tokens: int) -> int:
    """Return the length of a row that holds so many tokens."""
    if tokens > _STEP // 2:
        return -(-tokens // _STEP) * _STEP
    return max(_LEAST, 1 << (tokens - 1).bit_length())
