"""How many workers, of how many threads each: by a short measurement when a model is loaded.

As many workers as CPUs, of one thread each, are right for most models. A model whose weights are
much memory to read, or a host that has few requests at a time, may do better with fewer workers of
more threads. So each layout answers the same requests for a moment, all of them in turns, through
the pool that serves later; what is measured is what an endpoint would do, but for HTTP. The
outcome is kept in a file for the next start on the same host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import amphora
from amphora.common.devices import CPU
from amphora.serving.metrics import Metrics
from amphora.serving.pool.connections import Call
from amphora.serving.pool.pool import Pool
from amphora.serving.pool.spawner import ModelError, Spawner
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import Measure, ServerSettings

LOG = logging.getLogger("amphora.pool")
_ROUNDS = 2
# Of one layout in one round, and of all of it; what was begun then is still waited for, as long as
# one turn may take.
_TURN_SECONDS, _SECONDS = 0.8, 20.0
# The usual layout is left for one that is faster by so much in every round.
_GAIN = 1.05
_SMALL_FILE = 65536
# Variables that make a model faster or slower, beside those of the server's settings.
_NOT_DECISIVE = {"AMPHORA_ADAPTERS_FILE", "AMPHORA_MODEL_NAME", "AMPHORA_UI"}
_DECISIVE = ("AMPHORA_", "HF_TASK", "HF_MODEL_", "KMP_", "LD_PRELOAD", "MKL_", "OMP_", "ONEDNN_")


class Layout(NamedTuple):
    """How the CPUs are shared."""

    workers: int
    threads: int
    """Of each."""

    def __str__(self) -> str:
        return f"{self.workers} x {self.threads}"


class _Unmeasured(Exception):
    """Why the usual layout is taken."""


def open_pool(settings: ServerSettings, environ: Mapping[str, str], metrics: Metrics) -> Pool:
    """The pool of a model, which measures its layout at start if that is asked for."""
    settle = None
    if settings.measure is not None:
        settle = Measurement(settings, settings.measure, environ).settle
    return Pool(settings, environ, metrics, settle=settle)


def layouts(usual: Layout, measure: Measure) -> list[Layout]:
    """What is compared: the usual one first, then half as many workers again and again."""
    found = [usual]
    workers = min(measure.most, measure.cpus // (measure.threads or 1))
    while workers >= measure.least:
        layout = Layout(workers, measure.threads or max(1, measure.cpus // workers))
        if layout not in found:
            found.append(layout)
        workers //= 2
    return found


class Measurement:
    """That of one model."""

    def __init__(
        self, settings: ServerSettings, measure: Measure, environ: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._measure = measure
        self._environ = environ
        self._usual = Layout(settings.workers, settings.threads)
        self._layouts = layouts(self._usual, measure)

    async def settle(self, spawner: Spawner) -> tuple[int, int]:
        """Workers, and the threads of each: measured now, or earlier on this host.

        Raises:
            ModelError: The model cannot be loaded, or AMPHORA_MEASURE_REQUESTS names a file that
                cannot be read or whose requests are answered with errors.
        """
        try:
            if self._settings.device_kind != CPU:
                raise _Unmeasured("only CPUs are shared by measurement")
            bodies = self._own_requests()
            if len(self._layouts) == 1:
                raise _Unmeasured("there is no other way to share the CPUs")
            if (loaded := await spawner.load()) is None:
                raise _Unmeasured("each worker would load the model anew")
            bodies = bodies or [
                json.dumps(example).encode() for example in loaded.description.get("examples", ())
            ]
            if not bodies:
                raise _Unmeasured(
                    "no request is known that the model answers; give some in"
                    " AMPHORA_MEASURE_REQUESTS"
                )
            # It looks at each file of a model, which may lie on a slow disk.
            file = await asyncio.to_thread(self._file, bodies)
            if (known := self._kept(file)) is not None:
                LOG.info("Workers x threads: %s, as was measured before (%s).", known, file)
                return known
            best, rates = await self._fastest(spawner, bodies)
        except _Unmeasured as reason:
            LOG.info("Workers x threads: %s, not measured: %s.", self._usual, reason)
            return self._usual
        self._keep(file, best, rates)
        seen = ", ".join(f"{layout}: {fmean(each):.3g}" for layout, each in rates.items())
        LOG.info(
            "Workers x threads: %s, measured with %d requests at a time (answers a second: %s)."
            " Kept in %s; SAGEMAKER_MODEL_SERVER_WORKERS=%d and OMP_NUM_THREADS=%d settle it.",
            best, self._measure.clients, seen, file, best.workers, best.threads,
        )  # fmt: skip
        return best

    def _own_requests(self) -> list[bytes]:
        if not self._measure.requests:
            return []
        path = self._settings.model_dir / self._measure.requests
        try:
            lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        except OSError as error:
            raise ModelError(
                f"AMPHORA_MEASURE_REQUESTS names {path}, which cannot be read: {error.strerror}.",
                "Name a file in the model's folder with the JSON body of a request on each line,"
                " or leave it out.",
            ) from error
        if not lines:
            raise ModelError(
                f"AMPHORA_MEASURE_REQUESTS names {path}, which is empty.",
                "Give the JSON body of a request on each line.",
            )
        return lines

    async def _fastest(
        self, spawner: Spawner, bodies: Sequence[bytes]
    ) -> tuple[Layout, dict[Layout, list[float]]]:
        """The layout to take, and the answers a second of each, round by round."""
        rates: dict[Layout, list[float]] = {layout: [] for layout in self._layouts}
        end = time.monotonic() + _SECONDS
        most = _SECONDS / _ROUNDS / len(self._layouts)
        for number in range(_ROUNDS):
            # There and back, so that what changes meanwhile on the host meets all alike.
            for layout in self._layouts if number % 2 == 0 else self._layouts[::-1]:
                if time.monotonic() > end:
                    raise _Unmeasured(f"it would take more than {_SECONDS:g} s")
                rates[layout].append(await self._rate(layout, spawner, bodies, most))
        usual = rates[self._usual]
        better = [
            layout
            for layout, each in rates.items()
            if all(rate > _GAIN * own for rate, own in zip(each, usual, strict=True))
        ]
        return max(better, key=lambda layout: fmean(rates[layout]), default=self._usual), rates

    async def _rate(
        self, layout: Layout, spawner: Spawner, bodies: Sequence[bytes], most: float
    ) -> float:
        """Answers a second in one turn of a layout, which takes about `most` seconds at most."""
        room = max(self._settings.queue_limit, self._measure.clients)
        settings = replace(
            self._settings, workers=layout.workers, threads=layout.threads, queue_limit=room
        )
        pool = Pool(settings, self._environ, Metrics(), spawner)

        async def measured() -> float:
            while pool.living < layout.workers:
                if pool.failed.done():
                    raise pool.failed.result()
                await asyncio.sleep(0.002)
            # Each worker's first batches make kernels.
            await self._answers(pool, bodies, 0.0)
            began = time.monotonic()
            count = await self._answers(pool, bodies, min(most, _TURN_SECONDS))
            seconds = time.monotonic() - began
            while not pool.is_idle:
                await asyncio.sleep(0.002)
            return count / seconds

        pool.start()
        try:
            return await asyncio.wait_for(measured(), 2 * most)
        except asyncio.TimeoutError:
            raise _Unmeasured(f"a turn of {layout} took more than {2 * most:.3g} s") from None
        finally:
            await pool.close()

    async def _answers(self, pool: Pool, bodies: Sequence[bytes], seconds: float) -> int:
        """How many requests were answered. All clients ask until the time is over, once at least,
        so that what was begun is answered in the end, and all of it counts."""
        end = time.monotonic() + seconds

        async def ask(client: int) -> int:
            count = 0
            while count == 0 or time.monotonic() < end:
                # Each has another text at a time.
                await self._ask(pool, bodies[(client + count) % len(bodies)])
                count += 1
            return count

        tasks = [asyncio.create_task(ask(client)) for client in range(self._measure.clients)]
        try:
            return sum(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, pool: Pool, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        call = Call(
            id=os.urandom(8).hex(), body=body, content_type=media_types.JSON,
            accept=self._settings.default_accept, headers={},
            deadline=loop.time() + self._settings.timeout, reply=loop.create_future(),
        )  # fmt: skip
        try:
            pool.submit(call)
            reply = await call.reply
            if reply.status >= 400:
                raise Fault(
                    reply.status, "handler_failed", reply.body[:200].decode("utf-8", "replace")
                )
            while reply.chunks is not None and (chunk := await reply.chunks.get()) is not None:
                if isinstance(chunk, Exception):
                    raise chunk
                pool.took(call)
        except Fault as fault:
            said = f"{body[:80]!r} is answered {fault.status}: {str(fault)[:200]}"
            if not self._measure.requests:
                raise _Unmeasured(said) from fault
            raise ModelError(
                f"A request of AMPHORA_MEASURE_REQUESTS fails: {said}.",
                "Give requests that the model answers, or leave it out.",
            ) from fault

    def _file(self, bodies: Sequence[bytes]) -> Path:
        """Where the outcome is kept: its name is made of all that may change it."""
        settings = self._settings
        files = [
            (str(path.relative_to(folder)), path.stat().st_size, _content(path))
            for folder in dict.fromkeys((settings.model_dir, settings.code_dir))
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]
        variables = sorted(
            (name, value)
            for name, value in self._environ.items()
            if name.startswith(_DECISIVE) and name not in _NOT_DECISIVE
        )
        parts = (
            amphora.__version__, _processor(), self._layouts, self._measure.clients, files,
            settings.batch_size, settings.max_delay, settings.batch_tokens, settings.program,
            settings.submitted, variables,
        )  # fmt: skip
        key = hashlib.sha256(json.dumps(parts).encode())
        for body in bodies:
            key.update(b"\n" + body)
        folder = Path(tempfile.gettempdir()) / f"amphora-{os.getuid()}"
        return folder / f"workers-{key.hexdigest()[:20]}.json"

    def _kept(self, file: Path) -> Layout | None:
        """What was measured earlier, if that is one of today's layouts."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            # Others may write to the folder for temporary files, too.
            if file.parent.stat().st_uid == os.getuid():
                known = json.loads(file.read_text())
                layout = Layout(known["workers"], known["threads"])
                return layout if layout in self._layouts else None
        return None

    def _keep(self, file: Path, best: Layout, rates: Mapping[Layout, Sequence[float]]) -> None:
        """Write it for the next start, which measures again if it cannot be written."""
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            seen = {str(layout): each for layout, each in rates.items()}
            part.write_text(json.dumps({**best._asdict(), "answers a second": seen}))
            part.replace(file)


def _content(path: Path) -> str:
    """What a small file holds, which may say how a model computes; of weights the size does."""
    is_small = path.stat().st_size <= _SMALL_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if is_small else ""


def _processor() -> str:
    """The name of the host's CPUs, where it has one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip()
    return ""
