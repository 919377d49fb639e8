"""The `context` argument of handlers: a request's headers, and the answer's status and headers.

The names are those of AWS's model servers (Multi Model Server and TorchServe), so that files
written for them work. There `idx` selects a request of a batch; here it is 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

LOG = logging.getLogger("amphora.worker")


class Headers(dict[str, str]):
    """Headers whose names are case-insensitive, and stored in lower case."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__({name.lower(): value for name, value in headers.items()})

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


class RequestProcessor:
    """One request's headers, and what its handler has set for the answer."""

    def __init__(self, request_id: str, headers: Mapping[str, str]) -> None:
        self._request_id = request_id
        self._request_headers = Headers(headers)
        self._response_headers: dict[str, str] = {}
        self._status = 200
        self._phrase = ""

    def get_request_id(self) -> str:
        return self._request_id

    def get_request_property(self, key: str) -> str | None:
        value: str | None = self._request_headers.get(key)
        return value

    def get_request_properties(self) -> dict[str, str]:
        return self._request_headers

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the answer's status. Raises ValueError if an answer cannot have it."""
        if not isinstance(code, int) or not 200 <= code <= 599:
            raise ValueError(f"The status {code!r} is not a number from 200 to 599.")
        self._status, self._phrase = int(code), reason_phrase or ""

    def get_response_status_code(self) -> int:
        return self._status

    def get_response_status_phrase(self) -> str:
        return self._phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Add a header to the answer, instead of one of that name."""
        for name in [name for name in self._response_headers if name.lower() == key.lower()]:
            del self._response_headers[name]
        self._response_headers[key] = value

    def get_response_headers(self) -> dict[str, str]:
        return self._response_headers

    def get_response_header(self, key: str | None = None) -> Any:
        """Return one added header (TorchServe), or without a name all of them (MMS)."""
        if key is None:
            return self._response_headers
        return Headers(self._response_headers).get(key)


def _adder(usual: str) -> Callable[..., None]:
    def add(self: MetricsLog, name: str, value: Any, idx: Any = None, unit: Any = usual) -> None:
        self.add_metric(name, value, unit if isinstance(unit, str) else usual)

    return add


class MetricsLog:
    """Logs each metric that a handler adds as a line, with the methods of AWS's servers."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def add_metric(self, name: str, value: Any, unit: str = "", *_: Any, **__: Any) -> None:
        """Log a number and its unit; other arguments are ignored."""
        LOG.info("metric %s: %s %s (request %s)", name, value, unit, self._request_id)

    add_counter, add_time, add_size = _adder("count"), _adder("ms"), _adder("MB")
    add_percent, add_error = _adder("percent"), _adder("error")


class Context:
    """The optional last argument of every handler.

    Attributes:
        request_id: The id of this request, as in the log and in error bodies.
        request_ids: {0: request_id}.
        request_processor: A list with this request's `RequestProcessor`.
        session: A dict that the requests of a session share; None outside of a session.
        path: The route of the request: /invocations, or one of a client's API such as
            /v1/chat/completions.
        system_properties: model_dir, gpu_id (None on a CPU), batch_size, server_name and
            server_version.
        model_name: The multi-model API's name of the model; "model" elsewhere.
        metrics: Takes what a handler measures.
    """

    def __init__(
        self,
        request_id: str,
        headers: Mapping[str, str],
        system_properties: dict[str, Any],
        session: dict[str, Any] | None = None,
        path: str = "/invocations",
        *,
        model_name: str = "model",
    ) -> None:
        self.request_id = request_id
        self.request_ids = {0: request_id}
        self.request_processor = [RequestProcessor(request_id, headers)]
        self.system_properties = system_properties
        self.session = session
        self.path = path
        self.session_closed = False
        self.model_name = model_name
        self.metrics = MetricsLog(request_id)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the request; names are case-insensitive."""
        return self.request_processor[0].get_request_properties()

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of the request; None for an index other than 0."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].get_request_properties()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].get_response_headers()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of the answer, which overrides that of `output_fn` and Accept."""
        self.request_processor[idx].add_response_property("content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        value: str | None = self.request_processor[idx].get_response_header("content-type")
        return value

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of the answer; its body is still what the handlers return."""
        self.request_processor[idx].report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def close_session(self) -> None:
        """End this request's session with its answer."""
        self.session_closed = True
