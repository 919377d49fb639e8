"""What a handler is told about its request, and may say about its answer, beside the body."""

from __future__ import annotations

from typing import Any


class Context:
    """The optional last argument of every handler.

    Attributes:
        request_id: The server's name of this request; it stands in the log and in error bodies.
        headers: The request's headers that belong to SageMaker's contract, names in lower case.
        session: What this session's requests keep between them, or None outside of a session.
        path: The route that the request came by: /invocations, or that of a client's API such as
            /v1/chat/completions.
        system_properties: model_dir, gpu_id (None on a CPU) and batch_size, as AWS's servers say.
    """

    def __init__(
        self,
        request_id: str,
        headers: dict[str, str],
        system_properties: dict[str, Any],
        session: dict[str, Any] | None = None,
        path: str = "/invocations",
    ) -> None:
        self.request_id = request_id
        self.headers = headers
        self.system_properties = system_properties
        self.session = session
        self.path = path
        self.session_closed = False
        self.response_headers: dict[str, str] = {}

    @property
    def custom_attributes(self) -> str:
        """The request's X-Amzn-SageMaker-Custom-Attributes; empty where it has none."""
        return self.headers.get("x-amzn-sagemaker-custom-attributes", "")

    def get_request_header(self, index: int, name: str) -> str | None:
        """A request header; `index` is 0 here, and kept for handlers of AWS's servers."""
        return self.headers.get(name.lower())

    def get_all_request_header(self, index: int) -> dict[str, str]:
        """All of `headers`; `index` as in `get_request_header`."""
        return self.headers

    def set_response_header(self, index: int, name: str, value: str) -> None:
        """Add a header to the answer; `index` as in `get_request_header`."""
        self.response_headers[name] = value

    def close_session(self) -> None:
        """End this request's session with its answer."""
        self.session_closed = True
