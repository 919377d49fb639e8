"""Choose the masked tokens of texts.

Masks are a pure function of (seed, epoch, position in the data): they do not depend on how samples
are divided among steps and processes, or where a job was resumed. Evaluations always have the same
masks, whatever the seed, so that models can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recipe.batching.document_batches import TargetSamples
from recipe.batching.packing import Rows

_REPLACED, _RANDOM = 0.8, 0.1
_STREAMS = 3
_CHUNK_TOKENS = 1 << 22  # tokens
_DEVIATIONS = 4


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How tokens are masked: 80 % become the mask, 10 % a random token, 10 % are unchanged."""

    probability: float
    """The probability that a token is masked."""
    mask_id: int
    vocabulary: int
    """Size of the vocabulary of random tokens; never padding, from which models infer positions."""
    pad_id: int
    never: tuple[int, ...]
    """Tokens that are never masked: special ones."""


@dataclass(frozen=True)
class MaskedTexts(TargetSamples):
    """Samples with masked tokens. The label of a sample is its number of masked tokens in
    evaluations; for training data it is unused."""

    masking: Masking
    key: int
    """The key of the random numbers."""

    @classmethod
    def drawn_from(
        cls, token_ids: Rows, starts: Rows, masking: Masking, *, is_fixed: bool
    ) -> MaskedTexts:
        """Return the samples of these tokens, none of them masked yet. Of evaluation data
        (`is_fixed`) masked tokens are counted, and at least one is masked."""
        none = np.zeros(len(starts) - 1, dtype=np.int64)
        drawn = cls(token_ids, starts, none, masking, _key(0))
        if not is_fixed:
            return drawn
        labels, least = drawn._draws_below(masking.probability)
        if least >= masking.probability:  # else nothing is masked: mask the likeliest token
            masking = dataclasses.replace(masking, probability=float(np.nextafter(least, 1)))
            labels, _ = drawn._draws_below(masking.probability)
        return dataclasses.replace(drawn, labels=labels, masking=masking)

    def _draws_below(self, probability: float) -> tuple[Rows, float]:
        """Return how many tokens of each sample draw a lower number, and the lowest draw."""
        labels, least = np.zeros(len(self), dtype=np.int64), 1.0
        for start in range(0, len(self.token_ids), _CHUNK_TOKENS):
            source = start + self._maskable(self.token_ids[start : start + _CHUNK_TOKENS])
            draws = _uniform(self.key, source, 0)
            least = min(least, float(draws.min(initial=1)))
            owners = np.searchsorted(self.starts, source[draws < probability], side="right") - 1
            labels += np.bincount(owners, minlength=len(self))
        return labels, least

    def _maskable(self, ids: Rows) -> Rows:
        """Return which of some tokens may be masked, as positions in `ids`."""
        return np.flatnonzero(~np.isin(ids, self.masking.never))

    def draw_epoch(self, seed: int, epoch: int) -> MaskedTexts:
        return dataclasses.replace(self, key=_key(1, seed, epoch))

    def masked(self, source: Rows) -> tuple[Rows, Rows]:
        """Return which of the tokens at `source` (positions in `token_ids`) are masked, as
        positions in `source`, and the tokens that replace them."""
        indices = self._maskable(self.token_ids[source])
        indices = indices[_uniform(self.key, source[indices], 0) < self.masking.probability]
        chosen = source[indices]
        kind, which = _uniform(self.key, chosen, 1), _uniform(self.key, chosen, 2)
        random = (which * (self.masking.vocabulary - 1)).astype(np.int64)
        random += random >= self.masking.pad_id
        kept = np.where(kind < _REPLACED + _RANDOM, random, self.token_ids[chosen])
        return indices, np.where(kind < _REPLACED, self.masking.mask_id, kept)

    def targets(self, source: Rows) -> tuple[Rows, Rows, Rows | None]:
        indices, instead = self.masked(source)
        return indices, self.token_ids[source[indices]], instead

    def weight(self, rows: Rows) -> int:
        """Return the number of masked tokens at `rows`, over which the loss is the mean; at least
        1, so that the loss of a step without any is 0."""
        source, _, _ = self.token_positions(rows)
        return max(1, len(self.masked(source)[0]))

    def room(self, rows: Rows) -> int:
        """Return a number of masked tokens of the samples at `rows` that is rarely exceeded."""
        source, _, _ = self.token_positions(rows)
        tokens, probability = len(self._maskable(self.token_ids[source])), self.masking.probability
        spread = np.sqrt(tokens * probability * (1 - probability))
        return min(tokens, int(np.ceil(tokens * probability + _DEVIATIONS * spread)))

    def fingerprint(self) -> str:
        """Return a digest of the data, and of how it is masked."""
        masking = hashlib.sha256(repr(self.masking).encode()).hexdigest()[:16]
        return f"{super().fingerprint()}-{masking}"


def _key(*numbers: int) -> int:
    (key,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64).tolist()
    return int(key)


def _uniform(key: int, positions: Rows, stream: int) -> npt.NDArray[np.float64]:
    """Return a number from 0 to below 1 for each position: number `_STREAMS * position + stream` of
    the sequence that SplitMix64 draws from `key`, which is the same whatever else is drawn."""
    count = positions.astype(np.uint64) * np.uint64(_STREAMS) + np.uint64(stream + 1)
    mixed = np.uint64(key) + count * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)
