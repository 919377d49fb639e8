"""Starts, restarts and ends vLLM's server, sends it requests, and manages its adapters.

The server listens on a Unix socket in a private folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp

from amphora.common.devices import CPU
from amphora.common.errors import AmphoraError
from amphora.serving.pool.connections import Call
from amphora.serving.pool.spawner import ModelLoadError
from amphora.serving.pool.user_code import UserCode
from amphora.serving.pool.worker_adapters import check_new
from amphora.serving.protocol import routes
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ADAPTER_CONFIG, ADAPTERS, ServerSettings
from amphora.serving.telemetry import Metrics
from amphora.serving.vllm import server_arguments, translation
from amphora.serving.vllm.prompt_proof import PromptProof
from amphora.serving.vllm.selection import EngineChoice
from amphora.serving.vllm.server_process import ServerProcess
from amphora.serving.vllm.tokenizer_files import match_tokenizer

LOG = logging.getLogger("amphora.vllm")
ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
"""The exceptions of a request to a server that does not answer."""
# Failed starts in a row after which the container ends.
_GIVE_UP_AFTER = 3


class VllmProcess:
    """vLLM's server, which is started again whenever it dies."""

    def __init__(
        self,
        settings: ServerSettings,
        environ: Mapping[str, str],
        metrics: Metrics,
        selection: EngineChoice,
    ) -> None:
        """Raises ConfigError if variables that set vLLM's arguments are wrong."""
        self.failed: asyncio.Future[AmphoraError] = asyncio.get_running_loop().create_future()
        """Done when it is not started again; its result is the reason."""
        self.is_ready = False
        self.adapters: dict[str, str] = {}
        """The folders of the loaded adapters by their names."""
        if settings.adapters:
            configs = sorted(settings.model_dir.glob(f"{ADAPTERS}/*/{ADAPTER_CONFIG}"))
            self.adapters = {path.parent.name: str(path.parent) for path in configs}
        self.name = server_arguments.served_names(environ)[0]
        self.names: set[str] = set()
        """The names of the model, and of the adapter that is the model itself."""
        self.keys: dict[str, set[str]] = {}
        """The keys that vLLM reads from a body, by route; it would ignore any other."""
        self.description: dict[str, Any] = {}
        """The model, its routes and limits; empty before it has answered."""
        self.settings = settings
        self._metrics = metrics
        self._environ = server_arguments.environment(environ)
        self._proof = PromptProof.read(settings.model_dir, environ)
        self._folder = tempfile.TemporaryDirectory(prefix="amphora-vllm-")
        self._socket = Path(self._folder.name) / "socket"
        self._command = server_arguments.command(settings, environ, selection, self._socket)
        self._model = selection.model
        self._changing = asyncio.Lock()
        self._loads = 0
        """Adapters that the engine has loaded since its start; it keeps those that are unloaded."""
        self._first_loads = int(selection.adapter is not None)
        self._process: ServerProcess | None = None
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        """The requests that it is answering."""
        self._code = UserCode(settings, environ)
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Start vLLM; `failed` reports if it cannot serve."""
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End the server. Unanswered requests are lost, so drain first."""
        self.is_ready = False
        self._keeper.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._code.cancel()
        if self._process is not None:
            await self._process.stop()
        if self._session is not None:
            await self._session.close()
        self._folder.cleanup()

    def check_ready(self) -> None:
        """Raise Fault (503) if the server does not answer."""
        if not self.is_ready:
            raise Fault(503, "not_ready", "vLLM is not ready yet, or is being started again.")

    async def _keep(self) -> None:
        """Start vLLM, and start it again whenever it ends."""
        failures, has_answered = 0, False
        try:  # As AWS's vLLM image does.
            await asyncio.to_thread(self._code.install, self.settings.model_dir)
            folder = Path(self._folder.name) / "tokenizer"
            self._command += await asyncio.to_thread(
                match_tokenizer, self._command, self._model, folder, self._environ
            )
        except AmphoraError as wrong:
            self.failed.set_result(wrong)
            return
        while True:
            began = time.monotonic()
            self._socket.unlink(missing_ok=True)
            process = await ServerProcess.start(self._command, self._environ)
            self._process = process
            ended = asyncio.create_task(process.wait())
            warming = asyncio.create_task(self._warm_up())
            await asyncio.wait({ended, warming}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                warming.cancel()
                error = f"vLLM's server ended: {ended.result()}"
            elif (failure := warming.exception()) is not None:
                error = f"vLLM's server does not answer: {failure}"
                await process.stop()
            else:
                LOG.info("vLLM has answered (%.1f s).", time.monotonic() - began)
                LOG.info("ready at %s", self.settings.url)
                failures, has_answered, self.is_ready = 0, True, True
                while not (await asyncio.wait({ended}, timeout=1))[0]:
                    # Without its engine, the server goes on for half a minute.
                    try:
                        status, _ = await self.answer("/health", None, 10)
                        self.is_ready = self.is_ready and status != 503
                    except aiohttp.ClientConnectorError:
                        self.is_ready = False
                    except ERRORS:
                        pass  # The server is busy.
                self.is_ready = False
                self._metrics.restarts.inc()
                LOG.error("vLLM's server died: %s", ended.result())
                continue
            failures += 1
            if not has_answered or failures >= _GIVE_UP_AFTER:
                model = self.settings.model_dir
                message = f"The model in {model} cannot be served by vLLM. {error}"
                self.failed.set_result(ModelLoadError(message))
                return
            LOG.error("%s It is started again.", error)
            await asyncio.sleep(2**failures)

    def ask(
        self,
        route: str,
        body: Mapping[str, Any] | None,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return a GET, or a POST with a body; its answer is read inside of its context.

        Entering and reading raise one of `ERRORS`.
        """
        assert self._session is not None
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=seconds)
        url = f"http://vllm{route}"
        return self._session.request(method, url, json=body, timeout=timeout, headers=headers)

    async def answer(
        self,
        route: str,
        body: Mapping[str, Any] | None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and body that answer a request. Raises one of `ERRORS`."""
        async with self.ask(route, body, seconds, headers) as response:
            return response.status, await response.read()

    async def metrics(self) -> bytes:
        """Return vLLM's own metrics, if it answers."""
        with contextlib.suppress(*ERRORS):
            return (await self.answer("/metrics", None, 5))[1] if self.is_ready else b""
        return b""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, and have it generate a token.

        Raises Fault: 404 without its files, 409 for a name that is taken, 507 beyond
        AMPHORA_ADAPTERS, 400 with vLLM's reason, 503 if vLLM is not ready.
        """
        async with self._changing:
            self.check_ready()
            taken = self.names | set(self.adapters)
            check_new(name, folder, taken, len(self.adapters), self.settings)
            is_full = self._loads >= server_arguments.loads_of_engine(self.settings)
            if is_full and self.settings.device_kind == CPU:
                count = f"vLLM on CPUs keeps unloaded adapters, and has loaded {self._loads}."
                remedy = "Restart the server, or raise AMPHORA_ADAPTERS."
                raise Fault(507, "too_many_adapters", f"{count} {remedy}")
            try:
                await self._add_adapter(name, str(folder))
                await self._try(name)
            except (ModelLoadError, *ERRORS) as error:
                with contextlib.suppress(*ERRORS):
                    await self.answer("/v1/unload_lora_adapter", {"lora_name": name}, 60)
                message = str(error) or type(error).__name__
                raise Fault(400, "adapter_not_loaded", message) from error
            self.adapters[name] = str(folder)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises Fault (404) if it is not loaded."""
        async with self._changing:
            if self.adapters.pop(name, None) is None:
                raise Fault(404, "adapter_not_found", f"The adapter {name!r} was not found.")
            # A server that has just died has no adapter to unload.
            with contextlib.suppress(*ERRORS):
                await self.answer("/v1/unload_lora_adapter", {"lora_name": name}, 60)

    async def _warm_up(self) -> None:
        """Wait until vLLM has answered a request. Raises ModelLoadError with its reason."""
        if self._session is not None:
            await self._session.close()
        self._session = aiohttp.ClientSession(
            # vLLM closes idle connections, and a request on one would fail.
            connector=aiohttp.UnixConnector(str(self._socket), limit=0, force_close=True),
        )
        limit = self.settings.startup_timeout
        end = time.monotonic() + limit
        while True:
            with contextlib.suppress(*ERRORS):
                if (await self.answer("/health", None, 10))[0] == 200:
                    break
            if time.monotonic() > end:
                raise ModelLoadError(
                    f"It was not ready within {limit:g} s.",
                    "Raise SAGEMAKER_STARTUP_TIMEOUT, or use a smaller model.",
                )
            await asyncio.sleep(0.25)
        models = json.loads((await self.answer("/v1/models", None, limit))[1])["data"]
        api = json.loads((await self.answer("/openapi.json", None, limit))[1])
        self.keys = {}
        for route in translation.TRAITS.passed.values():
            content = api["paths"].get(route, {}).get("post", {}).get("requestBody")
            if content is not None:
                schema = content["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                self.keys[route] = {*api["components"]["schemas"][schema]["properties"]}
        self.names = {model["id"] for model in models}
        self._loads = self._first_loads
        for name, folder in self.adapters.items():
            await self._add_adapter(name, folder)
        await self._try(self.name)
        if self._proof is not None:
            await self._proof.verify(self.name, self.answer, limit)
        message = {"model": self.name, "messages": [{"role": "user", "content": "Hello"}]}
        status, _ = await self.answer(routes.CHAT, {**message, "max_tokens": 1}, limit)
        chat = [routes.CHAT, routes.RESPONSES] if status == 200 else []
        longest = models[0]["max_model_len"]
        self.description = {
            "model": self.name,
            "task": "text-generation",
            "routes": [*chat, routes.COMPLETIONS, *routes.TGI],
            "form": "chat" if chat else "text",
            "max_length": longest,
            "max_input_tokens": longest - 1,
            "max_total_tokens": longest,
            "adapters": self.settings.adapters > 0,
            "engine": "vllm",
        }  # fmt: skip

    async def _add_adapter(self, name: str, folder: str) -> None:
        """Load an adapter in vLLM. Raises ModelLoadError with vLLM's reason if it does not fit."""
        order = {"lora_name": name, "lora_path": folder}
        limit = self.settings.startup_timeout
        status, answer = await self.answer("/v1/load_lora_adapter", order, limit)
        if status != 200:
            reason = error_of(answer)["message"]
            if "max_lora_rank" in reason:
                reason += " Set SM_VLLM_MAX_LORA_RANK to the largest rank of all adapters."
            raise ModelLoadError(
                f"The adapter {name!r} ({folder}) cannot be served on this model: {reason}"
            )
        self._loads += 1

    async def _try(self, name: str) -> None:
        """Generate a token by the model or an adapter. Raises ModelLoadError if vLLM refuses."""
        body = {"model": name, "prompt": "Hello", "max_tokens": 1}
        limit = self.settings.startup_timeout
        status, answer = await self.answer(routes.COMPLETIONS, body, limit)
        if status != 200:
            raise ModelLoadError(f"{name} does not answer: {error_of(answer)['message']}")


def error_of(answer: bytes) -> dict[str, Any]:
    """Return the message, and the rest, of one of vLLM's errors."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return {"message": "", **json.loads(answer)["error"]}
    return {"message": answer[:500].decode(errors="replace")}
