"""Batches that a worker reads while its device computes the one before: alike, and without pauses?

On a CPU a stand-in takes the device's time for each call (`--smoke`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

from stage import CODE, ROOT, Failed, Stage, Values, table

import torch  # isort: skip

from recipe.inference import loaded_model, rows

sys.path.insert(0, str(ROOT / "container"))

from amphora.serving.protocol import framing
from amphora.serving.worker import batches as conversation
from amphora.serving.worker import handlers, runner

SIZE = 32
STAND_IN = 0.3
"""Seconds that a device takes for a call where there is none."""
_WORDS = ["film", "was", "the", "a", "good", "bad", "great", "awful", "plot", "cast", "music"]


class Front:
    """The front's side of a worker with the image's handlers, which runs in a thread here."""

    def __init__(self, folder: Path, kind: str) -> None:
        settings = runner.RunnerSettings(
            model_dir=str(folder), device_kind=kind, device_index=0, batch_size=SIZE,
            batch_tokens=16384,
        )  # fmt: skip
        loaded = runner.load(handlers.resolve(folder / "code", None, CODE), settings)
        self.sock, theirs = socket.socketpair()
        self._number = 0
        self.thread = threading.Thread(target=self._serve, args=(theirs, loaded))
        self.thread.start()

    def _serve(self, sock: socket.socket, loaded: runner.ModelRunner) -> None:
        with sock, contextlib.suppress(EOFError):
            conversation.serve(sock, loaded)

    def ask(self, texts: list[str], is_ahead: bool) -> dict[str, Any]:
        """The answers to texts in batches, each of which is sent when the one before is answered,
        or, ahead, when the worker takes another one."""
        answers: dict[str, Any] = {}
        kind = "application/json"
        for start in range(0, len(texts), SIZE):
            self._number += 1
            some = texts[start : start + SIZE]
            bodies = [json.dumps({"inputs": text}).encode() for text in some]
            items = [
                {"id": text, "size": len(body), "content_type": kind, "accept": kind,
                 "headers": {}, "session": ""}
                for text, body in zip(some, bodies, strict=True)
            ]  # fmt: skip
            header = {"op": "batch", "batch": self._number, "items": items}
            self.sock.sendall(framing.pack(header, b"".join(bodies)))
            is_last = start + SIZE >= len(texts)
            while True:
                header, body = framing.receive(self.sock)
                if "status" in header:
                    answers[header["id"]] = json.loads(body)
                elif header["batch"] == self._number and (
                    header["op"] == "idle" or (header.get("ahead") and is_ahead and not is_last)
                ):
                    break
        return answers


class Clock:
    """When a device began and ended each call of `LoadedModel`, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def pauses(self) -> list[float]:
        """Seconds between the calls so far, which are forgotten."""
        spans, self._spans = self._spans, []
        between = [(end, begin) for (_, end), (begin, _) in itertools.pairwise(spans)]
        if not self._is_cuda:
            return [begin - end for end, begin in between]
        torch.cuda.synchronize()
        return [end.elapsed_time(begin) / 1000 for end, begin in between]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Calls are seen meanwhile. On a CPU each is on a device that is not there for STAND_IN,
        from when its numbers were given."""
        compute, arrive = loaded_model.LoadedModel._values, rows.Coming.__init__

        def values(*args: Any) -> rows.Values:
            if not self._is_cuda:
                begin = max(time.monotonic(), self._spans[-1][1] if self._spans else 0.0)
                self._spans.append((begin, begin + STAND_IN))
                return compute(*args)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            found = compute(*args)
            events[1].record()
            self._spans.append((events[0], events[1]))
            return found

        def coming(own: rows.Coming, values: rows.Values) -> None:
            arrive(own, values)
            _, end = self._spans[-1]
            own._is_there = SimpleNamespace(
                query=lambda: time.monotonic() >= end,
                synchronize=lambda: time.sleep(max(0.0, end - time.monotonic())),
            )

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(loaded_model.LoadedModel, "_values", values))
            if not self._is_cuda:
                stack.enter_context(mock.patch.object(rows.Coming, "__init__", coming))
            yield


def batches(stage: Stage, folder: Path) -> Values:
    """Batches of 32 short texts, each after the answers of the one before and each ahead of them:
    the same answers, and the seconds that the device waits between two calls."""
    count = SIZE * (5 if stage.smoke else 200)
    texts = [f"{_WORDS[n % 11]} {_WORDS[n % 7]} {n}" for n in range(count)]
    clock = Clock(stage.device)
    front = Front(folder, stage.device.type)
    found, seen = {}, []
    with clock.watching():
        try:
            front.ask(texts[: 2 * SIZE], is_ahead=False)
            for is_ahead in (False, True) * (1 if stage.smoke else 3):
                clock.pauses()
                began = time.perf_counter()
                found[is_ahead] = front.ask(texts, is_ahead)
                seconds = time.perf_counter() - began
                seen.append({
                    "batches": "ahead" if is_ahead else "apart",
                    "texts/s": round(count / seconds),
                    "ms of a pause": round(1000 * median(clock.pauses()), 3),
                })  # fmt: skip
        finally:
            front.sock.close()
            front.thread.join(30)
    print(table(seen), flush=True)
    others = sum(found[True][text][0]["label"] != found[False][text][0]["label"] for text in texts)
    values = {"rows": seen, "other labels": others}
    if len(found[True]) != count or others > 0.01 * count:
        raise Failed("other answers ahead", **values)
    apart, ahead = (
        min(row["ms of a pause"] for row in seen if row["batches"] == way)
        for way in ("apart", "ahead")
    )
    if not ahead < apart:
        raise Failed("the device waits as long as before", **values)
    return values
