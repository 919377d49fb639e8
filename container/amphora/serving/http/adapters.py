"""LoRA adapters of the model that vLLM serves, loaded and unloaded while it answers.

SageMaker calls `POST /adapters` and `DELETE /adapters/NAME` for inference components of adapters
(AWS's model-hosting-container-standards). Other models refuse these requests.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from amphora.serving.http.invocations import Invocations, check_origin
from amphora.serving.protocol.media_types import Fault

if TYPE_CHECKING:
    from amphora.serving.vllm.lifecycle import Engine

LOG = logging.getLogger("amphora.server")
ROUTE = "/adapters"


class Adapters:
    """The routes that manage adapters."""

    def __init__(self, invocations: Invocations, engine: Engine | None) -> None:
        self._invocations = invocations
        self._engine = engine
        """None if the model takes no adapters."""

    @property
    def names(self) -> list[str]:
        return sorted(self._engine.adapters) if self._engine is not None else []

    @property
    def routes(self) -> list[Route]:
        """Return the routes for Starlette."""
        return [
            Route(ROUTE, self.show, methods=["GET"]),
            Route(ROUTE, self.register, methods=["POST"]),
            Route(f"{ROUTE}/{{name:path}}", self.unregister, methods=["DELETE"]),
        ]

    async def show(self, request: Request) -> Response:
        """List the loaded LoRA adapters."""
        adapters = self._engine.adapters if self._engine is not None else {}
        shown = [{"name": name, "src": adapters[name]} for name in self.names]
        return self._invocations.reply(200, {"adapters": shown})

    async def register(self, request: Request) -> Response:
        """Load a LoRA adapter (`name`, `src`), and have it generate a token."""
        name, folder = await self._invocations.order(request, "name", "src")
        await self._taking().load_adapter(name, Path(folder))
        LOG.info("Adapter %s is loaded from %s.", name, folder)
        return self._invocations.reply(200, {"status": f"Adapter {name} registered"})

    async def unregister(self, request: Request) -> Response:
        """Unload a LoRA adapter."""
        check_origin(request)
        name = request.path_params["name"]
        await self._taking().unload_adapter(name)
        LOG.info("Adapter %s is unloaded.", name)
        return self._invocations.reply(200, {"status": f"Adapter {name} unregistered"})

    def _taking(self) -> Engine:
        """Return the model's engine. Raises Fault (404) if it takes no adapters."""
        if self._engine is None:
            raise Fault(
                404,
                "not_found",
                "This model takes no adapters: vLLM alone serves them by name, with"
                " AMPHORA_ADAPTERS set to the most that may be loaded. Elsewhere merge the adapter"
                " into its base (merge_and_unload), and serve it as a model of its own.",
            )
        return self._engine
