"""Request bodies that came compressed (Content-Encoding), decoded within the bound for bodies.

A few kilobytes can hold gigabytes: decoding stops at the bound, whatever the body claims.
"""

from __future__ import annotations

import zlib

from amphora.serving.protocol.media_types import Fault

SUPPORTED = "gzip, deflate, identity"
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15
# More than twice is not a mistake but an attack.
_MAX_CODINGS = 4


class UnsupportedCoding(Fault):
    """The body is in a coding that is not decoded here: 415, with a list of those that are."""


def codings(header: str) -> list[str]:
    """The codings of a Content-Encoding in the order in which they were applied, without identity.

    Raises UnsupportedCoding if one is not known, or there are more than anybody needs.
    """
    listed = [coding.strip().lower() for coding in header.split(",")]
    applied = [coding for coding in listed if coding not in ("", "identity")]
    unknown = [coding for coding in applied if coding not in ("gzip", "x-gzip", "deflate")]
    if unknown or len(applied) > _MAX_CODINGS:
        raise UnsupportedCoding(
            415,
            "unsupported_content_encoding",
            f"Content-Encoding {header[:100]!r} is not supported. Send one of {SUPPORTED}.",
        )
    return applied


def decode(body: bytes, applied: list[str], limit: int) -> bytes:
    """The body without its codings. Raises Fault: 413 past `limit` bytes, 400 if it is broken."""
    for coding in reversed(applied):
        try:
            body = _inflated(body, coding, limit)
        except zlib.error as error:
            raise Fault(400, "bad_request", f"The body is not {coding}: {error}.") from error
    return body


def _inflated(body: bytes, coding: str, limit: int) -> bytes:
    # The zlib format begins with a method and a check; browsers' servers also send bare deflate.
    is_zlib = len(body) >= 2 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    bits = _GZIP if coding != "deflate" else _ZLIB if is_zlib else _RAW_DEFLATE
    parts: list[bytes] = []
    size = 0
    while True:
        decoder = zlib.decompressobj(bits)
        while not decoder.eof:
            part = decoder.decompress(body, limit - size + 1)
            size += len(part)
            if size > limit:
                raise too_large(limit, "decoded body")
            parts.append(part)
            body = decoder.unconsumed_tail
            if not part and not body and not decoder.eof:
                raise zlib.error("it ends before its end")
        # A gzip file may have several members, and zeros after them.
        body = decoder.unused_data
        if coding == "deflate" and body:
            raise zlib.error("something follows its end")
        if not body.strip(b"\0"):
            return b"".join(parts)


def too_large(limit: int, what: str = "body") -> Fault:
    """The answer to what is larger than the bound for bodies."""
    return Fault(
        413,
        "payload_too_large",
        f"The {what} is larger than {limit} bytes; SAGEMAKER_MAX_PAYLOAD_IN_MB sets the limit.",
    )
