"""Which engine computes which texts of a call, where two share a model: a rule that is made of
measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from recipe.inference.engines import batches

Cuts = Callable[[Sequence[int]], Iterator[list[int]]]

SHORT = 96
"""Tokens of the longest text that is short: those of a call are computed together, the long ones of
it apart, which costs a call more, and gains more."""
KINDS: Sequence[tuple[tuple[int, int], Sequence[tuple[int, int]]]] = (
    ((8, 32), ((6, 1), (4, 4), (2, 16))),
    ((512, 512), ((1, 1),)),
)
"""What is measured of short texts and of long ones: the fewest and the most tokens of a text; and
so many calls of so many texts."""
_GAIN = 0.95
"""OpenVINO computes what it needs less than this share of PyTorch's time for."""


@dataclass(frozen=True)
class Rule:
    """From how many short texts of a call on PyTorch computes them, and from how many long ones: 1
    is always, infinity never."""

    since: tuple[float, ...]

    @classmethod
    def of(cls, shares: Sequence[Sequence[float]]) -> Rule:
        """The rule that measurements lead to.

        Args:
            shares: OpenVINO's time of PyTorch's, as `KINDS` names what was measured.

        Raises:
            ValueError: They are not of these kinds.
        """
        since = []
        for (_, calls), measured in zip(KINDS, shares, strict=True):
            counts = [texts for _, texts in calls]
            wins = [n for n, share in zip(counts, measured, strict=True) if share < _GAIN]
            more = [n for n in counts if n > max(wins, default=0)]
            # Between two that were measured, the limit is halfway, by ratio.
            middle = math.ceil(math.sqrt(max(wins, default=1) * min(more, default=1)))
            since.append(float(middle if wins else 1) if more else math.inf)
        return cls(tuple(since))

    @property
    def is_torchs(self) -> bool:
        """Whether PyTorch computes all."""
        return max(self.since) == 1

    @property
    def is_openvinos(self) -> bool:
        """Whether OpenVINO computes all."""
        return min(self.since) == math.inf

    def __str__(self) -> str:
        """What PyTorch computes, in words."""
        kinds = (f"texts of {SHORT} tokens at most", "longer texts")
        return " and ".join(
            f"{since:g} and more {texts} of a call" if since > 1 else texts
            for texts, since in zip(kinds, self.since, strict=True)
            if since < math.inf
        )

    def split(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """The places of the texts of a call that PyTorch computes, and of those that OpenVINO does.

        Args:
            lengths: Tokens of each text.
        """
        classes: list[list[int]] = [[] for _ in self.since]
        for place, tokens in enumerate(lengths):
            classes[tokens > SHORT].append(place)
        usual: list[int] = []
        graphs: list[int] = []
        for places, since in zip(classes, self.since, strict=True):
            (usual if len(places) >= since else graphs).extend(places)
        return usual, graphs


@dataclass(frozen=True)
class Shared:
    """What OpenVINO computes of a model."""

    rule: Rule
    model: PreTrainedModel
    """The model itself, if OpenVINO computes all; else one that has its modules in common with it,
    and that PyTorch never computes."""
    longest: int
    """Tokens that it reads at most."""


def calls_of(
    shared: Shared | None, lengths: Sequence[int], usual: Cuts
) -> Iterator[tuple[bool, list[int]]]:
    """Which texts share a call: whether OpenVINO computes it, and the places of its texts.

    Args:
        shared: What it computes; None for nothing.
        lengths: Tokens of each text.
        usual: What cuts PyTorch's texts into calls.
    """
    # Until it stands in (`choice.stand_in`) PyTorch computes all, as when the model warms up.
    if shared is None or "forward" not in vars(shared.model):
        yield from ((False, places) for places in usual(lengths))
        return
    own, graphs = shared.rule.split(lengths)
    for is_graphs, places, cuts in ((False, own, usual), (True, graphs, batches.cuts)):
        for some in cuts([lengths[place] for place in places]):
            yield is_graphs, [places[place] for place in some]
