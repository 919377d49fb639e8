"""The multi-model API: models come and go while the server runs, each in workers of its own.

SageMaker decides what is loaded: a model is only unloaded when it asks (DELETE), and a model that
does not fit is refused with 507, upon which it unloads others and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from amphora.serving import programs
from amphora.serving.http.invocations import Exchange
from amphora.serving.metrics import Metrics
from amphora.serving.pool import spawner
from amphora.serving.pool.pool import Pool
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import MIB, ServerSettings

LOG = logging.getLogger("amphora.server")
_PAGE = 100
# A process with its libraries, and what weights take in memory beside their files' size.
_PROCESS_BYTES = 400 * MIB
_WEIGHTS_SHARE = 1.2


@dataclass
class Model:
    """A loaded model."""

    name: str
    url: str
    pool: Pool

    @property
    def entry(self) -> dict[str, str]:
        """As SageMaker's API shows it."""
        return {"modelName": self.name, "modelUrl": self.url}


class Models:
    """The loaded models, and the routes that manage them."""

    def __init__(
        self,
        settings: ServerSettings,
        environ: Mapping[str, str],
        metrics: Metrics,
        exchange: Exchange,
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._metrics = metrics
        self._exchange = exchange
        self._models: dict[str, Model] = {}
        self._turn = asyncio.Lock()

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route("/models", self._list, methods=["GET"]),
            Route("/models", self._load, methods=["POST"]),
            Route("/models/{name:path}/invoke", self._invoke, methods=["POST"]),
            Route("/models/{name:path}", self._show, methods=["GET"]),
            Route("/models/{name:path}", self._unload, methods=["DELETE"]),
        ]

    @property
    def pools(self) -> list[Pool]:
        """The loaded models' pools."""
        return [model.pool for model in self._models.values()]

    async def close(self) -> None:
        """End every model's workers."""
        await asyncio.gather(*(pool.close() for pool in self.pools))

    async def _list(self, request: Request) -> Response:
        names = sorted(self._models)
        first = _number(request, "next_page_token", 0)
        size = max(1, _number(request, "limit", _PAGE))
        page = [self._models[name].entry for name in names[first : first + size]]
        answer: dict[str, Any] = {"models": page}
        if first + size < len(names):
            answer["nextPageToken"] = str(first + size)
        return self._exchange.reply(200, answer)

    async def _show(self, request: Request) -> Response:
        return self._exchange.reply(200, self._find(request).entry)

    async def _unload(self, request: Request) -> Response:
        model = self._find(request)
        del self._models[model.name]
        await model.pool.close()
        LOG.info("Model %s is unloaded.", model.name)
        return self._exchange.reply(200, {"status": f"Model {model.name} is unloaded."})

    async def _invoke(self, request: Request) -> Response:
        return await self._exchange.invoke(request, self._find(request).pool)

    def pool(self, name: str) -> Pool:
        """A loaded model's pool. Raises Fault (404) where it is not loaded."""
        return self._named(name).pool

    def _find(self, request: Request) -> Model:
        return self._named(request.path_params["name"])

    def _named(self, name: str) -> Model:
        if name not in self._models:
            raise Fault(404, "model_not_found", f"Model {name!r} is not loaded.")
        return self._models[name]

    async def _load(self, request: Request) -> Response:
        name, url = _order(await self._exchange.body(request))
        # One at a time, so that two models are not both promised the same memory.
        async with self._turn:
            if name in self._models:
                raise Fault(409, "model_already_loaded", f"Model {name!r} is already loaded.")
            pool = await self._open(name, Path(url))
            self._models[name] = Model(name, url, pool)
        LOG.info("Model %s is loaded from %s.", name, url)
        return self._exchange.reply(200, {"status": f"Model {name} is loaded."})

    async def _open(self, name: str, folder: Path) -> Pool:
        if not folder.is_dir():
            raise Fault(404, "model_not_found", f"Model {name!r}: {folder} is not a folder.")
        _check_memory(name, folder, self._settings)
        settings = replace(
            self._settings,
            model_name=name,
            model_dir=folder,
            code_dir=folder / "code",
            program=self._program(folder),
        )
        pool = Pool(settings, self._environ, self._metrics)
        pool.start()
        loaded = asyncio.create_task(pool.loaded.wait())
        ends: list[asyncio.Future[Any]] = [loaded, pool.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        loaded.cancel()
        if pool.failed.done():
            await pool.close()
            error = pool.failed.result()
            LOG.error("Model %s: %s", name, error)
            if isinstance(error, spawner.KilledForMemory):
                raise Fault(507, "out_of_memory", str(error))
            raise Fault(500, "model_not_loaded", str(error))
        return pool

    def _program(self, folder: Path) -> str | None:
        """SAGEMAKER_PROGRAM counts for models that have the file, and for code that all share."""
        program = self._settings.program
        has_it = program and programs.program_path(folder / "code", program) is not None
        return program if has_it or self._settings.submitted.endswith("gz") else None


def _order(body: bytes) -> tuple[str, str]:
    try:
        order = json.loads(body)
        return str(order["model_name"]), str(order["url"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Fault(
            400, "bad_request", 'Send {"model_name": "a name", "url": "/path/to/its/folder"}.'
        ) from error


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, "")
    if value and not value.isdecimal():
        raise Fault(400, "bad_request", f"{name} is {value[:80]!r}, not a number.")
    return int(value) if value else default


def _check_memory(name: str, folder: Path, settings: ServerSettings) -> None:
    """Raises Fault (507) where the model would not fit."""
    weights = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    processes = 1 if settings.device_kind == "cpu" else settings.workers
    needed = int(weights * _WEIGHTS_SHARE + _PROCESS_BYTES) * processes
    free = free_memory()
    if needed > free:
        raise Fault(
            507,
            "out_of_memory",
            f"Model {name!r} needs about {needed // MIB} MiB of memory, and {free // MIB} MiB are"
            " free.",
        )


# Where a container finds its memory's limit, its use, and what of that is page cache, which counts
# as used and is given back: control groups of version 2, and of version 1.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int:
    """Bytes that may still be used: by the host, and by the container's limit where it has one."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *_free_in_groups(Path("/sys/fs/cgroup"))])


def _free_in_groups(root: Path) -> Iterator[int]:
    for limit, used, cache in _GROUPS:
        stat = (root / limit).with_name("memory.stat")
        # A file that is not there, or says "max", is no limit.
        with contextlib.suppress(OSError, ValueError):
            bound = int((root / limit).read_text())
            given_back = dict(line.split() for line in stat.read_text().splitlines())
            yield bound - int((root / used).read_text()) + int(given_back.get(cache, 0))
