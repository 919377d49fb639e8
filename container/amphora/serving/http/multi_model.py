"""The multi-model API: loads and unloads models while the server runs, each in its own workers.

Models load side by side: each reserves the memory that it needs first, and nothing else waits for
it. One that does not fit is refused with 507 at once; SageMaker then unloads others, and tries it
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from amphora.common.devices import CPU
from amphora.serving import handler_files
from amphora.serving.http.invocations import Invocations, check_origin
from amphora.serving.pool import spawner
from amphora.serving.pool.pool import Pool
from amphora.serving.protocol.media_types import Fault, bad_request
from amphora.serving.settings import MIB, ServerSettings
from amphora.serving.telemetry import Metrics

LOG = logging.getLogger("amphora.server")
TARGET_MODEL = "x-amzn-sagemaker-target-model"
# The memory of a process with its libraries, and of weights relative to the size of their files.
_PROCESS_BYTES = 400 * MIB
_WEIGHTS_SHARE = 1.2
_MOST_NAMED = 3


@dataclass(eq=False)
class _Reservation:
    """The memory of a model that is being loaded."""

    size: int = 0
    """The bytes that it is expected to take."""
    pool: Pool | None = None
    """Its workers, once there is memory for them."""

    @property
    def rest(self) -> int:
        """Return the bytes that it has not taken yet: none once all its workers live."""
        if self.pool is not None and self.pool.living >= self.pool.settings.workers:
            return 0
        taken = sum(map(_private_memory, self.pool.process_ids)) if self.pool else 0
        return max(0, self.size - taken)


@dataclass(eq=False)
class HostedModel:
    name: str
    url: str
    pool: Pool
    memory: _Reservation
    used: float
    """When a request last named it, on the monotonic clock."""

    @property
    def entry(self) -> dict[str, str]:
        """Return its entry in SageMaker's API."""
        return {"modelName": self.name, "modelUrl": self.url}


class MultiModel:
    """The loaded models, and the routes that manage them."""

    def __init__(
        self, environ: Mapping[str, str], metrics: Metrics, invocations: Invocations
    ) -> None:
        self._environ = environ
        self._metrics = metrics
        self._invocations = invocations
        self._models: dict[str, HostedModel] = {}
        self._loading: dict[str, _Reservation] = {}
        self._leaving: list[HostedModel] = []
        """Those that answer their last requests."""
        self._losses: list[asyncio.Task[None]] = []
        """Kept, since the loop keeps no task that nobody waits for."""

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/models", self.list_models, methods=["GET"]),
            Route("/models", self.load, methods=["POST"]),
            Route("/models/{name:path}/invoke", self.invoke, methods=["POST"]),
            Route("/models/{name:path}", self.show, methods=["GET"]),
            Route("/models/{name:path}", self.unload, methods=["DELETE"]),
        ]

    @property
    def pools(self) -> list[Pool]:
        """Return the workers of all models, also of those that come and go."""
        loading = [one.pool for one in self._loading.values() if one.pool is not None]
        models = [*self._models.values(), *self._leaving]
        return [*loading, *(model.pool for model in models)]

    @property
    def names(self) -> list[str]:
        return sorted(self._models)

    def find(self, name: str) -> HostedModel:
        """Return a loaded model. Raises Fault (404) if it is not loaded."""
        if name not in self._models:
            state = "still being loaded" if name in self._loading else "not loaded"
            raise Fault(404, "model_not_found", f"Model {name!r} is {state}.")
        return self._models[name]

    def select(self, name: str) -> HostedModel:
        """Return the model of that name for a request; '' means the only one that is loaded.

        Raises Fault: 404 if it is not loaded, 503 if none is, 400 if there are several to choose.
        """
        if not name and not self._models:
            raise Fault(503, "not_ready", "No model is loaded.")
        if not name and len(self._models) > 1:
            raise bad_request(
                "Several models are loaded. Name one in the header X-Amzn-SageMaker-Target-Model"
                f" (OpenAI's API: in the body's `model`): {', '.join(self.names)}."
            )
        model = self.find(name or next(iter(self._models)))
        model.used = time.monotonic()
        return model

    async def list_models(self, request: Request) -> Response:
        """List the loaded models, in pages (`limit`, `next_page_token`)."""
        first = _number(request, "next_page_token", 0)
        size = max(1, _number(request, "limit", 100))
        page = [self._models[name].entry for name in self.names[first : first + size]]
        answer: dict[str, Any] = {"models": page}
        if first + size < len(self._models):
            answer["nextPageToken"] = str(first + size)
        return self._invocations.reply(200, answer)

    async def show(self, request: Request) -> Response:
        """Show a loaded model."""
        return self._invocations.reply(200, self.find(request.path_params["name"]).entry)

    async def unload(self, request: Request) -> Response:
        """Unload a model, once it has answered the requests that it has."""
        check_origin(request)
        model = self.find(request.path_params["name"])
        await self._end(model)
        LOG.info("Model %s is unloaded.", model.name)
        return self._invocations.reply(200, {"status": f"Model {model.name} is unloaded."})

    async def _end(self, model: HostedModel) -> None:
        """Take a model out, and end its workers once they have answered."""
        del self._models[model.name]
        self._leaving.append(model)
        try:
            await model.pool.drain()
        finally:
            await model.pool.close()
            self._leaving.remove(model)

    async def _lose(self, model: HostedModel) -> None:
        """Unload a model whose workers cannot be started again, so that it may be loaded anew."""
        if self._models.get(model.name) is model:
            error = model.pool.failed.result()
            LOG.error("Model %s is unloaded, since its workers do not start: %s", model.name, error)
            for call in model.pool.waiting:
                call.fail(Fault(503, "not_ready", "The model's workers have ended."))
            await self._end(model)

    def stop_loading(self) -> None:
        """End all loads, since the server stops."""
        for pool in [one.pool for one in self._loading.values() if one.pool is not None]:
            if not pool.failed.done():
                pool.failed.set_result(spawner.ModelLoadError("The server stops."))

    async def invoke(self, request: Request) -> Response:
        """Answer a request by the model of that name."""
        # Nothing may come between finding a model and giving it the request: it may be unloaded.
        body = await self._invocations.body(request)
        model = self.select(request.path_params["name"])
        return await self._invocations.invoke(request, model.pool, body)

    async def load(self, request: Request) -> Response:
        """Load a model (`model_name`, `url`)."""
        name, folder = await self._invocations.order(request, "model_name", "url")
        if name in self._models or name in self._loading:
            state = "already loaded" if name in self._models else "being loaded"
            raise Fault(409, "model_already_loaded", f"Model {name!r} is {state}.")
        reservation = self._loading[name] = _Reservation()
        try:
            settings, needed = await self._settings(name, Path(folder))
            self._reserve(name, reservation, needed)
            pool = reservation.pool = Pool(settings, self._environ, self._metrics)
            pool.start()
            ends: list[asyncio.Future[Any]] = [pool.loaded, pool.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if pool.failed.done():
                error = pool.failed.result()
                LOG.error("Model %s: %s", name, error)
                if isinstance(error, spawner.TooLarge):
                    raise Fault(507, "out_of_memory", f"{error}{self._least_used()}")
                raise Fault(500, "model_not_loaded", str(error))
        except BaseException:
            if reservation.pool is not None:
                await reservation.pool.close()
            raise
        finally:
            del self._loading[name]
        if settings.device_kind == CPU and not pool.loaded.result().forkable:
            # The other workers load it, too.
            reservation.size = needed * settings.workers
        model = HostedModel(name, folder, pool, reservation, used=time.monotonic())
        self._models[name] = model
        pool.failed.add_done_callback(
            lambda _: self._losses.append(asyncio.create_task(self._lose(model)))
        )
        LOG.info("Model %s is loaded from %s.", name, folder)
        return self._invocations.reply(200, {"status": f"Model {name} is loaded."})

    def _reserve(self, name: str, reservation: _Reservation, needed: int) -> None:
        """Reserve memory for a model. Raises Fault (507) if it is short."""
        others = [*self._loading.values(), *(model.memory for model in self._models.values())]
        reserved = sum(other.rest for other in others)
        free = max(0, free_memory() - reserved)
        if needed > free:
            sizes = f"about {needed // MIB} MiB of memory, and {free // MIB} MiB are free"
            if reserved:
                sizes += f" beside {reserved // MIB} MiB for models that are being loaded"
            reason = f"Model {name!r} needs {sizes}.{self._least_used()}"
            raise Fault(507, "out_of_memory", reason)
        reservation.size = needed

    def _least_used(self) -> str:
        """Return a sentence with the models to unload first; empty without any."""
        models = sorted(self._models.values(), key=lambda model: model.used)[:_MOST_NAMED]
        now = time.monotonic()
        listed = ", ".join(f"{model.name} ({now - model.used:.0f} s ago)" for model in models)
        return f" Least recently used: {listed}." if models else ""

    async def _settings(self, name: str, folder: Path) -> tuple[ServerSettings, int]:
        """Return a model's settings and the bytes of memory that it needs. Raises Fault (404)
        without its folder.

        SAGEMAKER_PROGRAM applies to models that have the file, and to an archive for all models.
        """
        settings = self._invocations.settings
        # In a thread, since /ping would wait if the files are many or on a slow disk.
        file_sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
        try:
            if not folder.is_dir():
                raise Fault(404, "model_not_found", f"Model {name!r}: {folder} is not a folder.")
            weights = await asyncio.to_thread(sum, file_sizes)
        except OSError as error:
            reason = f"Model {name!r}: {folder} cannot be read: {error.strerror}."
            raise Fault(404, "model_not_found", reason) from error
        processes = 1 if settings.device_kind == CPU else settings.workers
        needed = int(weights * _WEIGHTS_SHARE + _PROCESS_BYTES) * processes
        program = settings.program
        if not (
            program is None
            or settings.submitted.endswith("gz")
            or handler_files.program_path(folder / "code", program)
        ):
            LOG.info("Model %s has no code/%s: the image's handlers serve it.", name, program)
            program = None
        code_dir = handler_files.code_folder(folder, program)
        changed = replace(
            settings, model_name=name, model_dir=folder, code_dir=code_dir, program=program
        )
        return changed, needed


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name) or str(default)
    if not value.isdecimal() or len(value) > 9:
        raise bad_request(f"{name} is {value[:80]!r}, not 1 to 9 digits.")
    return int(value)


# The files with a container's memory limit and use, and the entries of its page cache, which counts
# as used but is freed on demand, and of what is mapped of it: for control groups of version 2, and
# of version 1.
_GROUPS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file", "file_mapped")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file", "total_mapped_file"),
    ),
)


def free_memory() -> int:
    """Return the bytes that are free on the host, within the container's limit if it has one."""
    groups = Path("/sys/fs/cgroup")
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used, entries in _GROUPS:
        stat = (groups / limit).with_name("memory.stat")
        # A file that is not there, or says "max", is not a limit.
        with contextlib.suppress(OSError, ValueError):
            most = int((groups / limit).read_text())
            counts = dict(line.split() for line in stat.read_text().splitlines())
            inactive, active, mapped = (int(counts.get(entry, 0)) for entry in entries)
            # A file that was read twice, such as a model's that was loaded before, is active.
            cached = max(0, inactive + active - mapped)
            free = min(free, most - int((groups / used).read_text()) + cached)
    return free


def _private_memory(process: int) -> int:
    """Return the bytes that only a process has; mapped files count as free. 0 if it has ended."""
    with contextlib.suppress(OSError, LookupError):
        text = Path(f"/proc/{process}/status").read_text()
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return int(lines["RssAnon"].split()[0]) * 1024
    return 0
