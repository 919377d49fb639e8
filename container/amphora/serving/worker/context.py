"""The `context` argument of handlers: a request's headers, and the answer's status and headers.

The names are those of AWS's model servers (Multi Model Server and TorchServe), so that files
written for them work. There `idx` selects a request of a batch; here a context has one request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import amphora
from amphora.serving.settings import ServerSettings

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
        headers: The headers of the request; names are case-insensitive.
        path: The route of the request: /invocations, or one of a client's API such as
            /v1/chat/completions.
        model_name: The multi-model API's name of the model; "model" elsewhere.
        metrics: Takes what a handler measures.
        manifest: {"model": {"modelName": the name}}, of a model archive.
    """

    def __init__(
        self,
        request_id: str,
        headers: Mapping[str, str],
        settings: ServerSettings,
        path: str = "/invocations",
    ) -> None:
        self.request_id = request_id
        self.request_ids = {0: request_id}
        self.headers: dict[str, str] = Headers(headers)
        self.path = path
        self.model_name = settings.model_name
        self.manifest = {"model": {"modelName": settings.model_name}}
        self.metrics = MetricsLog(request_id)
        self._settings = settings
        self._response_headers: dict[str, str] = {}
        self._status = 200
        self._phrase = ""

    @property
    def request_processor(self) -> list[Context]:
        """Return a list with the request's processor of the Multi Model Server: this context."""
        return [self]

    @property
    def system_properties(self) -> dict[str, Any]:
        """Return the model's folder, the GPU (None on a CPU), the batch size and the server."""
        return {
            "model_dir": str(self._settings.model_dir),
            # A worker sees one GPU only.
            "gpu_id": 0 if self._settings.device_kind == "cuda" else None,
            "batch_size": self._settings.batch_size,
            "server_name": "amphora",
            "server_version": amphora.__version__,
            "limit_max_image_pixels": True,
        }

    _system_properties = system_properties  # User code reads that of AWS's servers.

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of the request; None for an index other than 0."""
        return self.request_ids.get(idx)

    def get_request_property(self, key: str) -> str | None:
        return self.headers.get(key)

    def get_request_properties(self) -> dict[str, str]:
        return self.headers

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return self.headers

    def add_response_property(self, key: str, value: str) -> None:
        """Add a header to the answer, instead of one of that name."""
        for name in [name for name in self._response_headers if name.lower() == key.lower()]:
            del self._response_headers[name]
        self._response_headers[key] = value

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.add_response_property(key, value)

    def get_response_headers(self, idx: int = 0) -> dict[str, str]:
        return self._response_headers

    def get_response_header(self, key: str | None = None) -> Any:
        """Return one added header (TorchServe), or without a name all of them (MMS)."""
        if key is None:
            return self._response_headers
        return Headers(self._response_headers).get(key)

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of the answer, which overrides that of `output_fn` and Accept."""
        self.add_response_property("content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        value: str | None = self.get_response_header("content-type")
        return value

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the answer's status. Raises ValueError if an answer cannot have it."""
        if not isinstance(code, int) or not 200 <= code <= 599:
            raise ValueError(f"The status {code!r} is not a number from 200 to 599.")
        self._status, self._phrase = int(code), reason_phrase or ""

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of the answer; its body is still what the handlers return."""
        self.report_status(code, phrase)

    def get_response_status_code(self) -> int:
        return self._status

    def get_response_status_phrase(self) -> str:
        return self._phrase

    def get_response_status(self, idx: int) -> tuple[int, str]:
        return self._status, self._phrase
