"""The hosting contract's environment, read once into one frozen `Hosting`.

Names are SageMaker's own where it has one; those that only Amphora knows begin with AMPHORA_.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from amphora.common.devices import Devices
from amphora.common.errors import ConfigError

T = TypeVar("T")
MIB = 1024 * 1024
MOST_TRANSFORM_MB = 100
"""Payload times concurrent requests of a batch transform job, at most, by the service's rule."""
# What the service takes where neither the job nor the container says.
_TRANSFORM_MB = 6
_ENDLESS_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one client may take of the server."""

    header_bytes: int = 65536
    header_count: int = 128
    header_seconds: float = 20.0
    """From a connection's beginning, or a request's first byte, to the last of its headers."""
    body_seconds: float = 20.0
    """The longest pause in a body, of a request or of an answer that the client reads."""
    body_rate: float = 512.0
    """Bytes in a second, on average, that a body must come or be read at."""
    keep_alive_seconds: float = 75.0
    """From an answer to the next request in the same connection."""
    connections: int = 4096


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """How one container answers: everything `amphora serve` takes from its environment."""

    model_name: str = "model"
    """The multi-model API's name of the model."""
    model_dir: Path
    """The unpacked model.tar.gz; read-only on SageMaker."""
    image_code: Path
    """The folder with the image's own inference.py."""
    code_dir: Path
    """The user's code folder; it need not exist."""
    submitted: str
    """An archive with the user's code, on S3 or in a file; it takes the place of `code_dir`."""
    program: str | None
    """SAGEMAKER_PROGRAM: the user's file in `code_dir`; None means inference.py, if it is there."""
    default_accept: str
    port: int
    workers: int
    threads: int
    """CPU threads of each worker."""
    accelerators: int
    device_kind: str
    batch_size: int
    """The most requests merged into one prediction."""
    max_delay: float
    """The longest that a request waits for others to join its batch, in seconds."""
    batch_tokens: int
    """The most tokens, padding included, in one prediction."""
    queue_limit: int
    """Requests that may wait; one more is answered 503."""
    timeout: float
    """Seconds from a request's arrival to its answer's beginning."""
    startup_timeout: float
    max_body: int
    """Bytes of a request's body, as it comes and decoded."""
    transform_payload: int
    """The MiB that batch transform is told to send at most in one request."""
    bounds: Bounds
    session_lifetime: float
    """Seconds after which a session that nobody uses ends."""
    is_multi_model: bool
    shows_page: bool
    """Whether `/` is a page to try the model, as on a laptop, and not on an endpoint."""


def read(base_dir: Path, environ: Mapping[str, str], devices: Devices) -> Hosting:
    """Raises ConfigError, naming the variable, its value and what it may be."""
    env = _Environment(environ)
    workers = _workers(env, devices)
    model_dir = base_dir / "model"
    # A transform job says 0 for bodies of any length; here one is held in memory, whole.
    payload_mib = env.number("SAGEMAKER_MAX_PAYLOAD_IN_MB", 25.0, float, least=0)
    max_body = int((payload_mib or _ENDLESS_MIB) * MIB)
    return Hosting(
        model_dir=model_dir,
        image_code=image_code(environ),
        code_dir=_code_dir(env, model_dir),
        submitted=_archive(env),
        program=env.text("SAGEMAKER_PROGRAM") or None,
        default_accept=env.text("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT") or "application/json",
        port=_port(env),
        workers=workers,
        threads=env.number("OMP_NUM_THREADS", max(1, devices.cpus // workers), int, least=1),
        accelerators=devices.accelerators,
        device_kind=devices.kind,
        batch_size=env.number("SAGEMAKER_TS_BATCH_SIZE", 32, int, least=1),
        max_delay=env.number("SAGEMAKER_TS_MAX_BATCH_DELAY", 20.0, float, least=0) / 1000,
        batch_tokens=env.number("AMPHORA_BATCH_TOKENS", 16384, int, least=1),
        queue_limit=env.number("AMPHORA_QUEUE_LIMIT", 512, int, least=1),
        timeout=_timeout(env),
        startup_timeout=env.number("SAGEMAKER_STARTUP_TIMEOUT", 480.0, float, least=1),
        max_body=max_body,
        transform_payload=_transform_payload(env, max_body),
        bounds=_bounds(env),
        session_lifetime=env.number("AMPHORA_SESSION_SECONDS", 1200.0, float, least=0),
        is_multi_model=env.flag("SAGEMAKER_MULTI_MODEL"),
        shows_page=_shows_page(env, environ),
    )


def image_code(environ: Mapping[str, str]) -> Path:
    """Where the image keeps its own handlers: /opt/amphora/code, or code/ of a source checkout."""
    if named := environ.get("AMPHORA_CODE_DIR"):
        return Path(named)
    checkout = Path(__file__).resolve().parents[3] / "code"
    return checkout if (checkout / "inference.py").is_file() else Path("/opt/amphora/code")


class _Environment:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def flag(self, name: str) -> bool:
        value = self.text(name).lower()
        if value not in ("", "0", "1", "true", "false"):
            raise ConfigError(f"{name} is {value!r}.", "Give true or false, or leave it out.")
        return value in ("1", "true")

    def number(self, name: str, default: T, cast: Callable[[str], T], least: float) -> T:
        value = self.text(name)
        if not value:
            return default
        try:
            number = cast(value)
        except ValueError:
            number = None
        # Written so that nan is refused too.
        if number is None or not least <= number < float("inf"):  # type: ignore[operator]
            raise ConfigError(
                f"{name} is {value!r}.", f"Give a number of at least {least:g}, or leave it out."
            )
        return number


# What a person on a laptop may set too; every other SAGEMAKER_ name speaks of an endpoint.
_LOCAL = {"SAGEMAKER_BASE_DIR", "SAGEMAKER_BIND_TO_PORT"}


def _shows_page(env: _Environment, environ: Mapping[str, str]) -> bool:
    if env.text("AMPHORA_UI"):
        return env.flag("AMPHORA_UI")
    return not any(name.startswith("SAGEMAKER_") and name not in _LOCAL for name in environ)


def _workers(env: _Environment, devices: Devices) -> int:
    default = devices.accelerators or devices.cpus
    least = env.number("SAGEMAKER_TS_MIN_WORKERS", 1, int, least=1)
    most = env.number("SAGEMAKER_TS_MAX_WORKERS", max(default, least), int, least=1)
    if least > most:
        raise ConfigError(
            f"SAGEMAKER_TS_MIN_WORKERS is {least}, SAGEMAKER_TS_MAX_WORKERS is {most}.",
            "The least cannot be above the most.",
        )
    return env.number(
        "SAGEMAKER_MODEL_SERVER_WORKERS", min(max(default, least), most), int, least=1
    )


def _port(env: _Environment) -> int:
    port = env.number("SAGEMAKER_BIND_TO_PORT", 8080, int, least=1)
    if port > 65535:
        raise ConfigError(f"SAGEMAKER_BIND_TO_PORT is {port}.", "A port is at most 65535.")
    return port


def _timeout(env: _Environment) -> float:
    for name in ("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "SAGEMAKER_TS_RESPONSE_TIMEOUT"):
        if env.text(name):
            return env.number(name, 60.0, float, least=0.001)
    # Seconds by its documentation; an old server read it as minutes, and an hour of waiting helps
    # nobody behind an endpoint that gives up after one minute.
    return env.number("SAGEMAKER_MODEL_SERVER_TIMEOUT", 60.0, float, least=0.001)


def _bounds(env: _Environment) -> Bounds:
    usual = Bounds()
    seconds = 0.001
    return Bounds(
        header_bytes=env.number("AMPHORA_HEADER_BYTES", usual.header_bytes, int, least=256),
        header_count=env.number("AMPHORA_HEADER_COUNT", usual.header_count, int, least=1),
        header_seconds=env.number(
            "AMPHORA_HEADER_SECONDS", usual.header_seconds, float, least=seconds
        ),
        body_seconds=env.number("AMPHORA_BODY_SECONDS", usual.body_seconds, float, least=seconds),
        body_rate=env.number("AMPHORA_BODY_RATE", usual.body_rate, float, least=1),
        keep_alive_seconds=env.number(
            "AMPHORA_KEEP_ALIVE_SECONDS", usual.keep_alive_seconds, float, least=seconds
        ),
        connections=env.number("AMPHORA_CONNECTIONS", usual.connections, int, least=1),
    )


def _transform_payload(env: _Environment, max_body: int) -> int:
    most = MOST_TRANSFORM_MB if env.text("SAGEMAKER_MAX_PAYLOAD_IN_MB") else _TRANSFORM_MB
    return min(max(1, max_body // MIB), most)


def _code_dir(env: _Environment, model_dir: Path) -> Path:
    submitted = env.text("SAGEMAKER_SUBMIT_DIRECTORY").removeprefix("file://")
    if submitted.startswith(os.sep) and Path(submitted).is_dir():
        return Path(submitted)
    return model_dir / "code"


def _archive(env: _Environment) -> str:
    """SAGEMAKER_SUBMIT_DIRECTORY where it is an archive; a folder that is not there is none."""
    place = env.text("SAGEMAKER_SUBMIT_DIRECTORY")
    is_file = Path(place.removeprefix("file://")).is_file()
    return place if place.startswith("s3://") or is_file else ""
