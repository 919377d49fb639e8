"""The face of SageMaker's runtime API, so that `boto3.client("sagemaker-runtime",
endpoint_url="http://localhost:8080")` talks to a container on a laptop as to an endpoint.

Any endpoint name is accepted. A model's error arrives as `ModelError` with its original status, and
`invoke_endpoint_with_response_stream` gets its parts in AWS's event-stream framing.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from amphora.serving.http.invocations import Invocations, error_body, request_id
from amphora.serving.pool.backend import Backend
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault

_EVENT_STREAM = "application/vnd.amazon.eventstream"
_CONTENT_TYPE = "x-amzn-sagemaker-content-type"
_STRING = 7


class RuntimeApi:
    """The routes of the runtime API."""

    def __init__(
        self,
        invocations: Invocations,
        target_of: Callable[[Request], Backend],
    ) -> None:
        self._invocations = invocations
        self._target_of = target_of

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        streamed = "/endpoints/{name}/invocations-response-stream"
        return [
            Route("/endpoints/{name}/invocations", self.invoke, methods=["POST"]),
            Route(streamed, self.invoke_streamed, methods=["POST"]),
        ]

    async def invoke(self, request: Request) -> Response:
        """Answer boto3's invoke_endpoint."""
        try:
            return await self._invocations.invoke(request, self._target_of(request))
        except Fault as fault:
            error = error_body(fault.code, str(fault), request_id(request)).decode()
            body = {
                "Message": f"Received {fault.status} from the model: {fault}",
                "OriginalStatusCode": fault.status,
                "OriginalMessage": error,
            }
            headers = {
                "content-type": media_types.JSON,
                "x-amzn-errortype": "ModelError",
                "x-request-id": request_id(request),
            }
            return Response(json.dumps(body), 424, headers)

    async def invoke_streamed(self, request: Request) -> Response:
        """Answer boto3's invoke_endpoint_with_response_stream."""
        answer = await self.invoke(request)
        if answer.status_code != 200:
            return answer
        headers = dict(answer.headers)
        headers.pop("content-length", None)
        headers[_CONTENT_TYPE] = headers["content-type"]
        headers["content-type"] = _EVENT_STREAM
        return StreamingResponse(_events(answer), 200, headers)


async def _events(answer: Response) -> AsyncIterator[bytes]:
    part = {
        ":message-type": "event",
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
    }
    if not isinstance(answer, StreamingResponse):
        yield event(part, bytes(answer.body))
        return
    try:
        async for chunk in answer.body_iterator:
            yield event(part, chunk.encode() if isinstance(chunk, str) else bytes(chunk))
    except Fault as fault:
        broken = {"Message": str(fault), "ErrorCode": "StreamBroken"}
        headers = {
            ":message-type": "exception",
            ":exception-type": "ModelStreamError",
            ":content-type": media_types.JSON,
        }
        yield event(headers, json.dumps(broken).encode())


def event(headers: dict[str, str], payload: bytes) -> bytes:
    """One message of AWS's event stream: lengths, their CRC, headers, payload, the whole's CRC."""
    packed = b"".join(
        struct.pack("!B", len(name)) + name.encode()
        + struct.pack("!BH", _STRING, len(value)) + value.encode()
        for name, value in headers.items()
    )  # fmt: skip
    prelude = struct.pack("!II", 16 + len(packed) + len(payload), len(packed))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + packed + payload
    return message + struct.pack("!I", zlib.crc32(message))
