"""Which of the types that an answer can have a client likes best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

ANY = "*/*"


class NotAcceptable(TypeError):
    """No type that the client accepts can be written."""

    status_code = 406


def preferred(
    header: str, offers: Sequence[str], spellings: Mapping[str, str] | None = None
) -> list[str]:
    """The offers that an Accept header takes, best first.

    Args:
        header: As the client sent it; empty means anything.
        offers: The types that can be written; the first ones are taken where any will do.
        spellings: Other names of offers.

    Returns:
        Offers by their weight (q), then by the place of what names them in the header, then by
        their own order. An exact name's weight counts before that of `text/*`, and this one's
        before `*/*`; a weight of 0 excludes.
    """
    ranges = list(_ranges(header or ANY, spellings or {}))
    ranked = []
    for place, offer in enumerate(offers):
        kinds = (offer, f"{offer.partition('/')[0]}/*", ANY)
        matches = ((kind, entry) for kind in kinds for entry in ranges if entry[0] == kind)
        match = next(matches, None)
        if match is not None and match[1][1] > 0:
            _, (_, weight, position) = match
            ranked.append((-weight, position, place, offer))
    return [offer for *_, offer in sorted(ranked)]


def best(header: str) -> str:
    """The type or range that an Accept header likes best, the first of several."""
    ranges = list(_ranges(header or ANY, {})) or [(ANY, 1.0, 0)]
    return max(ranges, key=lambda entry: entry[1])[0]


def _ranges(header: str, spellings: Mapping[str, str]) -> Iterator[tuple[str, float, int]]:
    """Type, weight and place of each entry."""
    for place, entry in enumerate(header.split(",")):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        if kind:
            weights = [value.partition("=")[2] for value in parameters if value.startswith("q=")]
            yield spellings.get(kind, kind), _number(weights[0]) if weights else 1.0, place


def _number(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 1.0
