"""Which of the types that an answer can have a client likes best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.request import parse_http_list

ANY = "*/*"


class NotAcceptable(TypeError):
    """No type that the client accepts can be written."""

    status_code = 406


def preferred(
    header: str, offers: Sequence[str], spellings: Mapping[str, str] | None = None
) -> list[str]:
    """Return the offers that an Accept header takes, best first.

    Args:
        header: As the client sent it; empty means anything.
        offers: The types that can be written; the first ones are taken if any will do.
        spellings: Other names of offers.

    Returns:
        Offers by their weight (q), then by the place of what names them in the header, then by
        their own order. An exact name's weight counts before that of `text/*`, and this one's
        before `*/*`; a weight of 0 excludes.
    """
    entries = list(_entries(header or ANY, spellings or {}))
    ranked = []
    for place, offer in enumerate(offers):
        ranges = (offer, f"{offer.partition('/')[0]}/*", ANY)
        matches = (entry for name in ranges for entry in entries if entry[0] == name)
        _, weight, position = next(matches, ("", 0.0, 0))
        if weight > 0:
            ranked.append((-weight, position, place, offer))
    return [offer for *_, offer in sorted(ranked)]


def best(header: str) -> str:
    """Return the type or range that an Accept header prefers, the first of several."""
    entries = list(_entries(header or ANY, {})) or [(ANY, 1.0, 0)]
    return max(entries, key=lambda entry: entry[1])[0]


def _entries(header: str, spellings: Mapping[str, str]) -> Iterator[tuple[str, float, int]]:
    """Yield type or range, weight and place of each entry; a weight that is not a number is 1."""
    for place, entry in enumerate(parse_http_list(header)):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        if name:
            weights = [value.partition("=")[2] for value in parameters if value.startswith("q=")]
            try:
                weight = min(1.0, max(0.0, float(weights[0]))) if weights else 1.0
            except ValueError:
                weight = 1.0
            yield spellings.get(name, name), weight, place
