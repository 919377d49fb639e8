"""A server to measure beside: how it is installed, started and asked."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.24.0"


def inputs_body(texts: Sequence[str]) -> Any:
    """One text as `{"inputs": text}`, several as `{"inputs": [text, ...]}`."""
    return {"inputs": texts[0] if len(texts) == 1 else list(texts)}


def list_body(texts: Sequence[str]) -> Any:
    """`{"inputs": [text, ...]}`."""
    return {"inputs": list(texts)}


def as_it_is(answer: Any) -> list[Any]:
    """An answer that is a list with one value for each text."""
    if not isinstance(answer, list):
        raise ValueError(f"not a list: {str(answer)[:200]}")
    return answer


@dataclass(frozen=True)
class Launch:
    """How a server is started, and how it is asked."""

    command: list[str]
    environ: Mapping[str, str]
    port: int
    path: str
    """Of its invocations."""
    body: Callable[[Sequence[str]], Any] = inputs_body
    """What it is asked for texts, as JSON."""
    values: Callable[[Any], list[Any]] = as_it_is
    """One value for each text, of its answer: a label with its score, a vector or a text."""


@dataclass(frozen=True)
class Peer:
    """A server of today."""

    name: str
    requirements: tuple[str, ...]
    prepare: Callable[[Path, Path, Path, str], Launch]
    """(the venv's bin, an empty folder, the model, the task) to how it is started."""

    def install(self, root: Path) -> Path:
        """Its virtual environment's bin, made where it is not there yet. Needs a package index.

        Nothing is shared with this Python's own packages: what a peer finds there by chance would
        be measured as its own.

        Raises:
            SystemExit: It cannot be installed; with what pip said last.
        """
        # One for all ways to start it, which a comma parts from its name.
        name = self.name.partition(",")[0].strip("`").lower().replace(" ", "-")
        made = hashlib.sha256(
            repr((os.path.realpath(sys.executable), self.requirements)).encode()
        ).hexdigest()
        folder = root / f"{name}-{made[:12]}"
        if (folder / ".made").is_file():
            return folder / "bin"
        print(f"Installing {self.name} into {folder}.", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        run([*pip, *self.requirements], f"{self.name} cannot be installed")
        (folder / ".made").touch()
        return folder / "bin"


def run(command: Sequence[str], what: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a command to its end. Returns its output. Raises SystemExit, with the end of it."""
    done = subprocess.run(
        command, env={**os.environ, **(environ or {})}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{what}: {' '.join(command[:6])} said\n{done.stdout[-2000:]}")
    return done.stdout


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def environ_of(folder: Path, tools: Path, **more: str) -> dict[str, str]:
    """Return a peer's environment: one thread, its own temporary folder, no network."""
    (folder / "tmp").mkdir()
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return {
        "PATH": path, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", **quiet, **more
    }  # fmt: skip


def written(value: Any) -> str:
    """JSON on one line."""
    return json.dumps(value, separators=(",", ":"))
