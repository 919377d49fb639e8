"""LoRA adapters of the one model that vLLM serves, loaded and unloaded while it answers.

`POST /adapters` and `DELETE /adapters/NAME` are what SageMaker calls for the inference components
of adapters (AWS's model-hosting-container-standards). The list of adapters is a file, which
`amphora.serving.vllm.proxy` reads. Other models refuse these requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from amphora.serving.http.invocations import Invocations, check_origin, request_id
from amphora.serving.pool.backend import Backend
from amphora.serving.pool.connections import Call
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ADAPTER_CONFIG, ADAPTERS, ServerSettings

LOG = logging.getLogger("amphora.server")
ROUTE = "/adapters"
"""Of the routes, and of the call by which a worker loads one."""
HEADER = "x-amzn-sagemaker-adapter-identifier"
"""What names the adapter of a request; in OpenAI's API the body's `model` does, too."""
_LONGEST_NAME = 256


@dataclass(frozen=True)
class Adapter:
    """One that is loaded."""

    path: str
    number: int
    """Another one each time that it is added."""


class Adapters:
    """The adapters of one pool's model, and the routes that manage them."""

    def __init__(self, settings: ServerSettings, invocations: Invocations) -> None:
        """
        Args:
            settings: Those of the pool; its model's folder may hold adapters to begin with.
            invocations: What reads requests and waits for answers.
        """
        self._settings = settings
        self._invocations = invocations
        self.pool: Backend | None = None
        """The pool, once it has been made with `variables`."""
        self._adapters: dict[str, Adapter] = {}
        self._count = 0
        self._changing = asyncio.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if settings.adapters:
            self._folder = tempfile.TemporaryDirectory(prefix="amphora-adapters-")
            for config in sorted(settings.model_dir.glob(f"{ADAPTERS}/*/{ADAPTER_CONFIG}")):
                self._add(config.parent.name, str(config.parent))
            self._write()

    @property
    def variables(self) -> dict[str, str]:
        """Where the pool's workers find the list."""
        return {} if self._file is None else {"AMPHORA_ADAPTERS_FILE": str(self._file)}

    @property
    def names(self) -> list[str]:
        """Their names, sorted."""
        return sorted(self._adapters)

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route(ROUTE, self.show, methods=["GET"]),
            Route(ROUTE, self.register, methods=["POST"]),
            Route(f"{ROUTE}/{{name:path}}", self.unregister, methods=["DELETE"]),
        ]

    async def show(self, request: Request) -> Response:
        """GET /adapters."""
        shown = [{"name": name, "src": self._adapters[name].path} for name in self.names]
        return self._invocations.reply(200, {"adapters": shown})

    async def register(self, request: Request) -> Response:
        """POST /adapters: answered once a worker has loaded it, and has answered by it."""
        body = await self._invocations.order(request)
        try:
            order = json.loads(body)
            name, path = order["name"], order["src"]
            is_order = isinstance(name, str) and isinstance(path, str)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_order = False
        if not is_order or not 0 < len(name) <= _LONGEST_NAME or not (name + path).isprintable():
            raise Fault(
                400, "bad_request", 'Send {"name": "a name", "src": "/path/of/its/folder"}.'
            )
        if name == self._taking().description.get("model"):
            raise Fault(409, "adapter_already_loaded", f"{name!r} is the name of the base.")
        await self.load(name, Path(path), request)
        LOG.info("Adapter %s is loaded from %s.", name, path)
        return self._invocations.reply(200, {"status": f"Adapter {name} registered"})

    async def unregister(self, request: Request) -> Response:
        """DELETE /adapters/NAME."""
        check_origin(request)
        name = request.path_params["name"]
        await self.unload(name)
        LOG.info("Adapter %s is unloaded.", name)
        return self._invocations.reply(200, {"status": f"Adapter {name} unregistered"})

    async def load(self, name: str, folder: Path, request: Request) -> None:
        """Load an adapter in a worker, and in the others before their next request of it.

        Raises Fault: 404 without its files or for a model that takes none, 409 for a name that is
        taken, 507 beyond AMPHORA_ADAPTERS, or what the worker says.
        """
        pool = self._taking()
        async with self._changing:
            if name in self._adapters:
                raise Fault(409, "adapter_already_loaded", f"{name!r} is already loaded.")
            if not (folder / ADAPTER_CONFIG).is_file():
                raise Fault(404, "adapter_not_found", f"{folder} holds no {ADAPTER_CONFIG}.")
            if len(self._adapters) >= (most := self._settings.adapters):
                raise Fault(
                    507,
                    "too_many_adapters",
                    f"{most} adapters are loaded, as many as AMPHORA_ADAPTERS says. Unload one.",
                )
            self._add(name, str(folder))
            self._write()
            try:
                await self._try(request, pool, name)
            except BaseException:
                del self._adapters[name]
                self._write()
                raise

    async def unload(self, name: str) -> None:
        """Forget an adapter. Raises Fault (404) if it is not loaded."""
        self._taking()
        async with self._changing:
            if name not in self._adapters:
                raise Fault(404, "adapter_not_found", f"The adapter {name!r} was not found.")
            del self._adapters[name]
            self._write()

    @property
    def _file(self) -> Path | None:
        return None if self._folder is None else Path(self._folder.name) / "adapters.json"

    def _taking(self) -> Backend:
        """The pool, if its model takes adapters. Raises Fault: 503 if it is not ready, else 404."""
        if self.pool is None or not self.pool.is_ready:
            raise Fault(503, "not_ready", "The model is not loaded yet.")
        if self._file is None or not self.pool.description.get("adapters"):
            raise Fault(
                404,
                "not_found",
                "This model takes no adapters: vLLM alone serves them by name, with"
                " AMPHORA_ADAPTERS set to the most that may be loaded. Elsewhere merge the adapter"
                " into its base (merge_and_unload), and serve it as a model of its own.",
            )
        return self.pool

    def _add(self, name: str, path: str) -> None:
        self._count += 1
        self._adapters[name] = Adapter(path, self._count)

    def _write(self) -> None:
        """Replace the list that the workers read."""
        if self._file is None:
            return
        entries = {name: vars(adapter) for name, adapter in self._adapters.items()}
        beside = self._file.with_name(uuid.uuid4().hex)
        beside.write_text(json.dumps(entries))
        beside.replace(self._file)

    async def _try(self, request: Request, pool: Backend, name: str) -> None:
        """Have a worker answer by an adapter of the list. Raises Fault if none does."""
        loop = asyncio.get_running_loop()
        call = Call(
            id=request_id(request),
            body=json.dumps({"name": name}).encode(),
            content_type=media_types.JSON,
            accept=media_types.JSON,
            headers={},
            path=ROUTE,
            deadline=loop.time() + self._settings.timeout,
            reply=loop.create_future(),
        )
        pool.submit(call)
        reply = await self._invocations.wait(request, pool, call)
        if reply.status != 200:
            error = json.loads(reply.body)["error"]
            raise Fault(reply.status, error["code"], error["message"])
