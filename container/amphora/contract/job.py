"""Reads the training contract, the tree under /opt/ml, into a frozen `Job`.

Source: "How Amazon SageMaker AI provides training information" of the developer guide, and
sagemaker-training 5.1.4, whose names and encodings the SDKs and users' scripts rely on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amphora.common.errors import ConfigError

DEFAULT_BASE_DIR = "/opt/ml"
UNPREFIXED_KEYS = frozenset({"_tuning_objective_metric", "default_user_module_name"})
"""Keys of the platform without its prefix."""
# What argv and variables cannot hold; U+DC80 to U+DCFF stand for bytes.
_UNREPRESENTABLE = re.compile(r"[\0\ud800-\udc7f\udd00-\udfff]")


class Paths:
    """Names the folders and files of one job, below SAGEMAKER_BASE_DIR."""

    def __init__(self, base: Path) -> None:
        self.base, self.input, self.output = base, base / "input", base / "output"
        self.model, self.code = base / "model", base / "code"
        self.config, self.data = self.input / "config", self.input / "data"
        self.output_data = self.output / "data"
        self.output_intermediate = self.output / "intermediate"
        self.failure = self.output / "failure"
        """Its first 1,024 characters become the job's FailureReason."""
        self.success = self.output / "success"
        """An empty file, written once the job has succeeded."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Paths:
        return cls(Path(environ.get("SAGEMAKER_BASE_DIR") or DEFAULT_BASE_DIR).absolute())

    @property
    def checkpoints(self) -> Path:
        """Return the folder that is uploaded during the job: LocalPath of checkpointconfig.json.

        A path below /opt/ml moves with the tree.
        """
        settings = _read_object(self.config / "checkpointconfig.json", {})
        local = Path(settings.get("LocalPath") or f"{DEFAULT_BASE_DIR}/checkpoints")
        is_inside = local.is_relative_to(DEFAULT_BASE_DIR)
        return self.base / local.relative_to(DEFAULT_BASE_DIR) if is_inside else local


@dataclass(frozen=True, kw_only=True)
class Job:
    """Holds the configuration of one training job, with JSON values decoded."""

    paths: Paths
    hyperparameters: Mapping[str, Any]
    """The user's, without the platform's keys."""
    arguments: Mapping[str, Any]
    """The same, for argv: a number that came as text keeps its spelling ('1.10')."""
    sagemaker: Mapping[str, Any]
    """The platform's hyperparameters, such as sagemaker_program."""
    input_data_config: Mapping[str, Any]
    resource_config: Mapping[str, Any]
    hosts: tuple[str, ...]
    """Sorted: the order is the rank."""
    current_host: str
    entry_point: str | None
    """The user's script, or None if the image's recipe runs."""
    submit_directory: str
    """The source of the user's code: s3://, a tarball or a folder."""
    log_level: int = 20

    @property
    def channels(self) -> dict[str, Path]:
        return {name: self.paths.data / name for name in sorted(self.input_data_config)}

    @property
    def instance_group(self) -> str:
        return str(self.resource_config.get("current_group_name", "homogeneousCluster"))

    @property
    def instance_groups(self) -> dict[str, dict[str, Any]]:
        """Return the groups by name, their hosts sorted: SageMaker lists them in any order."""
        groups = self.resource_config.get("instance_groups") or []
        return {
            group["instance_group_name"]: {**group, "hosts": sorted(group["hosts"])}
            for group in groups
        }

    @property
    def network_interface(self) -> str:
        return str(self.resource_config.get("network_interface_name", "eth0"))

    def wants(self, key: str) -> bool:
        """Return whether a `sagemaker_..._enabled` switch is on. Raises ConfigError if unclear."""
        value = str(self.sagemaker.get(key) or False).lower()
        if value not in ("true", "1", "false", "0"):
            raise ConfigError(f"{key} is {self.sagemaker[key]!r}.", "Give true or false.")
        return value in ("true", "1")


def read_job(environ: Mapping[str, str]) -> Job:
    """Read the job under SAGEMAKER_BASE_DIR. Raises ConfigError if a file breaks the contract."""
    paths = Paths.from_environment(environ)
    if not paths.config.is_dir():
        raise ConfigError(
            f"There is no configuration folder {paths.config}.",
            "Name the data (amphora train FILE --model FOLDER_OR_NAME), run the image as a "
            "SageMaker training job, or mount a folder with input/config/hyperparameters.json at "
            "/opt/ml (SAGEMAKER_BASE_DIR names another place).",
        )
    # A local run may have none of these files.
    channels = _read_object(paths.config / "inputdataconfig.json", _existing_channels(paths.data))
    one_host = {"current_host": "algo-1", "hosts": ["algo-1"]}
    resources = _read_object(paths.config / "resourceconfig.json", one_host)
    platform: dict[str, Any] = {}
    hyperparameters: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for key, text in _read_object(paths.config / "hyperparameters.json", {}).items():
        value = decode(text)
        if not key or "=" in key or _UNREPRESENTABLE.search(key + to_argument(value)):
            raise ConfigError(
                f"The hyperparameter {key!r} has no usable name, or has a NUL or half of a"
                " surrogate pair, which cannot be passed to a program.",
                "Name it without '=', and write such a character as an escape.",
            )
        if key.startswith("sagemaker_") or key in UNPREFIXED_KEYS:
            platform[key] = value
        else:
            hyperparameters[key] = value
            keeps_spelling = isinstance(text, str) and type(value) in (int, float)
            arguments[key] = text.strip() if keeps_spelling else value
    program = environ.get("SAGEMAKER_PROGRAM") or platform.get("sagemaker_program")
    submit = platform.get("sagemaker_submit_directory") or environ.get("SAGEMAKER_SUBMIT_DIRECTORY")
    if not program and not (paths.config / "inputdataconfig.json").is_file():
        _check_files(paths.data)
    _check_channels(channels, paths)
    hosts, current = resources.get("hosts", []), resources.get("current_host", "")
    groups = resources.get("instance_groups") or []
    try:
        known = [group["instance_group_name"] for group in groups]
        named = {current, *(host for group in groups for host in group["hosts"])}
        are_hosts = named <= set(hosts) and all(isinstance(host, str) for host in hosts)
    except (TypeError, LookupError):
        are_hosts = False
    if not are_hosts:
        raise ConfigError(
            f"resourceconfig.json: 'current_host' is {current!r}, 'hosts' is {hosts!r} and"
            f" 'instance_groups' is {groups!r}.",
            'Write {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}; a group has an'
            " instance_group_name, an instance_type and some of these hosts.",
        )
    if len(known) > 1:
        raise ConfigError(
            f"The job has the instance groups {known}, and one group is supported.",
            "Give instance_type and instance_count instead of instance_groups.",
        )
    level_key = "sagemaker_container_log_level"
    log_level = platform.get(level_key, environ.get(level_key.upper(), 20))
    if not re.fullmatch(r"\d{1,9}", str(log_level)):
        raise ConfigError(
            f"{level_key} is {log_level!r}.",
            "Give a number of Python's logging levels: 10, 20, 30, 40 or 50.",
        )
    return Job(
        paths=paths, hyperparameters=hyperparameters, arguments=arguments, sagemaker=platform,
        input_data_config=channels, resource_config=resources, hosts=tuple(sorted(set(hosts))),
        current_host=current, entry_point=str(program) if program else None,
        submit_directory=str(submit or paths.code), log_level=int(log_level),
    )  # fmt: skip


def decode(value: Any) -> Any:
    """Decode the value of a hyperparameter if it is JSON text; return it unchanged otherwise.

    SageMaker passes every value as a string. SDK v2's estimators JSON-encode each one, SDK v3 does
    not encode strings.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def to_argument(value: Any) -> str:
    """Encode a hyperparameter for argv, as sagemaker-training does."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return str(value)


def _read_object(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    """Read the JSON object in `path`, or return the default if it is missing."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text)
    except FileNotFoundError:
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error}.", "Write one JSON object."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} holds {text.strip()[:80]!r}, which is not a JSON object.",
            'Write {"name": "value", ...}.',
        )
    return value


def _existing_channels(data: Path) -> dict[str, Any]:
    return {
        entry.name: {"TrainingInputMode": "File"}
        for entry in sorted(data.iterdir() if data.is_dir() else [])
        if entry.is_dir() and not entry.name.startswith(".")
    }


def _check_files(data: Path) -> None:
    """Raise ConfigError if files, which the recipe would not read, lie next to channels."""
    files = [
        path
        for path in data.glob("[!.]*")
        if path.is_file() and path.suffix != ".md" and not path.name.endswith("-manifest")
    ]
    if files:
        name = files[0].name.partition(".")[0]
        folder = data / (name if name != files[0].name else "training")
        raise ConfigError(
            f"{files[0]} is a file, and a channel is a folder.",
            f"Move it into one: mkdir {folder} && mv {files[0]} {folder}/",
        )


def _check_channels(config: Mapping[str, Any], paths: Paths) -> None:
    for name, settings in config.items():
        if not re.fullmatch(r"(?!\.\.?$)[A-Za-z0-9._-]{1,64}", name):
            raise ConfigError(
                f"inputdataconfig.json names a channel {name!r}.",
                "A channel's name has 1 to 64 of the characters A-Z a-z 0-9 . _ -",
            )
        mode = settings.get("TrainingInputMode") if isinstance(settings, dict) else None
        # Pipe mode has one FIFO for each epoch instead of a folder: <channel>_0, <channel>_1 ...
        if mode != "Pipe" and not (paths.data / name).exists():
            present = ", ".join(_existing_channels(paths.data)) or "none"
            raise ConfigError(
                f"inputdataconfig.json names the channel {name!r}, but {paths.data / name} does not"
                f" exist (existing channels: {present}).",
                "Mount the channel's data there, or remove the channel from inputdataconfig.json.",
            )
