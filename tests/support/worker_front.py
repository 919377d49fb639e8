"""The front's side of a worker that runs in a thread of the test's process, over its socket."""

from __future__ import annotations

import contextlib
import json
import socket
import textwrap
import threading
from pathlib import Path
from typing import Any

from amphora.serving.protocol import framing
from amphora.serving.worker import conversation, handlers, runner
from tests.support.paths import CODE


class Front:
    """The front's side of a worker that runs in a thread here."""

    def __init__(self, folder: Path, code: str | None) -> None:
        """
        Args:
            folder: The model's.
            code: Its handlers; None: the image's own.
        """
        if code is not None:
            (folder / "code").mkdir()
            (folder / "code" / "inference.py").write_text(textwrap.dedent(code))
        settings = runner.RunnerSettings(
            model_dir=str(folder), device_kind="cpu", device_index=0, batch_size=4,
            batch_tokens=1000,
        )  # fmt: skip
        loaded = runner.load(handlers.resolve(folder / "code", None, CODE), settings)
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(240)
        self.number = 0
        self.thread = threading.Thread(target=self._serve, args=(theirs, loaded))
        self.thread.start()

    def _serve(self, sock: socket.socket, loaded: runner.ModelRunner) -> None:
        with sock, contextlib.suppress(EOFError):
            conversation.serve(sock, loaded)

    def send(self, **requests: Any) -> None:
        self.number += 1
        bodies = {name: json.dumps(value).encode() for name, value in requests.items()}
        entries = [
            {"id": name, "size": len(body), "content_type": "application/json",
             "accept": "application/json", "headers": {}, "session": ""}
            for name, body in bodies.items()
        ]  # fmt: skip
        header = {"op": "batch", "batch": self.number, "items": entries}
        self.sock.sendall(framing.pack(header, b"".join(bodies.values())))

    def tell(self, **header: Any) -> None:
        self.sock.sendall(framing.pack(header))

    def until_idle(self) -> list[tuple[dict[str, Any], bytes]]:
        frames = []
        while not frames or (frames[-1][0].get("op"), frames[-1][0].get("batch")) != (
            "idle",
            self.number,
        ):
            frames.append(framing.receive(self.sock))
        return frames

    def until(self, op: str) -> list[tuple[dict[str, Any], bytes]]:
        frames = [framing.receive(self.sock)]
        while frames[-1][0].get("op") != op:
            frames.append(framing.receive(self.sock))
        return frames


def answers(frames: list[tuple[dict[str, Any], bytes]]) -> dict[str, Any]:
    """What each request was answered, in the order of the answers."""
    return {
        header["id"]: json.loads(body) if body else header.get("error", {}).get("code")
        for header, body in frames
        if "status" in header
    }
