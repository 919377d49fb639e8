"""Content negotiation: the preferred types of an Accept header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.request import parse_http_list

ANY = "*/*"


class NotAcceptable(TypeError):
    """The answer cannot be written in any type that the client accepts."""

    status_code = 406


def preferred(
    header: str, offers: Sequence[str], spellings: Mapping[str, str] | None = None
) -> list[str]:
    """Return the offers that an Accept header allows, best first: by their weight (q), then by
    their position in the header, then by the server's preference.

    The weight of an exact name precedes that of `text/*`, and that of `text/*` precedes `*/*`. A
    weight of 0 excludes an offer. An empty header means any type. `spellings` are other names of
    offers.
    """
    entries = list(_entries(header or ANY, spellings or {}))
    ranked = []
    for index, offer in enumerate(offers):
        ranges = (offer, f"{offer.partition('/')[0]}/*", ANY)
        matches = (entry for name in ranges for entry in entries if entry[0] == name)
        _, weight, position = next(matches, ("", 0.0, 0))
        if weight > 0:
            ranked.append((-weight, position, index, offer))
    return [offer for *_, offer in sorted(ranked)]


def best(header: str) -> str:
    """Return the first type or range of the highest weight in an Accept header."""
    entries = list(_entries(header or ANY, {})) or [(ANY, 1.0, 0)]
    return max(entries, key=lambda entry: entry[1])[0]


def _entries(header: str, spellings: Mapping[str, str]) -> Iterator[tuple[str, float, int]]:
    """Yield type or range, weight and position of each entry. An invalid weight counts as 1."""
    for index, entry in enumerate(parse_http_list(header)):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        if name:
            weights = [value.partition("=")[2] for value in parameters if value.startswith("q=")]
            try:
                weight = min(1.0, max(0.0, float(weights[0]))) if weights else 1.0
            except ValueError:
                weight = 1.0
            yield spellings.get(name, name), weight, index
