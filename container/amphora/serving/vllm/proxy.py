"""Answers requests by vLLM's server, instead of a pool of model workers.

The server listens on a Unix socket in a private folder. A server that dies is started again; the
requests that it was answering fail with 500, since a stream cannot be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from amphora.common.errors import near
from amphora.common.variables import Variables
from amphora.serving.pool.connections import Call, Reply
from amphora.serving.pool.pool import too_late
from amphora.serving.pool.spawner import ModelError
from amphora.serving.protocol import framing, media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ADAPTER_CONFIG, ADAPTERS, ServerSettings
from amphora.serving.telemetry import Metrics
from amphora.serving.vllm import server_arguments, translation
from amphora.serving.vllm.selection import Selection
from amphora.serving.vllm.server_process import ServerProcess
from amphora.serving.vllm.translation import Events, Part

LOG = logging.getLogger("amphora.vllm")
_ADAPTER = "x-amzn-sagemaker-adapter-identifier"
_SESSION = "x-amzn-sagemaker-session-id"
_URL = "http://vllm"
_HEALTH_PAUSE = 0.25
# Failed starts in a row after which the container ends.
_GIVE_UP_AFTER = 3
_PAUSE = 1.0
_BROKEN = b'data: {"error":'
"""The beginning of an error in a stream; within a text its quotes would be escaped."""
# Keys of OpenAI's API that change nothing about an answer.
_REMARKS = {"metadata", "service_tier", "store", "user", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention"}  # fmt: skip
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


@dataclass
class _Work:
    """A request that is being answered."""

    call: Call
    task: asyncio.Task[None] | None = None
    moved: float = field(default_factory=time.monotonic)
    """When vLLM last sent something that the client had room for, on the monotonic clock."""


class VllmServer:
    """A model that vLLM serves, with the public members of a `Pool`."""

    def __init__(
        self,
        settings: ServerSettings,
        environ: Mapping[str, str],
        metrics: Metrics,
        selection: Selection,
    ) -> None:
        """
        Args:
            settings: The front's settings.
            environ: The variables of vLLM's processes.
            metrics: The front's metrics.
            selection: The model.

        Raises:
            ConfigError: Variables that set vLLM's arguments are wrong.
        """
        self.settings = settings
        self.loaded = asyncio.Event()
        self.failed: asyncio.Future[ModelError] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self.adapters: dict[str, str] = {}
        """The folders of the loaded adapters by their names."""
        if settings.adapters:
            configs = sorted(settings.model_dir.glob(f"{ADAPTERS}/*/{ADAPTER_CONFIG}"))
            self.adapters = {path.parent.name: str(path.parent) for path in configs}
        self._metrics = metrics
        self._environ = server_arguments.environment(environ)
        self._folder = tempfile.TemporaryDirectory(prefix="amphora-vllm-")
        self._socket = Path(self._folder.name) / "socket"
        self._command = server_arguments.command(settings, environ, selection, self._socket)
        self._name = server_arguments.served_name(environ)
        variables = Variables(environ)
        self._most_written = variables.number("AMPHORA_MAX_TOKENS_WRITTEN", 262_144, least=1)
        variables.check()
        self._changing = asyncio.Lock()
        self._process = ServerProcess()
        self._session: aiohttp.ClientSession | None = None
        self._work: dict[str, _Work] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._names: set[str] = set()
        """The names of the model, and of the adapter that is the model itself."""
        self._keys: dict[str, set[str]] = {}
        """The keys that vLLM reads from a body, by route; it would ignore any other."""
        self._description: dict[str, Any] = {}

    merges = True

    @property
    def living(self) -> int:
        """Return 1 while vLLM answers, else 0."""
        return int(self.is_ready)

    @property
    def description(self) -> Mapping[str, Any]:
        """Return the model, its routes and limits, in the form of the handlers' `describe_fn`."""
        return self._description

    @property
    def oldest(self) -> float:
        """Return how many seconds the oldest request has waited for its answer to begin."""
        calls = [work.call for work in self._work.values()]
        arrived = [call.arrived for call in calls if not call.reply.done()]
        return time.monotonic() - min(arrived) if arrived else 0.0

    @property
    def waiting(self) -> int:
        """Return the number of requests whose answer has not begun."""
        return sum(not work.call.reply.done() for work in self._work.values())

    def start(self) -> None:
        """Start vLLM, and keep it running."""
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._end_stalled())]

    async def close(self) -> None:
        """End vLLM. Unanswered requests are lost, so drain first."""
        for task in self._tasks:
            task.cancel()
        self.is_ready = False
        await self._process.stop()
        for work in self._work.values():
            self.cancel(work.call)
        if self._session is not None:
            await self._session.close()
        self._folder.cleanup()

    def submit(self, call: Call) -> None:
        """Begin to answer a request. Raises Fault if vLLM is not ready, or has too many."""
        self._check_ready()
        if len(self._work) >= self.settings.queue_limit:
            raise Fault(503, "overloaded", f"{len(self._work)} requests are running already.")
        if _SESSION in call.headers:
            raise Fault(400, "no_sessions", "A model that vLLM serves has no sessions.")
        work = self._work[call.id] = _Work(call)
        work.task = asyncio.create_task(self._answer(work))
        work.task.add_done_callback(lambda _: self._work.pop(call.id, None))

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise Fault(503, "not_ready", "vLLM is not ready yet, or is being started again.")

    def cancel(self, call: Call) -> None:
        """Close the connection to vLLM, which ends the work on a request whose client has left."""
        work = self._work.get(call.id)
        if work is not None and work.task is not None:
            work.task.cancel()

    def took(self, call: Call) -> None:
        """Ignore a chunk that a client has read: a full queue of chunks holds vLLM up."""

    async def metrics_text(self) -> bytes:
        """Return vLLM's own metrics."""
        if not self.is_ready:
            return b""
        with contextlib.suppress(*_ERRORS):
            return (await self._ask("/metrics", None, 5))[1]
        return b""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, and have it generate a token.

        Raises:
            Fault: 404 without its files, 409 for a name that is taken, 507 beyond AMPHORA_ADAPTERS,
                400 with vLLM's reason if it cannot be served, 503 if vLLM is not ready.
        """
        async with self._changing:
            self._check_ready()
            if name in self._names | set(self.adapters):
                raise Fault(409, "adapter_already_loaded", f"{name!r} is already loaded.")
            if not (folder / ADAPTER_CONFIG).is_file():
                raise Fault(404, "adapter_not_found", f"{folder} holds no {ADAPTER_CONFIG}.")
            if len(self.adapters) >= (most := self.settings.adapters):
                raise Fault(
                    507,
                    "too_many_adapters",
                    f"{len(self.adapters)} adapters are loaded, and AMPHORA_ADAPTERS is {most}."
                    " Unload one, or raise it.",
                )
            try:
                await self._place(name, str(folder))
                await self._try(name)
            except (ModelError, *_ERRORS) as error:
                with contextlib.suppress(*_ERRORS):
                    await self._ask("/v1/unload_lora_adapter", {"lora_name": name}, 60)
                message = str(error) or type(error).__name__
                raise Fault(400, "adapter_not_loaded", message) from error
            self.adapters[name] = str(folder)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises Fault (404) if it is not loaded."""
        async with self._changing:
            if self.adapters.pop(name, None) is None:
                raise Fault(404, "adapter_not_found", f"The adapter {name!r} was not found.")
            # A server that has just died has no adapter to unload.
            with contextlib.suppress(*_ERRORS):
                await self._ask("/v1/unload_lora_adapter", {"lora_name": name}, 60)

    async def _keep(self) -> None:
        """Start vLLM, and start it again whenever it ends."""
        failures = 0
        while True:
            began = time.monotonic()
            self._socket.unlink(missing_ok=True)
            self._process = ServerProcess()
            await self._process.start(self._command, self._environ)
            ended = asyncio.create_task(self._process.wait())
            warming = asyncio.create_task(self._warm_up())
            await asyncio.wait({ended, warming}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                warming.cancel()
                error = f"vLLM's server ended: {ended.result()}"
            elif (failure := warming.exception()) is not None:
                error = f"vLLM's server does not answer: {failure}"
                await self._process.stop()
            else:
                failures = 0
                if not self.loaded.is_set():
                    LOG.info("vLLM has answered (%.1f s).", time.monotonic() - began)
                self.is_ready = True
                self.loaded.set()
                reason = await ended
                self.is_ready = False
                self._metrics.restarts.inc()
                LOG.error("vLLM's server died, with %d requests: %s", len(self._work), reason)
                continue
            failures += 1
            if not self.loaded.is_set() or failures >= _GIVE_UP_AFTER:
                model = self.settings.model_dir
                message = f"The model in {model} cannot be served by vLLM. {error}"
                self.failed.set_result(ModelError(message))
                return
            LOG.error("%s It is started again.", error)
            await asyncio.sleep(_PAUSE * 2**failures)

    async def _end_stalled(self) -> None:
        """End requests whose client reads nothing, or for which vLLM writes nothing, for too long.

        A timer for each chunk would be a fifth of the front's CPU time.
        """
        limit = self.settings.timeout
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            for work in [*self._work.values()]:
                if time.monotonic() - work.moved > limit:
                    work.call.fail(too_late(limit))
                    self.cancel(work.call)

    async def _warm_up(self) -> None:
        """Wait until vLLM has answered a request. Raises ModelError with its reason."""
        if self._session is not None:
            await self._session.close()
        self._session = aiohttp.ClientSession(
            # vLLM closes idle connections, and a request on one would fail.
            connector=aiohttp.UnixConnector(str(self._socket), limit=0, force_close=True),
            auto_decompress=False,
        )
        limit = self.settings.startup_timeout
        end = time.monotonic() + limit
        while True:
            with contextlib.suppress(*_ERRORS):
                if (await self._ask("/health", None, 10))[0] == 200:
                    break
            if time.monotonic() > end:
                raise ModelError(
                    f"It was not ready within {limit:g} s.",
                    "Raise SAGEMAKER_STARTUP_TIMEOUT, or use a smaller model.",
                )
            await asyncio.sleep(_HEALTH_PAUSE)
        _, listed = await self._ask("/v1/models", None, limit)
        models = json.loads(listed)["data"]
        _, document = await self._ask("/openapi.json", None, limit)
        self._keys = _keys_by_route(json.loads(document))
        self._names = {model["id"] for model in models}
        for name, folder in self.adapters.items():
            await self._place(name, folder)
        await self._try(self._name)
        message = {"model": self._name, "messages": [{"role": "user", "content": "Hello"}]}
        status, _ = await self._ask(translation.CHAT, {**message, "max_tokens": 1}, limit)
        chat = [translation.CHAT, translation.RESPONSES] if status == 200 else []
        longest = models[0]["max_model_len"]
        self._description = {
            "model": self._name,
            "task": "text-generation",
            "routes": [*chat, translation.COMPLETIONS, translation.GENERATE,
                       translation.GENERATE_STREAM],
            "form": "chat" if chat else "text",
            "max_length": longest,
            "max_input_tokens": longest - 1,
            "max_total_tokens": longest,
            "adapters": self.settings.adapters > 0,
            "engine": "vllm",
        }  # fmt: skip

    async def _place(self, name: str, folder: str) -> None:
        """Load an adapter in vLLM. Raises ModelError with vLLM's reason if it does not fit."""
        order = {"lora_name": name, "lora_path": folder}
        limit = self.settings.startup_timeout
        status, answer = await self._ask("/v1/load_lora_adapter", order, limit)
        if status != 200:
            raise ModelError(
                f"The adapter {name!r} ({folder}) cannot be served on this model:"
                f" {_error(answer)['message']}"
            )

    async def _try(self, name: str) -> None:
        """Generate a token by the model or an adapter. Raises ModelError if vLLM refuses."""
        body = {"model": name, "prompt": "Hello", "max_tokens": 1}
        limit = self.settings.startup_timeout
        status, answer = await self._ask(translation.COMPLETIONS, body, limit)
        if status != 200:
            raise ModelError(f"{name} does not answer: {_error(answer)['message']}")

    async def _ask(
        self, route: str, body: Mapping[str, Any] | None, seconds: float
    ) -> tuple[int, bytes]:
        """Return status and body of a GET, or of a POST with a body. Raises one of `_ERRORS`."""
        assert self._session is not None
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.request(
            method, _URL + route, json=body, timeout=timeout
        ) as response:
            return response.status, await response.read()

    async def _answer(self, work: _Work) -> None:
        """Answer a request, whatever happens."""
        call = work.call
        try:
            request = translation.read(call.path, call.body, call.content_type)
            if isinstance(request, Part):
                await self._pass_on(work, request)
            else:
                await self._answer_lines(call, request)
        except Fault as fault:
            call.fail(fault)
        except asyncio.TimeoutError:
            call.fail(too_late(self.settings.timeout))
        except (aiohttp.ClientError, OSError):
            call.fail(Fault(500, "worker_died", "vLLM's process died during this request."))
        except Exception as error:
            LOG.exception("Request %s could not be answered.", call.id)
            call.fail(Fault(500, "internal_error", f"{type(error).__name__}: see the log."))

    def _complete(self, part: Part, call: Call) -> dict[str, Any]:
        """Return a body that names its model.

        Raises:
            Fault: 400 for an unknown key, 404 for an unknown model, 413 beyond the bound of costs.
        """
        body, adapter = part.body, call.headers.get(_ADAPTER)
        known_keys = self._keys.get(part.route, set())
        if known_keys and (unknown := body.keys() - known_keys - _REMARKS):
            key = min(unknown)
            message = f"{key!r} is not a key of vLLM's {part.route}.{near(key, known_keys)}"
            raise Fault(400, "bad_request", message, key)
        named = adapter or body.get("model") or self._name
        known = self._names | set(self.adapters)
        if named not in known:
            # A single model answers to any name. With adapters an unknown name would be a guess.
            if adapter or len(known) > 1 or "adapter_id" in part.values:
                listed = ", ".join(sorted(known))
                message = f"There is no model {named!r}. Loaded: {listed}.{near(str(named), known)}"
                raise Fault(404, "model_not_found", message, "model")
            named = self._name
        prompt = body.get("prompt")
        is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = len(prompt) if isinstance(prompt, list) and is_list else 1
        copies = body.get("n") or 1
        length = next((body[key] for key in _LENGTHS if body.get(key)), 1)
        # Other types are refused by vLLM.
        if isinstance(copies, int) and isinstance(length, int):
            cost = prompts * copies * length
            if cost > self._most_written:
                raise Fault(
                    413,
                    "too_costly",
                    f"The request asks for {cost:,} tokens that may be generated ({prompts:,}"
                    f" prompts x {copies:,} texts x {length:,} new tokens for each text);"
                    f" {self._most_written:,} are allowed (AMPHORA_MAX_TOKENS_WRITTEN).",
                )
        return {**body, "model": named}

    async def _pass_on(self, work: _Work, part: Part) -> None:
        """Pass vLLM's answer or stream on, translated if the request was."""
        assert self._session is not None
        call, timeout = work.call, aiohttp.ClientTimeout(total=None)
        body = self._complete(part, call)
        async with self._session.post(_URL + part.route, json=body, timeout=timeout) as response:
            if response.status != 200:
                raise _refused(response.status, await response.read())
            kind = response.headers.get("content-type", media_types.JSON)
            if not part.streams:
                answer = await response.read()
                if part.inputs is not None:
                    answer, kind = translation.written(part.answer(json.loads(answer)), call.accept)
                _settle(call, kind, answer)
                return
            events = Events(part, call.accept) if part.inputs is not None else None
            kind = kind if events is None else events.content_type
            chunks: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(framing.CHUNKS_AHEAD)
            async for data in response.content.iter_any():
                if events is not None:
                    data = events.read(data)
                # The status is sent with the first chunk. Earlier failures have an error status.
                _settle(call, kind, b"", chunks)
                if data:
                    await chunks.put(data)
                work.moved = time.monotonic()
                if _BROKEN in data:
                    # vLLM ends such a stream as if it were complete.
                    raise Fault(500, "stream_broken", "vLLM's stream broke off.")
            _settle(call, kind, b"", chunks)
            await chunks.put(None)

    async def _answer_lines(self, call: Call, lines: list[Part | Fault]) -> None:
        """Answer JSON Lines. A line that is refused has its error as its answer."""

        async def answer(part: Part | Fault) -> Any:
            try:
                if isinstance(part, Fault):
                    raise part
                body = self._complete(part, call)
                status, answer = await self._ask(part.route, body, self.settings.timeout)
                if status != 200:
                    raise _refused(status, answer)
                return part.answer(json.loads(answer))
            except Fault as fault:
                if fault.status >= 500:
                    raise
                return {"error": {"code": fault.code, "message": str(fault)}}

        tasks = [asyncio.create_task(answer(part)) for part in lines]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        body, kind = translation.written(answers, call.accept)
        _settle(call, kind, body)


def _settle(
    call: Call,
    kind: str,
    body: bytes,
    chunks: asyncio.Queue[bytes | Exception | None] | None = None,
) -> None:
    """Begin the answer of a call, unless it has begun."""
    if not call.reply.done():
        reply = Reply(status=200, content_type=kind, headers={}, body=body, chunks=chunks)
        call.reply.set_result(reply)


def _keys_by_route(document: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the keys of each route's body in an OpenAPI document of vLLM's."""
    keys = {}
    for route in translation.ROUTES.values():
        content = document["paths"].get(route, {}).get("post", {}).get("requestBody")
        if content is not None:
            name = content["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            keys[route] = {*document["components"]["schemas"][name]["properties"]}
    return keys


def _error(answer: bytes) -> dict[str, Any]:
    """Return the message, and the rest, of one of vLLM's errors."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return {"message": "", **json.loads(answer)["error"]}
    return {"message": answer[:500].decode(errors="replace")}


def _refused(status: int, answer: bytes) -> Fault:
    """Return one of vLLM's errors as a Fault."""
    error = _error(answer)
    message, param = str(error["message"]), error.get("param")
    code = "bad_request" if status < 500 else "engine_error"
    if "--tool-call-parser" in message:
        message += (
            " Set SM_VLLM_ENABLE_AUTO_TOOL_CHOICE to true and SM_VLLM_TOOL_CALL_PARSER to the"
            " model's, or give tool_choice required or a function's name."
        )
    if "max_model_len" in message or "maximum context length" in message:
        code = "context_length_exceeded"
    return Fault(status, code, message, param if isinstance(param, str) else None)
