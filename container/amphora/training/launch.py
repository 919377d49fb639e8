"""Computes the command and environment of a job from `Job`, `Program` and `Devices`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amphora.common.devices import CPU, NEURON, Devices
from amphora.common.errors import ConfigError
from amphora.common.logs import secret_values
from amphora.common.secret_rules import is_secret_value
from amphora.contract.job import Job, decode, to_argument
from amphora.contract.sm_variables import (
    MASTER_PORT,
    plain,
    select_fitting,
    sm_variables,
    to_arguments,
)
from amphora.training import mpi, neuron
from amphora.training.entry_point import Program, ProgramKind, install_steps

SECRET_PREFIX = "amphora-secret:"
HOOK_DIR = Path(__file__).parents[1] / "hook"
TORCH_KEYS = {
    "sagemaker_torch_distributed_enabled": "",
    "sagemaker_pytorch_ddp_enabled": "pytorchddp is run by torchrun, as torch's own DDP",
    "sagemaker_distributed_dataparallel_enabled": (
        "smdistributed dataparallel is run by torchrun, as torch's own DDP"
    ),
}
"""Hyperparameters that start torchrun, with a note if they request another library."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Describes what to install and start on this host."""

    what: str
    """The name of what runs, for the log."""
    script: Path | None
    """The user's Python file that runs first, if there is one."""
    installs: tuple[str, ...]
    """What pip installs before, for `packages.index`."""
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    lends: bool = False
    """Whether mpirun of the first host sends the command for this host, in place of `argv`."""
    agent_dir: Path | None = None
    """The folder of the agent by which mpirun on this host reaches the others, to be created."""
    world_size: int
    """The number of processes that train together."""
    cache: Path | None = None
    """The folder of compiled programs, to be created before."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Describes the processes that train together."""

    launcher: str
    """'torchrun', 'mpirun', or '' if the script is started directly."""
    hosts: tuple[str, ...]
    processes: int
    """The number on each host."""
    notes: tuple[str, ...]


def plan(
    job: Job, devices: Devices, source: Program, error_dir: Path, environ: Mapping[str, str]
) -> Launch:
    """Return how to start `source` for `job` on this host.

    Args:
        error_dir: The folder for records of the exceptions that end processes.
        environ: The container's environment, which overrides all defaults.

    Raises ConfigError if a number of processes is wrong, or the distribution cannot run here.
    """
    world = _world(job, devices, source, environ)
    variables = sm_variables(job, devices, environ)
    kept = select_fitting(job, variables)
    dropped = sorted(variables.keys() - kept.keys())
    notes = [f"{name} is left out: Linux allows at most 128 KiB for a variable" for name in dropped]
    variables = kept | {_mark(name, value): to_argument(value) for name, value in _hidden(job)}
    folders = [str(HOOK_DIR), str(source.root), environ.get("PYTHONPATH", "")]
    variables |= {
        "PYTHONPATH": ":".join(filter(None, folders)),
        "AMPHORA_ERROR_DIR": str(error_dir),
        "AMPHORA_SCRIPT_DIR": str(source.root),
        "AMPHORA_LAUNCHER": "1" if world.launcher == "torchrun" else "",
    }
    complete = {**_defaults(job, devices, world), **environ}
    cache = None
    if devices.kind == NEURON:
        chosen, cache, stack_notes = neuron.setup(job, environ, world.processes)
        complete |= chosen
        notes = [*stack_notes, *notes]
    complete |= {**variables, **devices.variables}
    agent_dir = error_dir.parent / "mpi"
    is_mpi = world.launcher == "mpirun"
    lends = is_mpi and job.current_host != world.hosts[0]
    command = () if lends else _command(job, source, world, devices, complete, agent_dir)
    name = source.name if source.kind is ProgramKind.MODULE else str(source.path)
    return Launch(
        what=name, script=source.script if job.entry_point else None,
        installs=tuple(install_steps(source)) if job.entry_point else (),
        argv=(*command, *arguments(job)), environ=complete, cwd=source.root, lends=lends,
        agent_dir=agent_dir if is_mpi and len(world.hosts) > 1 and not lends else None,
        cache=cache, world_size=world.processes * len(world.hosts), notes=(*world.notes, *notes),
    )  # fmt: skip


def _world(job: Job, devices: Devices, source: Program, environ: Mapping[str, str]) -> LaunchPlan:
    """Decide which processes train together, and what starts them."""
    processes = devices.accelerators or 1
    why = "one for each accelerator" if devices.accelerators else "there is no accelerator"
    mpi_processes = job.sagemaker.get(mpi.PROCESSES_KEY) if job.wants(mpi.KEY) else None
    for name, requested in (
        ("process_count_per_node", job.sagemaker.get("process_count_per_node")),
        (mpi.PROCESSES_KEY, mpi_processes),
        ("AMPHORA_NPROC_PER_NODE", environ.get("AMPHORA_NPROC_PER_NODE")),
    ):
        if requested:
            if not str(requested).isdecimal() or int(requested) < 1:
                raise ConfigError(
                    f"{name} is {requested!r}.", "Give a number of processes, 1 or more."
                )
            processes, why = int(requested), name
    keys = [key for key in (mpi.KEY, *TORCH_KEYS) if job.wants(key)]
    is_recipe, is_python = job.entry_point is None, source.kind is not ProgramKind.COMMAND
    hosts = job.hosts if keys or is_recipe else (job.current_host,)
    if keys and not is_python and mpi.KEY not in keys:
        raise ConfigError(
            f"{keys[0]} is on, but the entry point {source.name!r} is not a Python program.",
            "Name a .py file or a module, or turn the distribution off and call torchrun from it.",
        )
    notes = [note for key, note in TORCH_KEYS.items() if key in keys and note]
    if mpi.KEY in keys and is_recipe:
        notes.append("the recipe runs by torchrun, although the job requests mpi")
    if mpi.KEY in keys and not is_recipe:
        launcher = "mpirun"
    elif keys or (is_python and (processes > 1 or len(hosts) > 1)):
        launcher = "torchrun"
    else:
        launcher, processes, why = "", 1, "the script is started directly"
    counted = f"{processes} process{'es' * (processes > 1)}"
    where = f"each of {len(hosts)} hosts" if len(hosts) > 1 else "this host"
    notes.append(f"{counted} on {where}{f' by {launcher}' * bool(launcher)}: {why}")
    return LaunchPlan(launcher=launcher, hosts=hosts, processes=processes, notes=tuple(notes))


def _command(
    job: Job,
    source: Program,
    world: LaunchPlan,
    devices: Devices,
    environ: Mapping[str, str],
    agent_dir: Path,
) -> tuple[str, ...]:
    python = () if source.kind is ProgramKind.COMMAND else (sys.executable,)
    program = (*python, *source.command)
    if world.launcher == "mpirun":
        interface = job.network_interface if job.network_interface in devices.interfaces else None
        argv = mpi.mpirun(job, world.hosts, world.processes, environ, interface, agent_dir)
        return (*argv, *program)
    if world.launcher != "torchrun":
        return program
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={world.processes}"]
    if len(world.hosts) == 1:
        # A free port, so that two jobs on one machine do not meet; this address, because not every
        # container can resolve its own name, which torchrun tries for five minutes.
        torchrun += ["--nnodes=1", "--standalone", "--local_addr=127.0.0.1"]
    else:
        rank = world.hosts.index(job.current_host)
        torchrun += [f"--nnodes={len(world.hosts)}", f"--node_rank={rank}"]
        torchrun += [f"--master_addr={world.hosts[0]}", f"--master_port={MASTER_PORT}"]
    return (sys.executable, *torchrun, *source.command)


def arguments(job: Job) -> list[str]:
    """Return the hyperparameters as argv, with a placeholder for each secret."""
    marks = {name: placeholder(name, value) for name, value in _hidden(job)}
    return to_arguments({**job.arguments, **marks})


def placeholder(name: str, value: Any) -> str:
    """Return what stands for a secret in argv, until the hook replaces it."""
    return f"{SECRET_PREFIX}{_mark(name, value)}"


def is_secret(name: str, value: Any) -> bool:
    """Return whether a hyperparameter is or contains a secret, which argv would expose."""
    is_credential = isinstance(value, str) and is_secret_value(value)
    return is_credential or any(secret_values({name: decode(value)}))


def _hidden(job: Job) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in job.arguments.items() if is_secret(name, value)]


def _mark(name: str, value: Any) -> str:
    """Name the variable with the value for argv. (SM_HP_* holds objects as JSON.)"""
    return f"{'SM_HP' if isinstance(value, str) else 'SM_ARGUMENT'}_{plain(name).upper()}"


def _defaults(job: Job, devices: Devices, world: LaunchPlan) -> dict[str, str]:
    defaults = {
        # torchrun defaults to 1 thread, a plain process to every core of the machine.
        "OMP_NUM_THREADS": str(max(1, devices.cpus // world.processes))
    }
    if devices.kind == CPU and not devices.has_other:
        # Otherwise accelerate and HF Trainer make each process on a CPU a world of one, and each
        # silently trains its own model, or takes torch-xla's CPU device in an image of Trainium's.
        defaults |= {"ACCELERATE_USE_CPU": "true", "USE_TORCH_XLA": "0"}
    if job.entry_point is not None:
        # By default mlflow-skinny opens an SQL store, for which the image lacks the packages.
        defaults["MLFLOW_TRACKING_URI"] = f"file://{job.paths.output_data}/mlflow"
        defaults["MLFLOW_ALLOW_FILE_STORE"] = "true"
    # SDK v3's local mode names an interface that does not exist.
    if len(job.hosts) > 1 and job.network_interface in devices.interfaces:
        defaults["GLOO_SOCKET_IFNAME"] = job.network_interface
        defaults["NCCL_SOCKET_IFNAME"] = job.network_interface
    if devices.efa and len(job.hosts) > 1:
        defaults |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
        defaults |= neuron.EFA_DEFAULTS if devices.kind == NEURON else {}
    return defaults
