"""Reads media types and charsets, and turns what a handler returns into the body of an answer."""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

JSON, CSV = "application/json", "text/csv"
# The only types that AWS's toolkits decode before they call `input_fn`.
DECODED = (JSON, CSV)
_TEXT_TYPES = {JSON, "application/jsonlines", "application/x-jsonlines", "application/x-ndjson"}


class Fault(Exception):
    """An error answer: its status, a code for programs and a message for people."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        """The key of the body that is wrong, as OpenAI's API names it."""


def bad_request(message: str, param: str | None = None) -> Fault:
    return Fault(400, "bad_request", message, param)


def media_type(header: str) -> str:
    """Return 'application/json' for 'Application/JSON; charset=utf-8'."""
    return header.partition(";")[0].strip().lower()


def parameter(header: str, name: str, usual: str = "") -> str:
    """Return a parameter of a media type in lower case, such as `present` for `header` of
    `text/csv; header=present`; the usual value if it is not there."""
    for part in header.split(";")[1:]:
        key, _, value = part.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"').lower() or usual
    return usual


# Python's codecs that are not charsets. They are slow on hostile input.
_NO_CHARSETS = {"idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined"}


def check_charset(content_type: str) -> None:
    """Check the charset of a Content-Type. Raises Fault (415) if text cannot be decoded by it."""
    if "charset" not in content_type.lower():
        return
    name, known = parameter(content_type, "charset", "utf-8"), "undefined"
    with contextlib.suppress(LookupError, UnicodeError):
        b"x".decode(codec := codecs.lookup(name).name, "replace")
        known = codec
    if known.replace("-", "_") in _NO_CHARSETS:
        raise Fault(
            415,
            "unsupported_content_type",
            f"The charset of Content-Type {content_type[:100]!r} is not known. Send utf-8.",
        )


def is_text(content_type: str) -> bool:
    kind = media_type(content_type)
    return kind in _TEXT_TYPES or kind.startswith("text/")


def as_text(body: bytes, content_type: str) -> str | bytes:
    """Decode a body of a textual type; return others unchanged.

    Raises Fault (400) if the bytes are not in the charset that the type names.
    """
    if not is_text(content_type):
        return body
    try:
        return body.decode(parameter(content_type, "charset", "utf-8"))
    except (UnicodeDecodeError, LookupError) as error:
        message = f"The body is not text in the charset of {content_type!r}: {error}"
        raise bad_request(message) from error


def answer(result: Any, accept: str) -> tuple[Any, str]:
    """Return the result of `output_fn` or `transform_fn` as (body, content type).

    A result may be such a tuple, as in AWS's toolkits. An iterator stays one: it is streamed.
    Raises TypeError if the body cannot be sent.
    """
    body, content_type = result, ""
    if isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], (str, type(None))):
        body, content_type = result[:2]
    if not content_type:
        # The handler has not named the type: it is taken for the first one that the client accepts.
        first = media_type(accept.partition(",")[0])
        content_type = first if first and "*" not in first else JSON
    if isinstance(body, (GeneratorType, Iterator)):
        return body, content_type
    return as_bytes(body, content_type), content_type


def as_bytes(body: Any, content_type: str) -> bytes:
    """Encode str in the type's charset, and other values as JSON; keep bytes.

    Raises TypeError with the remedy.
    """
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    if callable(whole := getattr(body, "to_pybytes", None)):  # Arrow's buffers
        return bytes(whole())
    try:
        if isinstance(body, str):
            return body.encode(parameter(content_type, "charset", "utf-8"))
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, LookupError) as error:
        raise TypeError(
            f"a {type(body).__name__} cannot be sent ({error}):"
            " return bytes, str or JSON values (without NaN and infinity)"
        ) from error
