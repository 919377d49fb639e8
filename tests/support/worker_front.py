"""A worker's runner in the test's process, and the front's side of a worker that runs in a thread here."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from amphora.common import devices
from amphora.serving import settings as server_settings
from amphora.serving.protocol import messages
from amphora.serving.worker import conversation, handlers, runner
from amphora.serving.worker.context import Context
from amphora.serving.worker.runner import ModelRunner
from tests.support.paths import CODE
from tests.support.servers import write_code

JSON = "application/json"


def load_runner(
    model: Path,
    program: str | None = None,
    batch_size: int = 32,
    batch_tokens: int = 16384,
    kind: str = devices.CPU,
) -> ModelRunner:
    """Load a model's folder with the handlers in its code/, as a worker of a `kind` of device."""
    settings = replace(
        server_settings.read(model.parent, {}, devices.detect({})), model_dir=model,
        device_kind=kind, batch_size=batch_size, batch_tokens=batch_tokens,
    )  # fmt: skip
    return runner.load(handlers.resolve(model / "code", program, CODE, model), settings)


def ask(
    loaded: ModelRunner, body: bytes, content_type: str = JSON, accept: str = JSON, **more: str
) -> tuple[bytes, str, Context]:
    """Return a runner's answer to a request: its body and type, and its context."""
    headers = {"content-type": content_type, "accept": accept, **more}
    context = Context("an-id", headers, loaded.settings)
    item = runner.Item("an-id", body, content_type, accept, context)
    if "predict_batch_fn" not in loaded.handlers:
        return *loaded.answer(item), context
    loaded.read_input(item)
    return *loaded.finish(item, *loaded.predict_batch([item])), context


class Front:
    """The front's side of a worker that runs in a thread here."""

    def __init__(
        self,
        folder: Path,
        code: str | None,
        batch_size: int = 4,
        batch_tokens: int = 1000,
        kind: str = devices.CPU,
    ) -> None:
        """
        Args:
            folder: The model's.
            code: Its handlers; None: the image's own.
            kind: The device that the worker takes itself to have.
        """
        if code is not None:
            write_code(folder, {"code/inference.py": code})
        loaded = load_runner(folder, None, batch_size, batch_tokens, kind)
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(240)
        self.number = 0
        self.thread = threading.Thread(target=self._serve, args=(theirs, loaded))
        self.thread.start()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def _serve(self, sock: socket.socket, loaded: ModelRunner) -> None:
        with sock, contextlib.suppress(EOFError):
            conversation.Conversation(sock, loaded).serve()

    def send(self, **requests: Any) -> None:
        self.number += 1
        bodies = {
            name: value if isinstance(value, bytes) else json.dumps(value).encode()
            for name, value in requests.items()
        }
        entries = [
            {"id": name, "size": len(body), "content_type": "application/json",
             "accept": "application/json", "headers": {}, "path": "/invocations"}
            for name, body in bodies.items()
        ]  # fmt: skip
        self.tell(messages.Batch(batch=self.number, items=entries), b"".join(bodies.values()))

    def tell(self, message: messages.Message, body: bytes = b"") -> None:
        self.sock.sendall(messages.pack(message, body))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the fields of the next message, and its body."""
        message, body = messages.receive(self.sock)
        return vars(message), body

    def until(self, state: str = "idle") -> list[tuple[dict[str, Any], bytes]]:
        """Return what comes until the worker is in a state; idle, with the last batch behind it."""
        frames = []
        while True:
            frames.append(self.receive())
            header = frames[-1][0]
            if header.get("state") == state and (state != "idle" or header["batch"] == self.number):
                return frames


def answers(frames: list[tuple[dict[str, Any], bytes]]) -> dict[str, Any]:
    """What each request was answered, in the order of the answers."""
    return {
        header["id"]: json.loads(body) if body else header.get("error", {}).get("code")
        for header, body in frames
        if "status" in header
    }
