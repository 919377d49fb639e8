"""The routes of other servers' APIs, so that their clients work unchanged: OpenAI's and TEI's.

Handlers interpret the body; `context.path` is the route. A model answers the routes that its
handlers list in `describe_fn`. `amphora.serving.http.invocations` writes each API's errors in its
form.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from amphora import __version__
from amphora.serving.http.adapters import Adapters
from amphora.serving.http.invocations import PREFIX, Invocations, check_route, route_of
from amphora.serving.http.multi_model import TARGET_MODEL, MultiModel
from amphora.serving.protocol import routes
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings

if TYPE_CHECKING:
    from amphora.serving.http.invocations import Backend


class ClientRoutes:
    """The clients' routes of one model, or of all that are loaded."""

    def __init__(
        self,
        settings: ServerSettings,
        invocations: Invocations,
        models: Backend | MultiModel,
        adapters: Adapters | None = None,
    ) -> None:
        self._settings = settings
        self._invocations = invocations
        self._models = models
        self._adapters = adapters

    @property
    def paths(self) -> list[str]:
        """Return the routes that take a body."""
        return [*routes.CLIENTS, *(PREFIX + path for path in routes.OPENAI)]

    @property
    def routes(self) -> list[Route]:
        """Return the routes for Starlette."""
        return [
            *(Route(path, self.invoke, methods=["POST"]) for path in self.paths),
            *(
                route
                for prefix in ("", PREFIX)
                for route in (
                    Route(f"{prefix}/v1/models", self.list_models, methods=["GET"]),
                    Route(f"{prefix}/v1/models/{{name:path}}", self.show_model, methods=["GET"]),
                )
            ),
            Route("/info", self.info, methods=["GET"]),
        ]

    async def invoke(self, request: Request) -> Response:
        """Answer a request of OpenAI's, TEI's or TGI's API, if the model answers this route.

        Of several models the body's `model` (OpenAI's API) or the target model's header chooses.
        """
        path = route_of(request)
        if not isinstance(self._models, MultiModel):
            pool, body = self._models, None
        else:
            body = await self._invocations.body(request)
            name = request.headers.get(TARGET_MODEL, "")
            if not name and path in routes.OPENAI:
                try:
                    name = json.loads(body).get("model") or ""
                except (ValueError, AttributeError, RecursionError):
                    name = ""
            pool = self._models.select(str(name)).pool
        check_route(path, pool)
        return await self._invocations.invoke(request, pool, body)

    async def list_models(self, request: Request) -> Response:
        """List the loaded models as OpenAI's API does. A single one answers to any name."""
        return self._invocations.reply(200, {"object": "list", "data": [*self._entries().values()]})

    async def show_model(self, request: Request) -> Response:
        """Show a loaded model as OpenAI's API does."""
        name, entries = request.path_params["name"], self._entries()
        if name not in entries:
            known = ", ".join(map(repr, entries)) or "none"
            raise Fault(404, "model_not_found", f"There is no model {name!r}. Loaded: {known}.")
        return self._invocations.reply(200, entries[name])

    async def info(self, request: Request) -> Response:
        """Describe the model and the limits, as TEI's API does.

        Of several models the query's `model` or the target model's header chooses.
        """
        if not isinstance(self._models, MultiModel):
            (name, *_), pool, route = self._entries(), self._models, "/invocations"
        else:
            named = request.query_params.get("model") or request.headers.get(TARGET_MODEL, "")
            model = self._models.select(named)
            name, pool, route = model.name, model.pool, f"/models/{quote(model.name)}/invoke"
        return self._invocations.reply(
            200,
            {
                "model_id": name,
                "max_input_length": pool.description.get("max_length"),
                "max_batch_tokens": self._settings.batch_tokens,
                "max_batch_requests": self._settings.batch_size,
                "max_concurrent_requests": self._settings.queue_limit,
                "version": __version__,
                **pool.description,
                "invocations": route,
            },
        )

    def _entries(self) -> dict[str, dict[str, Any]]:
        """Return the loaded models by name, as OpenAI's API describes them. Raises Fault (503)."""
        if isinstance(self._models, MultiModel):
            names = self._models.names
        elif self._models.is_ready:
            names = [self._models.description.get("model", "model")]
            names += self._adapters.names if self._adapters is not None else []
        else:
            raise Fault(503, "not_ready", "The model is not loaded yet.")
        about = {"object": "model", "created": 0, "owned_by": "amphora"}
        return {name: {"id": name, **about} for name in names}
