"""How a job is started: from a `Job` and its `Devices` to an argv and an environment. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from amphora.contract import Job
from amphora.devices import Devices
from amphora.environment import (
    MASTER_PORT,
    distribution_hosts,
    master_host,
    sm_variables,
    to_arguments,
    too_long,
)
from amphora.errors import ConfigError
from amphora.logs import is_secret_name

SECRET_PREFIX = "amphora-secret:"
HOOK_DIR = Path(__file__).parent / "hook"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process to start, and what to say about it."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    is_launcher: bool
    """Whether the process is torchrun, which starts the script's processes itself."""
    notes: tuple[str, ...]


def plan(
    job: Job, devices: Devices, script: Path, error_dir: Path, environ: Mapping[str, str]
) -> Launch:
    """How to start `script` for `job` on this host.

    Args:
        script: The entry point, a .py file.
        error_dir: Where the script's processes record the exception that ends them.
        environ: The container's environment; what it sets always wins over a default of ours.

    Raises:
        ConfigError: AMPHORA_NPROC_PER_NODE is not a number of processes.
    """
    processes, why = processes_per_host(job, devices, environ)
    hosts = _world_hosts(job)
    launcher = processes > 1 or len(hosts) > 1 or _is_distributed(job)
    argv = [sys.executable]
    if launcher:
        argv += _torchrun(job, hosts, processes)
    argv += [str(script), *_arguments(job)]
    variables = sm_variables(job, devices, environ)
    dropped = too_long(variables)
    notes = [f"{processes} process{'es' * (processes > 1)} on this host: {why}"]
    notes += [f"{name} is left out: Linux passes on at most 128 KiB a variable" for name in dropped]
    kept = {name: value for name, value in variables.items() if name not in dropped}
    return Launch(
        argv=tuple(argv),
        environ={
            **_defaults(devices, processes),
            **environ,
            **kept,
            **_hook(script, error_dir, environ, launcher),
        },
        cwd=script.parent,
        is_launcher=launcher,
        notes=tuple(notes),
    )


def processes_per_host(job: Job, devices: Devices, environ: Mapping[str, str]) -> tuple[int, str]:
    """How many processes train on this host, and why."""
    asked = environ.get("AMPHORA_NPROC_PER_NODE")
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise ConfigError(
                f"AMPHORA_NPROC_PER_NODE is {asked!r}.", "Give a number of processes, 1 or more."
            )
        return int(asked), "AMPHORA_NPROC_PER_NODE"
    if devices.accelerators:
        return devices.accelerators, "one for each accelerator"
    return 1, "there is no accelerator"


def _is_distributed(job: Job) -> bool:
    return job.wants("sagemaker_torch_distributed_enabled")


def _world_hosts(job: Job) -> list[str]:
    """The hosts that train together: all of them for the recipe, those asked for with a script."""
    if job.entry_point is None:
        return list(job.hosts)
    return distribution_hosts(job) if _is_distributed(job) else [job.current_host]


def _torchrun(job: Job, hosts: list[str], processes: int) -> list[str]:
    argv = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    if len(hosts) == 1:
        # A free port of its own, so that two jobs on one machine do not meet.
        return [*argv, "--nnodes=1", "--standalone"]
    return [
        *argv,
        f"--nnodes={len(hosts)}",
        f"--node_rank={hosts.index(job.current_host)}",
        f"--master_addr={master_host(job)}",
        f"--master_port={MASTER_PORT}",
    ]


def _arguments(job: Job) -> list[str]:
    """The hyperparameters as argv; a secret's place is taken by a mark that the hook resolves."""
    shown = {
        name: f"{SECRET_PREFIX}SM_HP_{name.upper()}" if value and is_secret_name(name) else value
        for name, value in job.arguments.items()
    }
    return to_arguments(shown)


def _defaults(devices: Devices, processes: int) -> dict[str, str]:
    defaults = {
        # torchrun's own default is 1 thread, a plain process takes every core of the machine.
        "OMP_NUM_THREADS": str(max(1, devices.cpus // processes)),
    }
    if devices.efa:
        defaults |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    return defaults


def _hook(
    script: Path, error_dir: Path, environ: Mapping[str, str], launcher: bool
) -> dict[str, str]:
    folders = [str(HOOK_DIR), str(script.parent), environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": ":".join(filter(None, folders)),
        "AMPHORA_ERROR_DIR": str(error_dir),
        "AMPHORA_SCRIPT_DIR": str(script.parent),
        "AMPHORA_LAUNCHER": "1" if launcher else "",
    }
