"""Reads the environment of SageMaker's hosting contract into one frozen `ServerSettings`.

Names are SageMaker's own if it has one; those that only Amphora knows start with AMPHORA_.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from amphora.common.devices import Devices
from amphora.common.variables import Variables, image_code
from amphora.serving.handler_files import code_folder

MIB = 1024 * 1024
MOST_TRANSFORM_MB = 100
"""The service's limit on a batch transform job: payload times concurrent requests."""
# The payload of a batch transform job if neither the job nor the container names one.
_TRANSFORM_MB = 6
ADAPTERS, ADAPTER_CONFIG = "adapters", "adapter_config.json"
"""The folder of the model's LoRA adapters, each in a folder of its name, and what peft writes."""
_USUAL_ADAPTERS = 64
# The first that is set counts.
_TIMEOUTS = (
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS",
    "SAGEMAKER_TS_RESPONSE_TIMEOUT",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT",
)
# Set by SageMaker or its SDKs on an endpoint, and not a setting of this server.
_ENDPOINT_VARIABLES = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "SAGEMAKER_CONTAINER_LOG_LEVEL",
    "SAGEMAKER_REGION",
    "SAGEMAKER_SAFE_PORT_RANGE",
)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything that `amphora serve` reads from its environment."""

    model_name: str = "model"
    """The multi-model API's name of the model."""
    model_dir: Path
    """The unpacked model.tar.gz; read-only on SageMaker."""
    image_code: Path
    """The folder with the image's own inference.py."""
    code_dir: Path
    """The user's code folder; it need not exist."""
    submitted: str
    """An archive with the user's code, on S3 or in a file, used instead of `code_dir`; or ''."""
    program: str | None
    """SAGEMAKER_PROGRAM: the user's file in `code_dir`; None means inference.py, if it is there."""
    default_accept: str
    address: str = "127.0.0.1"
    """The interface that is listened on."""
    port: int
    workers: int
    threads: int
    """CPU threads of each worker."""
    accelerators: int
    device_kind: str
    batch_size: int
    """The most requests merged into one prediction."""
    max_delay: float
    """The longest time that a request waits for others to join its batch, in seconds."""
    batch_tokens: int
    """The most tokens in one prediction, padding included."""
    queue_limit: int
    """Requests that may wait; one more is answered 503."""
    most_written: int
    """The most tokens that vLLM may generate for one request."""
    connections: int
    """The most connections that may be open at a time."""
    client_timeout: int
    """Seconds that a client may keep the server waiting."""
    timeout: float
    """Seconds from the arrival of a request to the start of its answer."""
    startup_timeout: float
    max_body: int
    """The most bytes of a request's body, both as it arrives and decoded."""
    transform_payload: int
    """The most MiB in one request of a batch transform job."""
    adapters: int
    """The most LoRA adapters of the model that may be loaded at a time; 0: it takes none."""
    generation: str = ""
    """What generates text: vllm or transformers; '': vLLM if it can."""
    is_multi_model: bool
    is_transform: bool
    """Whether the server runs for a batch transform job, which fails by a single 400."""
    shows_page: bool
    """Whether `/` is a page to try the model: on a laptop, not on an endpoint."""

    @property
    def url(self) -> str:
        """Return the server's address, as a client on this host writes it."""
        host = "localhost" if self.address in ("0.0.0.0", "127.0.0.1") else self.address
        return f"http://{host}:{self.port}"


def read(base_dir: Path, environ: Mapping[str, str], devices: Devices) -> ServerSettings:
    """Read the settings. Raises ConfigError with each wrong variable, its value and a remedy."""
    env = Variables(environ)
    most_useful = devices.accelerators or devices.cpus
    least = env.number("SAGEMAKER_TS_MIN_WORKERS", 1, least=1)
    most = env.number("SAGEMAKER_TS_MAX_WORKERS", max(most_useful, least), least=1)
    usual = min(max(most_useful, least), most)
    workers = env.number("SAGEMAKER_MODEL_SERVER_WORKERS", usual, least=1)
    threads = env.number("OMP_NUM_THREADS", max(1, devices.cpus // workers), least=1)
    # The last one is documented in seconds. An old server read it as minutes, but an endpoint gives
    # up after one minute.
    timeout_name = next(filter(env.text, _TIMEOUTS[:-1]), _TIMEOUTS[-1])
    model_dir = base_dir / "model"
    # 0 means no limit in a transform job, and 1 GiB here, since a body is held in memory.
    payload_mib = env.number("SAGEMAKER_MAX_PAYLOAD_IN_MB", 25.0, least=0) or 1024
    max_body = int(payload_mib * MIB)
    most_transform = MOST_TRANSFORM_MB if env.text("SAGEMAKER_MAX_PAYLOAD_IN_MB") else _TRANSFORM_MB
    submitted = env.text("SAGEMAKER_SUBMIT_DIRECTORY")
    submitted_path = Path(submitted.removeprefix("file://"))
    is_archive = submitted.startswith("s3://") or submitted_path.is_file()
    is_folder = submitted_path.is_absolute() and submitted_path.is_dir()
    program = env.text("SAGEMAKER_PROGRAM") or None
    is_multi_model = env.flag("SAGEMAKER_MULTI_MODEL")
    generation = env.text("AMPHORA_GENERATION").lower()
    if generation not in ("", "vllm", "transformers"):
        env.refuse(f"AMPHORA_GENERATION is {generation!r}. Give vllm or transformers.")
    is_laptop = not any(map(env.text, _ENDPOINT_VARIABLES))
    settings = ServerSettings(
        model_dir=model_dir,
        image_code=image_code(environ),
        code_dir=submitted_path if is_folder else code_folder(model_dir, program),
        submitted=submitted if is_archive else "",
        program=program,
        default_accept=env.text("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT") or "application/json",
        # Outside of the images, which set it, the server is not open to the network by default.
        address=env.text("AMPHORA_BIND") or "127.0.0.1",
        port=env.number("SAGEMAKER_BIND_TO_PORT", 8080, least=1, most=65535),
        workers=workers,
        threads=threads,
        accelerators=devices.accelerators,
        device_kind=devices.kind,
        batch_size=env.number("SAGEMAKER_TS_BATCH_SIZE", 32, least=1),
        max_delay=env.number("SAGEMAKER_TS_MAX_BATCH_DELAY", 20.0, least=0) / 1000,
        batch_tokens=env.number("AMPHORA_BATCH_TOKENS", 16384, least=1),
        queue_limit=env.number("AMPHORA_QUEUE_LIMIT", 512, least=1),
        connections=env.number("AMPHORA_MAX_CONNECTIONS", 4096, least=1),
        client_timeout=env.number("AMPHORA_CLIENT_TIMEOUT", 75, least=1),
        most_written=env.number("AMPHORA_MAX_TOKENS_WRITTEN", 262_144, least=1),
        timeout=env.number(timeout_name, 60.0, least=0.001),
        startup_timeout=env.number("SAGEMAKER_STARTUP_TIMEOUT", 480.0, least=1),
        max_body=max_body,
        transform_payload=min(max(1, max_body // MIB), most_transform),
        adapters=_read_adapters(env, model_dir / ADAPTERS, is_multi_model),
        generation=generation,
        is_multi_model=is_multi_model,
        # Set by the service.
        is_transform=env.flag("SAGEMAKER_BATCH"),
        shows_page=env.flag("AMPHORA_UI") if env.text("AMPHORA_UI") else is_laptop,
    )
    env.check()
    return settings


def _read_adapters(env: Variables, folder: Path, is_multi_model: bool) -> int:
    """Return AMPHORA_ADAPTERS, and refuse adapters that requests could not name or load."""
    complete = {path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}")}
    most = env.number("AMPHORA_ADAPTERS", _USUAL_ADAPTERS if complete else 0, least=0)
    if not most:
        return 0
    if is_multi_model:
        env.refuse(
            f"AMPHORA_ADAPTERS is {most}, and SAGEMAKER_MULTI_MODEL is true. Leave the first "
            "out: each adapter is loaded as a model of its own, merged into its base."
        )
        return most
    folders = (path for path in folder.glob("*") if path.is_dir())
    names = sorted(path.name for path in folders if path.name[0] not in "._")
    value = f"AMPHORA_ADAPTERS is {most}, and {folder}"
    base = env.text("AMPHORA_MODEL_NAME") or env.text("HF_MODEL_ID") or "model"
    if len(names) > most:
        env.refuse(f"{value} holds {len(names)} adapters. Raise it, or take some out.")
    for name in names:
        if name not in complete:
            env.refuse(
                f"{value} holds {name}/, which has no {ADAPTER_CONFIG}. Put there what peft has"
                " saved of one adapter, take the folder out, or set AMPHORA_ADAPTERS to 0."
            )
        # /v1/models lists the base by this name.
        if name == base:
            env.refuse(
                f"{value} holds {base!r}, which is the name of the base: a request could mean"
                " either. Rename the folder, or name the base by AMPHORA_MODEL_NAME."
            )
    return most
