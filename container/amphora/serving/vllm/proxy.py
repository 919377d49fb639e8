"""Answers requests by vLLM's server, instead of a pool of model workers.

If the server dies, the requests that it was answering fail with 500, since a stream cannot be
repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp

from amphora.common.errors import did_you_mean
from amphora.serving.api import exchange, openai, write
from amphora.serving.api.canonical import ApiRequest, unknown_model
from amphora.serving.api.exchange import Exchange
from amphora.serving.pool.connections import Call
from amphora.serving.pool.pool import too_late
from amphora.serving.protocol import media_types, routes
from amphora.serving.protocol.media_types import Fault, bad_request
from amphora.serving.protocol.messages import Answer
from amphora.serving.vllm import server_arguments, translation
from amphora.serving.vllm.lifecycle import VllmProcess, error_of
from amphora.serving.vllm.translation import Chunks

LOG = logging.getLogger("amphora.vllm")
_ADAPTER = "x-amzn-sagemaker-adapter-identifier"
_SESSION = "x-amzn-sagemaker-session-id"
_BROKEN = b'data: {"error":'
"""The beginning of an error in a stream; within a text its quotes would be escaped."""
_REMARKS = {*openai.REMARKS, "store"}
"""Keys of OpenAI's API that change nothing about an answer."""
# Further ones whose usual value changes nothing.
_IDLE: Mapping[str, Any] = {"best_of": 1, "modalities": ["text"]}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_COMPLETION_TOKENS = 16
"""The new tokens of a completion that names no number, as in OpenAI's API."""


class VllmServer(VllmProcess):
    """A model that vLLM serves, with the public members of a `Pool`."""

    merges = True

    @property
    def living(self) -> int:
        return int(self.is_ready)

    @property
    def waiting(self) -> list[Call]:
        """Return the calls whose answer has not begun."""
        return [call for call in self._tasks if not call.reply.done()]

    def submit(self, call: Call) -> None:
        """Begin to answer a request. Raises Fault if vLLM is not ready, or has too many."""
        self.check_ready()
        if len(self._tasks) >= self.settings.queue_limit:
            raise Fault(503, "overloaded", f"{len(self._tasks)} requests are running already.")

        async def answer() -> None:
            try:
                read = exchange.read(
                    call.path, call.body, call.content_type, translation.TRAITS,
                    is_transform=self.settings.is_transform,
                )  # fmt: skip
                if read.records is None and (read.requests[0].streams or read.requests[0].route):
                    await self._pass_on(call, read)
                else:
                    await self._answer_whole(call, read)
            except Fault as fault:
                call.fail(fault)
            except asyncio.TimeoutError:
                call.fail(too_late(self.settings.timeout))
            except (aiohttp.ClientError, OSError):
                call.fail(Fault(500, "worker_died", "vLLM's process died during this request."))
            except Exception as error:
                LOG.exception("Request %s could not be answered.", call.id)
                call.fail(Fault(500, "internal_error", f"{type(error).__name__}: see the log."))

        self._tasks[call] = asyncio.create_task(answer())
        self._tasks[call].add_done_callback(lambda _: self._tasks.pop(call))

    def cancel(self, call: Call) -> None:
        """Close the connection to vLLM, which ends the work on a request whose client has left."""
        if (task := self._tasks.get(call)) is not None:
            task.cancel()

    def took(self, call: Call) -> None:
        """Ignore a chunk that a client has read: a full queue of chunks holds vLLM up."""

    def _translate(
        self, request: ApiRequest, call: Call, spent: int = 0
    ) -> tuple[str, dict[str, Any], int]:
        """Return vLLM's route, a body that names its model, and the number of tokens that it may
        generate.

        `spent` is that number for the other parts of the request. Raises Fault: 400 for an unknown
        key, 404 for an unknown model, 413 beyond the bound of costs.
        """
        adapter = call.headers.get(_ADAPTER)
        route, given = translation.translate(request)
        known_keys = self.keys.get(route) or {*given}
        body = {
            key: value
            for key, value in given.items()
            if key in known_keys | _REMARKS or (value is not None and value != _IDLE.get(key))
        }
        if unknown := body.keys() - known_keys - _REMARKS:
            key = min(unknown)
            message = f"{key!r} is not a key of vLLM's {route}.{did_you_mean(key, known_keys)}"
            raise bad_request(message, key)
        named = adapter or body.get("model") or self.name
        known = self.names | set(self.adapters)
        if named not in known:
            # A single model answers to any name. With adapters an unknown name would be a guess.
            others = known - {self.name, server_arguments.BASE}
            is_guess = adapter or others or self.settings.adapters
            if is_guess or (not request.route and "model" in body):
                raise unknown_model(str(named), sorted(known))
            named = self.name
        prompt, prompts = body.get("prompt"), 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompts = len(prompt)
        copies = _number(body.get("n")) or 1
        # A chat that names no length may fill the context, which is allowed to a single text.
        most_written = self.settings.most_written
        longest = min(self.description["max_length"], most_written)
        usual = _COMPLETION_TOKENS if route == routes.COMPLETIONS else longest
        # vLLM reads one of them.
        length = max(_number(body.get(key)) for key in _LENGTHS) or usual
        if not request.route and body.get("truncate_prompt_tokens") == -1:
            body["truncate_prompt_tokens"] = max(1, self.description["max_length"] - length)
        cost = prompts * copies * length
        if spent + cost > most_written:
            asking, less = "The request asks", ""
            if spent:
                asking, less = "This line and those before it ask", ", or send fewer lines"
            raise Fault(
                413,
                "too_costly",
                f"{asking} for {spent + cost:,} tokens that may be generated ({prompts:,} prompts x"
                f" {copies:,} texts x {length:,} new tokens for each text); {most_written:,}"
                f" are allowed (AMPHORA_MAX_TOKENS_WRITTEN). Give fewer in {_LENGTHS[0]}{less}.",
            )
        return route, {**body, "model": named}, cost

    async def _pass_on(self, call: Call, read: Exchange) -> None:
        """Pass an answer of vLLM's on, or a stream, translated if the request was."""
        (request,) = read.requests
        route, body, _ = self._translate(request, call)
        async with self.ask(route, body, headers=_session_of(call)) as response:
            if response.status != 200:
                raise _refused(response.status, await response.read(), request)
            kind = response.headers.get("content-type", media_types.JSON)
            if not request.streams:
                call.answer(Answer(id=call.id, type=kind), await response.read())
                return
            if not request.route:
                kind = read.stream_type(call.accept)
            texts, head = Chunks(), Answer(id=call.id, type=kind, more=True)
            last = data = b""
            # The first event comes in one piece: an error in it decides the status.
            while b"\n\n" not in data and len(data) < 1 << 16:
                if not (more := await response.content.readany()):
                    break
                data += more
            while data:
                if not request.route:
                    events = request.events(texts.read(data))
                    data = b"".join(write.event(event, kind) for event in events)
                last = last[-len(_BROKEN) :] + data
                if _BROKEN in last:
                    # vLLM ends such a stream as if it were complete.
                    event = last[last.index(_BROKEN) + len("data: ") :].partition(b"\n")[0]
                    message = error_of(event)["message"]
                    raise Fault(500, "stream_broken", f"vLLM's stream broke off: {message}")
                # The status is sent with the first chunk. Earlier failures have an error status.
                call.answer(head)
                if data:
                    await call.chunks.put(data)
                data = await response.content.readany()
            call.answer(head)
            await call.chunks.put(None)

    async def _answer_whole(self, call: Call, read: Exchange) -> None:
        """Answer a body once vLLM has answered its requests. A line of JSON Lines or CSV that is
        refused has its error as its answer."""
        spent = 0

        async def answer(request: ApiRequest) -> Any:
            nonlocal spent
            try:
                route, body, cost = self._translate(request, call, spent)
                spent += cost
                timeout, headers = self.settings.timeout, _session_of(call)
                status, answer = await self.answer(route, body, timeout, headers)
                if status != 200:
                    raise _refused(status, answer, request)
                return translation.prediction_of(request, json.loads(answer))
            except Fault as fault:
                if fault.status >= 500:
                    raise
                return fault

        tasks = [asyncio.create_task(answer(request)) for request in read.requests]
        try:
            predictions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        body, kind = read.write(predictions, call.accept)
        assert isinstance(body, bytes)
        call.answer(Answer(id=call.id, type=kind, headers=read.headers), body)


def _session_of(call: Call) -> dict[str, str]:
    """Return the header of a session of SageMaker's, if the request has one."""
    return {_SESSION: call.headers[_SESSION]} if _SESSION in call.headers else {}


def _number(value: Any) -> int:
    """Return a value as vLLM reads it, which accepts digits and floats, too; 0 for any other."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return int(value)
    return 0


def _refused(status: int, answer: bytes, request: ApiRequest) -> Fault:
    """Return one of vLLM's errors as a Fault."""
    error = error_of(answer)
    message = request.renamed(str(error["message"]))
    param = request.renamed(str(error.get("param") or "")) or None
    code = "bad_request" if status < 500 else "engine_error"
    if "--tool-call-parser" in message:
        message += (
            " Set SM_VLLM_ENABLE_AUTO_TOOL_CHOICE to true and SM_VLLM_TOOL_CALL_PARSER to the"
            " model's, or give tool_choice required or a function's name."
        )
    if "max_model_len" in message or "maximum context length" in message:
        code = "context_length_exceeded"
    return Fault(status, code, message, param)
