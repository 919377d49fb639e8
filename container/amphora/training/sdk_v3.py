"""Runs jobs of SDK v3's ModelTrainer with SourceCode, in place of the SDK's driver scripts.

The SDK's entry point is a bash command, which bash passes to `amphora train` (hook/bash_env.sh). It
runs a generated script, sm_drivers/sm_train.sh, which fails on a `'` in a value and on a `-` in a
channel's name, and does not forward signals. So its steps are read and performed here. A script
with an unknown line runs unchanged, under the same supervision.

Source: sagemaker-train 1.27.0 (templates.py, container_drivers), with which a test compares; also
the scripts of its 1.0.0 and of `sagemaker.modules` in sagemaker 2.257.7.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amphora.common.archives import unpack
from amphora.common.devices import Devices
from amphora.common.errors import CodeError, ConfigError
from amphora.contract.job import Job, Paths, decode
from amphora.training import launch, mpi
from amphora.training.entry_point import Program, ProgramKind, list_files

_DATA = r"/opt/ml/input/data"
_SENT = re.compile(rf"chmod \+x {_DATA}/sm_drivers/sm_train\.sh && {_DATA}/sm_drivers/sm_train\.sh")
_ENVIRONMENT = "source /opt/ml/input/sm_training.env\n"
_COMMAND = re.compile(
    r"""^CMD=(?:\$\(cat\ <<'(?P<end>\w+)'\n(?P<exact>.*?)\n(?P=end)\n\)|"(?P<plain>[^"$`\\]*)")\n
    echo\ [^\n]*\n
    eval\ "?\$CMD"?$""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_LINES: Mapping[str, re.Pattern[str]] = {
    "prints": re.compile(r'set [-+]x|echo "[^"$`]*"|cat requirements\.txt|else|fi'),
    "code": re.compile(rf"cd ({_DATA}/code)"),
    "archive": re.compile(r"tar -xzf ([\w.+@-]+)"),
    "if_there": re.compile(r"if \[ -f (requirements\.txt) \]; then"),
    "requirements": re.compile(
        r"(?:\$SM_PIP_CMD install -r|\$SM_PYTHON_CMD \S+/scripts/install_requirements\.py)"
        r" ([\w./+@-]+)"
    ),
    "driver": re.compile(rf"\$SM_PYTHON_CMD {_DATA}/sm_drivers/distributed_drivers/([\w.-]+\.py)"),
}
_BASIC, _TORCHRUN, _MPI = "basic_script_driver.py", "torchrun_driver.py", "mpi_driver.py"
_KEYS: Mapping[str, frozenset[str]] = {
    _BASIC: frozenset(),
    _TORCHRUN: frozenset({"process_count_per_node", "smp"}),
    _MPI: frozenset({"process_count_per_node", "mpi_additional_options"}),
}
# The driver's failure file, which never names a reason.
_GENERIC_FAILURE = re.compile(
    r"\s*Training Execution failed\b|Traceback .*/sm_drivers/.*\bCalledProcessError: ", re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class GeneratedScript:
    """Holds the steps of the generated script after it has set its environment."""

    entry_script: str
    distributed: Mapping[str, Any]
    steps: Mapping[str, str]
    """Operands by the names of `_LINES`, and the user's own 'command'."""
    unknown: str = ""
    """The first unknown line; if there is one, the script runs unchanged."""

    @property
    def driver(self) -> str:
        """Return the file below distributed_drivers, or '' if the user gave a command."""
        return self.steps.get("driver", "")

    @property
    def runs_entry_script(self) -> bool:
        """Return whether it only runs the entry script, alone or by torchrun or mpirun."""
        keys = _KEYS.get(self.driver)
        return not self.unknown and keys is not None and set(self.distributed) <= keys


def start(
    job: Job, devices: Devices, error_dir: Path, environ: Mapping[str, str], sent: str
) -> launch.Launch:
    """Unpack the code, and return how to start it.

    Args:
        error_dir: The folder for records of the exceptions that end processes.
        sent: The bash command that the SDK sent.

    Raises ConfigError if the channel sm_drivers is not the SDK's, CodeError if the code is wrong.
    """
    request = read(job.paths, sent)
    root = job.paths.data / "code" if "code" in request.steps else Path.cwd()
    if "archive" in request.steps and not request.unknown:
        archive = root / request.steps["archive"]
        unpack(archive, root, str(archive))
    if request.runs_entry_script:
        name = request.entry_script
        if not (root / name).is_file():
            raise CodeError(
                f"SourceCode.entry_script is {name!r}, but {root / name} does not exist"
                f" (existing files: {list_files(root)}).",
                "Give its path within SourceCode.source_dir.",
            )
        kind = ProgramKind.COMMAND if name.endswith(".sh") else ProgramKind.SCRIPT
        source, what = Program(root=root, kind=kind, name=name), str(root / name)
    else:
        script = str(job.paths.data / "sm_drivers" / "sm_train.sh")
        source = Program(root=root, kind=ProgramKind.COMMAND, name=script)
        what = script if request.unknown else request.steps.get("command") or request.driver
    arguments = arguments_of(job)
    plan = launch.plan(_adapted(job, request, root), devices, source, error_dir, environ)
    variables: dict[str, str] = {}
    if request.distributed:
        drivers = job.paths.data / "sm_drivers" / "distributed_drivers"
        variables["SM_DISTRIBUTED_DRIVER_DIR"] = str(drivers)
        variables["SM_DISTRIBUTED_CONFIG"] = json.dumps(request.distributed)
    argv, notes = plan.argv[: len(plan.argv) - 2 * len(arguments)], plan.notes
    if request.runs_entry_script:
        # The driver keeps their order, and writes two dashes before one letter, too.
        for name, text in arguments.items():
            is_hidden = launch.is_secret(name, text)
            argv += (f"--{name}", launch.placeholder(name, text) if is_hidden else text)
    elif request.unknown:
        argv = ("/bin/bash", "-c", sent)
        notes += (f"sm_train.sh runs unchanged: its line {request.unknown!r} is not known",)
    elif request.driver:
        driver = job.paths.data / "sm_drivers" / "distributed_drivers" / request.driver
        argv = (sys.executable, str(driver))
    else:
        argv = ("/bin/bash", "-e", "-c", request.steps["command"])
    named = "" if request.unknown else request.steps.get("requirements", "")
    is_missing = "if_there" in request.steps and not (root / named).is_file()
    # pip also replaces the SDK's own installer, which calls uv: that ignores PIP_INDEX_URL, and the
    # installer writes CodeArtifact's token into argv and into pip's file.
    installs = (named,) if named and not is_missing else ()
    return replace(
        plan, what=what, installs=installs, argv=argv, environ={**plan.environ, **variables},
        notes=notes,
    )  # fmt: skip


def read(paths: Paths, sent: str) -> GeneratedScript:
    """Read the SDK's files in the channel sm_drivers. Raises ConfigError."""
    folder = paths.data / "sm_drivers"
    try:
        script = (folder / "sm_train.sh").read_text(encoding="utf-8")
        source_code = json.loads((folder / "sourcecode.json").read_text(encoding="utf-8"))
        distributed = json.loads((folder / "distributed.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The channel sm_drivers cannot be read: {error}.",
            "Start the job with SDK v3's ModelTrainer and SourceCode, which create it.",
        ) from error
    steps, unknown = understand(script)
    return GeneratedScript(
        entry_script=(source_code or {}).get("entry_script") or "",
        distributed=distributed or {},
        steps=steps,
        unknown=unknown if _SENT.fullmatch(sent.strip()) else sent,
    )


def understand(script: str) -> tuple[dict[str, str], str]:
    """Return the steps of a generated sm_train.sh, and its first unknown line or ''."""
    head, _, tail = script.partition(_ENVIRONMENT)
    steps: dict[str, str] = {}
    if command := _COMMAND.search(tail):
        steps["command"] = command["exact"] if command["plain"] is None else command["plain"]
        tail = tail[: command.start()] + tail[command.end() :]
    prepares = [line for line in head.splitlines() if "/sm_drivers/" in line]
    if len(prepares) != 1 or not prepares[0].endswith("/scripts/environment.py"):
        return steps, "how it sets the environment"
    for line in filter(None, map(str.strip, tail.splitlines())):
        matches = ((name, pattern.fullmatch(line)) for name, pattern in _LINES.items())
        name, match = next(((name, match) for name, match in matches if match), ("", None))
        if match is None or name in steps:
            return steps, line
        if match.re.groups:
            steps[name] = match[1]
    return steps, "" if ("command" in steps) != ("driver" in steps) else "what it starts"


def forget_generic_failure(paths: Paths) -> None:
    """Remove a failure file of the SDK's driver, which names no reason."""
    if paths.failure.is_file() and _GENERIC_FAILURE.match(
        paths.failure.read_text(encoding="utf-8", errors="replace")
    ):
        paths.failure.unlink()


def arguments_of(job: Job) -> dict[str, str]:
    """Return the hyperparameters as the driver writes them into argv, JSON except for strings.

    The driver decodes each value twice, and passes on sagemaker_* keys, too.
    """
    arguments = {}
    for name, value in {**job.arguments, **job.sagemaker}.items():
        decoded = decode(value)
        keeps_spelling = isinstance(value, str) and type(decoded) in (int, float)
        text = decoded if isinstance(decoded, str) else json.dumps(decoded)
        arguments[name] = value.strip() if keeps_spelling else text
    return arguments


def _adapted(job: Job, request: GeneratedScript, root: Path) -> Job:
    """Translate the job to SDK v2's keys, whose distributions `launch` knows."""
    count = request.distributed.get("process_count_per_node")
    requested: dict[str, Any] = {"process_count_per_node": count} if count else {}
    if request.driver == _TORCHRUN:
        requested["sagemaker_torch_distributed_enabled"] = True
    elif request.driver == _MPI:
        options = request.distributed.get("mpi_additional_options") or []
        requested[mpi.KEY] = True
        requested[mpi.OPTIONS_KEY] = shlex.join(options)
    else:
        requested["process_count_per_node"] = 1
    return replace(
        job,
        entry_point=request.entry_script or "sm_train.sh",
        submit_directory=str(root),
        arguments=arguments_of(job),
        sagemaker=requested if request.runs_entry_script else {},
    )
