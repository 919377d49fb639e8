"""Media types of bodies, and the preferred types of an Accept header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.request import parse_http_list

from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault

JSON, CSV = media_types.JSON, media_types.CSV
JSON_LINES, NPY, TEXT = "application/jsonlines", "application/x-npy", "text/plain"
EVENTS, BYTES = "text/event-stream", "application/octet-stream"
PNG, WAV = "image/png", "audio/wav"
FILES = ("image", "audio", "video")
"""Types of bodies that are the file of an input."""
ANY = "*/*"
SPELLINGS = {
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
    # Clients of AWS's own image classifier send it.
    "application/x-image": "image/x-image",
}
_CHARSETS = ("utf-8", "utf8", "us-ascii")


def media_type(header: str) -> str:
    """Return the media type of a header, such as `text/csv` of `Text/CSV; charset=utf-8`."""
    plain_type = media_types.media_type(header)
    return SPELLINGS.get(plain_type, plain_type)


def unsupported_type(message: str) -> Fault:
    """Return the error for a body whose type is not read."""
    return Fault(415, "unsupported_content_type", message)


def not_acceptable(message: str) -> Fault:
    """Return the error for an answer that no accepted type can hold."""
    return Fault(406, "not_acceptable", message)


def check_utf8(header: str) -> None:
    """Raise Fault (415) if a Content-Type names a charset other than UTF-8."""
    if media_types.parameter(header, "charset", "utf-8") not in _CHARSETS:
        raise unsupported_type(f"Content-Type is {header!r}. Send the body in utf-8.")


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
