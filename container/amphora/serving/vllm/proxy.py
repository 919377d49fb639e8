"""vLLM's server behind the front: it stands where a pool of model workers stands otherwise.

The server listens on a Unix socket in a private folder. One that dies is started again; what it was
answering is answered 500, since a stream cannot be written twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from amphora.common.errors import near
from amphora.common.variables import Variables
from amphora.serving.metrics import Metrics
from amphora.serving.pool.connections import Call, Reply
from amphora.serving.pool.pool import too_late
from amphora.serving.pool.spawner import ModelError
from amphora.serving.protocol import framing, media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings
from amphora.serving.vllm import server_arguments, translation
from amphora.serving.vllm.selection import Selection
from amphora.serving.vllm.server_process import ServerProcess
from amphora.serving.vllm.translation import Exchange, Part

LOG = logging.getLogger("amphora.vllm")
ADAPTERS_ROUTE = "/adapters"
_ADAPTER = "x-amzn-sagemaker-adapter-identifier"
_SESSION = "x-amzn-sagemaker-session-id"
_URL = "http://vllm"
_HEALTH_PAUSE = 0.25
# Failed starts in a row after which the container gives up.
_GIVE_UP_AFTER = 3
_PAUSE = 1.0
# Bodies that are parsed between two requests; larger ones would make `/ping` wait.
_PARSED_AT_ONCE = 65536
_BROKEN = b'data: {"error":'
"""How an error begins in a stream of OpenAI's API: within a text its quotes would be escaped."""
_ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class VllmServer:
    """A model that vLLM serves. `amphora.serving.pool.backend` documents the members."""

    def __init__(
        self,
        settings: ServerSettings,
        environ: Mapping[str, str],
        metrics: Metrics,
        selection: Selection,
    ) -> None:
        """
        Args:
            settings: The server's.
            environ: Of vLLM's processes, with AMPHORA_ADAPTERS_FILE if adapters are taken.
            metrics: Where it counts.
            selection: What vLLM serves.

        Raises:
            ConfigError: Variables of vLLM's are wrong.
        """
        self.settings = settings
        self.loaded = asyncio.Event()
        self.failed: asyncio.Future[ModelError] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self._metrics = metrics
        self._environ = server_arguments.environment(environ)
        self._folder = tempfile.TemporaryDirectory(prefix="amphora-vllm-")
        self._socket = Path(self._folder.name) / "socket"
        self._command = server_arguments.command(settings, environ, selection, self._socket)
        self._name = server_arguments.served_name(environ)
        variables = Variables(environ)
        self._most_written = variables.number("AMPHORA_MAX_TOKENS_WRITTEN", 262_144, least=1)
        variables.check()
        self._list = environ.get("AMPHORA_ADAPTERS_FILE", "")
        self._placed: dict[str, int] = {}
        """The adapters that vLLM has, with the number of their line in the list."""
        self._process = ServerProcess()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[str, Call] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._names: set[str] = set()
        """The model and the adapters that vLLM was started with."""
        self._description: dict[str, Any] = {}

    merges = True

    @property
    def living(self) -> int:
        """1 while vLLM answers."""
        return int(self.is_ready)

    @property
    def description(self) -> Mapping[str, Any]:
        """The model, its routes and limits, as `recipe.inference.apis` describes others."""
        return self._description

    @property
    def oldest(self) -> float:
        """Seconds that the oldest request has waited for the begin of its answer."""
        arrived = [call.arrived for call in self._calls.values() if not call.reply.done()]
        return time.monotonic() - min(arrived) if arrived else 0.0

    @property
    def waiting(self) -> int:
        """Requests whose answer has not begun."""
        return sum(not call.reply.done() for call in self._calls.values())

    def start(self) -> None:
        """Start vLLM, and keep it running."""
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End vLLM; what it has not answered is lost, so drain first."""
        if self._keeper is not None:
            self._keeper.cancel()
        self.is_ready = False
        await self._process.stop()
        for task in self._tasks.values():
            task.cancel()
        if self._session is not None:
            await self._session.close()
        self._folder.cleanup()

    def submit(self, call: Call) -> None:
        """Begin to answer a request. Raises Fault at once: not ready, or too many are at work."""
        if not self.is_ready:
            raise Fault(503, "not_ready", "vLLM is not ready yet, or is being started again.")
        if len(self._tasks) >= self.settings.queue_limit:
            raise Fault(503, "overloaded", f"{len(self._tasks)} requests are at work already.")
        if _SESSION in call.headers:
            raise Fault(400, "no_sessions", "A model that vLLM serves has no sessions.")
        self._calls[call.id] = call
        task = self._tasks[call.id] = asyncio.create_task(self._answer(call))
        task.add_done_callback(lambda _: self._forget(call))

    def _forget(self, call: Call) -> None:
        self._tasks.pop(call.id, None)
        self._calls.pop(call.id, None)

    def cancel(self, call: Call) -> None:
        """The client is gone: the connection to vLLM closes, which ends the work there."""
        if (task := self._tasks.get(call.id)) is not None:
            task.cancel()

    def took(self, call: Call) -> None:
        """Nothing is counted: a full queue of chunks holds vLLM's connection up."""

    async def metrics_text(self) -> bytes:
        """vLLM's own metrics, without those of Python and its HTTP server."""
        if not self.is_ready:
            return b""
        with contextlib.suppress(*_ERRORS):
            _, body = await self._ask("/metrics", None, 5)
            lines = body.splitlines(keepends=True)
            words = (line.split(b" ", 3) for line in lines)
            names = (each[2] if each[0] == b"#" else each[0] for each in words)
            return b"".join(
                line for line, name in zip(lines, names, strict=True) if name[:5] == b"vllm:"
            )
        return b""

    async def _keep(self) -> None:
        """Keep vLLM running for as long as it starts."""
        failures = 0
        while True:
            began = time.monotonic()
            self._socket.unlink(missing_ok=True)
            self._process = ServerProcess()
            await self._process.start(self._command, self._environ)
            ended = asyncio.create_task(self._process.wait())
            warming = asyncio.create_task(self._warm_up())
            await asyncio.wait({ended, warming}, return_when=asyncio.FIRST_COMPLETED)
            error = None
            if ended.done():
                warming.cancel()
                error = f"vLLM's server ended: {ended.result()}"
            elif (failure := warming.exception()) is not None:
                error = f"vLLM's server does not answer: {failure}"
                await self._process.stop()
            if error is not None:
                failures += 1
                if not self.loaded.is_set() or failures >= _GIVE_UP_AFTER:
                    model = self.settings.model_dir
                    told = f"The model in {model} cannot be served by vLLM. {error}"
                    self.failed.set_result(ModelError(told))
                    return
                LOG.error("%s It is started again.", error)
                await asyncio.sleep(_PAUSE * 2**failures)
                continue
            failures = 0
            if not self.loaded.is_set():
                LOG.info("vLLM has answered (%.1f s).", time.monotonic() - began)
            self.is_ready = True
            self.loaded.set()
            why = await ended
            self.is_ready = False
            self._metrics.restarts.inc()
            LOG.error("vLLM's server is gone, with %d requests: %s", len(self._tasks), why)

    async def _warm_up(self) -> None:
        """Wait until vLLM has answered a request. Raises ModelError with its reason."""
        if self._session is not None:
            await self._session.close()
        self._session = aiohttp.ClientSession(
            # vLLM closes idle connections at times that it does not tell.
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
        self._names = {model["id"] for model in models}
        self._placed = {}
        await self._place_adapters()
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
            "adapters": bool(self._list),
            "engine": "vllm",
        }  # fmt: skip

    async def _try(self, name: str) -> None:
        """Have the model, or an adapter, write a token. Raises ModelError if it does not."""
        body = {"model": name, "prompt": "Hello", "max_tokens": 1}
        status, answer = await self._ask(
            translation.COMPLETIONS, body, self.settings.startup_timeout
        )
        if status != 200:
            raise ModelError(f"{name} does not answer: {_message(answer)}")

    async def _place_adapters(self) -> None:
        """Give vLLM the adapters of the list, and take from it those that are no longer there.
        Raises ModelError with its reason if one does not fit."""
        entries = self._adapters()
        for name, number in [*self._placed.items()]:
            if entries.get(name, {}).get("number") != number:
                await self._ask("/v1/unload_lora_adapter", {"lora_name": name}, 60)
                del self._placed[name]
        for name, entry in entries.items():
            if name not in self._placed:
                order = {"lora_name": name, "lora_path": entry["path"]}
                status, answer = await self._ask(
                    "/v1/load_lora_adapter", order, self.settings.startup_timeout
                )
                if status != 200:
                    raise ModelError(
                        f"The adapter {name!r} ({entry['path']}) cannot be served on this model:"
                        f" {_message(answer)}"
                    )
                self._placed[name] = entry["number"]

    def _adapters(self) -> dict[str, dict[str, Any]]:
        """The adapters that may be named now."""
        entries: dict[str, dict[str, Any]] = (
            json.loads(Path(self._list).read_text()) if self._list else {}
        )
        return entries

    async def _ask(
        self, route: str, body: Mapping[str, Any] | None, seconds: float
    ) -> tuple[int, bytes]:
        """A whole answer of vLLM's: GET, or POST of a body. Raises one of `_ERRORS`."""
        assert self._session is not None
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.request(
            method, _URL + route, json=body, timeout=timeout
        ) as response:
            return response.status, await response.read()

    async def _answer(self, call: Call) -> None:
        """Answer a request, whatever happens."""
        try:
            if call.path == ADAPTERS_ROUTE:
                await self._load_adapter(call)
                return
            # What is small is parsed at once: a thread would cost more.
            if len(call.body) < _PARSED_AT_ONCE:
                exchange = translation.read(call.path, call.body, call.content_type)
            else:
                exchange = await asyncio.to_thread(
                    translation.read, call.path, call.body, call.content_type
                )
            for part in exchange.parts:
                if isinstance(part, Part):
                    self._complete(part, call)
            first = exchange.parts[0]
            if isinstance(first, Part) and (first.shape is None or first.streams):
                await self._pass_on(call, first)
            else:
                await self._gather(call, exchange)
        except Fault as fault:
            call.fail(fault)
        except ModelError as error:
            call.fail(Fault(400, "adapter_not_loaded", str(error)))
        except asyncio.TimeoutError:
            call.fail(too_late(self.settings.timeout))
        except (aiohttp.ClientError, OSError):
            call.fail(Fault(500, "worker_died", "vLLM's process died during this request."))
        except Exception as error:
            LOG.exception("Request %s could not be answered.", call.id)
            call.fail(Fault(500, "internal_error", f"{type(error).__name__}: see the log."))

    def _complete(self, part: Part, call: Call) -> None:
        """Name the model in a body, and hold what it asks for within bounds. Raises Fault."""
        adapters = self._adapters()
        named = call.headers.get(_ADAPTER) or part.body.get("model") or self._name
        known = self._names | set(adapters)
        if named not in known:
            # A single model answers to any name; among adapters another one would answer.
            if call.headers.get(_ADAPTER) or len(known) > 1 or "adapter_id" in part.body:
                listed = ", ".join(sorted(known))
                told = f"There is no model {named!r}, but {listed}.{near(str(named), known)}"
                raise Fault(404, "model_not_found", told, "model")
            named = self._name
        part.body["model"] = named
        prompt = part.body.get("prompt")
        is_many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = len(prompt) if isinstance(prompt, list) and is_many else 1
        copies, most = part.body.get("n") or 1, part.body.get("max_tokens") or 1
        if isinstance(copies, int) and isinstance(most, int):
            cost = prompts * copies * most
            if cost > self._most_written:
                raise Fault(
                    413,
                    "too_costly",
                    f"The request asks for {cost:,} tokens that may be generated ({prompts:,}"
                    f" prompts x {copies:,} texts x the new tokens of each);"
                    f" {self._most_written:,} are allowed (AMPHORA_MAX_TOKENS_WRITTEN).",
                )

    async def _pass_on(self, call: Call, part: Part) -> None:
        """Answer by what vLLM answers, whole or as it comes; a stream of TGI's is translated."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(sock_read=self.settings.timeout)
        async with self._session.post(
            _URL + part.route, json=part.body, timeout=timeout
        ) as response:
            if response.status != 200:
                raise _refused(response.status, await response.read())
            kind = response.headers.get("content-type", media_types.JSON)
            if not part.streams:
                reply = Reply(status=200, content_type=kind, headers={}, body=await response.read())
                _settle(call, reply)
                return
            events = part.events() if part.events is not None else None
            kind = kind if events is None else translation.stream_type(call.accept)
            chunks: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(
                framing.CHUNKS_AHEAD + 1
            )
            reply = Reply(status=200, content_type=kind, headers={}, body=b"", chunks=chunks)
            async for data in response.content.iter_any():
                if events is not None:
                    data = events.read(data, call.accept)
                # The status is sent with the first chunk: what fails before is a plain error.
                _settle(call, reply)
                if data:
                    await self._put(chunks, data)
                if _BROKEN in data:
                    # vLLM would end it as if it were whole.
                    raise Fault(500, "stream_broken", "vLLM's stream broke off.")
            _settle(call, reply)
            await self._put(chunks, None)

    async def _put(
        self, chunks: asyncio.Queue[bytes | Exception | None], chunk: bytes | None
    ) -> None:
        """Pass a chunk to the client. Raises TimeoutError if it reads nothing for too long."""
        if chunks.qsize() < framing.CHUNKS_AHEAD:
            chunks.put_nowait(chunk)
        else:
            await asyncio.wait_for(chunks.put(chunk), self.settings.timeout)

    async def _gather(self, call: Call, exchange: Exchange) -> None:
        """Answer by the entries of all parts."""

        async def entries(part: Part | Fault) -> list[Any]:
            try:
                if isinstance(part, Fault):
                    raise part
                assert part.shape is not None
                status, body = await self._ask(part.route, part.body, self.settings.timeout)
                if status != 200:
                    raise _refused(status, body)
                return part.shape(json.loads(body))
            except Fault as fault:
                if not exchange.has_lines or fault.status >= 500:
                    raise
                return [{"error": {"code": fault.code, "message": str(fault)}}]

        tasks = [asyncio.create_task(entries(part)) for part in exchange.parts]
        try:
            found = [entry for each in await asyncio.gather(*tasks) for entry in each]
        finally:
            for task in tasks:
                task.cancel()
        body, kind = translation.written(exchange.join(found), call.accept)
        _settle(call, Reply(status=200, content_type=kind, headers={}, body=body))

    async def _load_adapter(self, call: Call) -> None:
        """Answer the front's order to load an adapter of its list."""
        await self._place_adapters()
        await self._try(json.loads(call.body)["name"])
        reply = Reply(status=200, content_type=media_types.JSON, headers={}, body=b"{}")
        _settle(call, reply)


def _settle(call: Call, reply: Reply) -> None:
    if not call.reply.done():
        call.reply.set_result(reply)


def _message(answer: bytes) -> str:
    """What an error of vLLM's says."""
    try:
        error = json.loads(answer)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:500].decode(errors="replace")


def _refused(status: int, answer: bytes) -> Fault:
    """An error of vLLM's as one of ours."""
    message, param, code = _message(answer), None, "bad_request" if status < 500 else "engine_error"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        param = json.loads(answer)["error"]["param"]
    if "--tool-call-parser" in message:
        message += (
            " Set SM_VLLM_ENABLE_AUTO_TOOL_CHOICE to true and SM_VLLM_TOOL_CALL_PARSER to the"
            " model's, or give tool_choice required or a function's name."
        )
    if "max_model_len" in message or "maximum context length" in message:
        code = "context_length_exceeded"
    return Fault(status, code, message, param if isinstance(param, str) else None)
