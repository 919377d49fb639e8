"""The routes of other servers' APIs, so that their clients work unchanged: OpenAI's and TEI's.

What a body means is the handlers' to say; they find the route in `context.path`. Here is
which of the routes the loaded model answers: its handlers list them in `describe_fn`.
`amphora.serving.http.invocations` writes each API's errors in its form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from amphora import __version__
from amphora.serving.http.invocations import OPENAI_ROUTES, TEI_ROUTES, Exchange
from amphora.serving.pool.pool import Pool
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings


class Clients:
    """The clients' routes of one model."""

    def __init__(
        self, settings: ServerSettings, exchange: Exchange, pool_of: Callable[[Request], Pool]
    ) -> None:
        self._settings = settings
        self._exchange = exchange
        self._pool_of = pool_of

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            *(
                Route(path, self._invoke, methods=["POST"])
                for path in (*OPENAI_ROUTES, *TEI_ROUTES)
            ),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._models, methods=["GET"]),
            Route("/info", self._info, methods=["GET"]),
        ]

    async def _invoke(self, request: Request) -> Response:
        """As /invocations, where the loaded model's handlers answer this route."""
        pool = self._pool_of(request)
        path = request.scope["path"]
        if pool.is_ready and path not in (answered := pool.description.get("routes", [])):
            there = ", ".join(["/invocations", *answered])
            raise Fault(
                404, "not_found", f"The model that is loaded does not answer {path}, but {there}."
            )
        return await self._exchange.invoke(request, pool)

    async def _models(self, request: Request) -> Response:
        """The one model, as OpenAI's API lists models; it may be asked for by any name."""
        description = self._described(request)
        model = {
            "id": description.get("model", "model"),
            "object": "model",
            "created": 0,
            "owned_by": "amphora",
        }
        if (name := request.path_params.get("name")) is None:
            return self._exchange.reply(200, {"object": "list", "data": [model]})
        if name != model["id"]:
            raise Fault(404, "model_not_found", f"There is no model {name!r}, but {model['id']!r}.")
        return self._exchange.reply(200, model)

    async def _info(self, request: Request) -> Response:
        """What is served, as TEI's API says it, and what the page at / needs to know."""
        description = dict(self._described(request))
        return self._exchange.reply(
            200,
            {
                "model_id": description.get("model", "model"),
                "max_input_length": description.get("max_length"),
                "max_batch_tokens": self._settings.batch_tokens,
                "max_batch_requests": self._settings.batch_size,
                "max_concurrent_requests": self._settings.queue_limit,
                "version": __version__,
                **description,
            },
        )

    def _described(self, request: Request) -> Mapping[str, Any]:
        pool = self._pool_of(request)
        if not pool.is_ready:
            raise Fault(503, "not_ready", "The model is not loaded yet.")
        return pool.description
