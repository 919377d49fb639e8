"""Answers to requests that reach no route: too large, too late, or not HTTP at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

_STATUS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    417: b"Expectation Failed",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}


@dataclass(frozen=True)
class Refusal:
    """The answer to a request that reaches no route."""

    status: int
    code: str
    message: str

    def written(self, identifier: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """The whole answer, after which the connection is closed.

        Args:
            identifier: The request's id.
            headers: More headers.
        """
        error = {"code": self.code, "message": self.message, "request_id": identifier}
        body = json.dumps({"error": error}).encode()
        lines = [
            b"HTTP/1.1 %d %s" % (self.status, _STATUS[self.status]),
            *(name + b": " + value for name, value in headers),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"x-request-id: " + identifier.encode(),
            b"connection: close",
        ]
        if self.status == 503:
            lines.append(b"retry-after: 1")
        return b"\r\n".join([*lines, b"", body])
