"""Builds the command of mpirun on the first host.

mpirun starts a daemon (orted) on each other host, usually by ssh. Here its launch agent is a script
that passes the daemon's command to `cluster`, for `amphora train` of the other host to run. So no
host runs sshd, and ranks of other hosts are supervised, and have their host's environment.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from amphora.common.errors import CodeError, ConfigError
from amphora.contract.job import Job

KEY = "sagemaker_mpi_enabled"
PROCESSES_KEY = "sagemaker_mpi_num_of_processes_per_host"
OPTIONS_KEY = "sagemaker_mpi_custom_mpi_options"
AGENT, COMMANDS = "agent", "commands"
# mpirun runs this as it runs ssh, with a host and a command.
_AGENT = f"""host=$1 && shift && cd "${{0%/*}}" && printf %s "$*" >"part-$host" &&
exec mv "part-$host" "{COMMANDS}/$host"
"""
# Each rank leaves a file, because mpirun may exit with 0 without having started any.
_SIGNED = (
    "/bin/sh",
    "-c",
    '{ echo "$OMPI_COMM_WORLD_LOCAL_SIZE" >"$AMPHORA_ERROR_DIR/rank-$OMPI_COMM_WORLD_RANK"; }'
    ' 2>/dev/null; exec "$@"',
    "sh",
)


def mpirun(
    job: Job,
    hosts: Sequence[str],
    processes: int,
    environ: Mapping[str, str],
    interface: str | None,
    folder: Path,
) -> list[str]:
    """Return mpirun with its options, up to the program.

    Args:
        processes: The number on each host.
        interface: The network interface between the hosts, if it is known.
        folder: The folder of the launch agent (see `create_agent`).

    Raises ConfigError if there is no mpirun, or the options of the job cannot be read.
    """
    if shutil.which("mpirun", path=environ.get("PATH")) is None:
        raise ConfigError(
            f"{KEY} is on, but there is no mpirun in this image.",
            "Use torch_distributed, or install Open MPI in an image built on this one.",
        )
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output", "-bind-to", "none"]
    argv += ["-np", str(processes * len(hosts))]
    if len(hosts) > 1:
        slots = ",".join(f"{host}:{processes}" for host in hosts)
        argv += ["--host", slots, "-mca", "plm_rsh_no_tree_spawn", "1"]
        argv += ["-mca", "orte_keep_fqdn_hostnames", "1"]
        # The daemons stay attached, since they run in place of the script on their hosts. They look
        # for an agent, too, although they never start one; /bin/sh is there.
        argv += ["-mca", "plm_rsh_agent", f"/bin/sh {folder / AGENT}", "--leave-session-attached"]
        if interface is not None:
            for layer in ("btl_tcp_if_include", "oob_tcp_if_include"):
                argv += ["-mca", layer, interface]
    # sagemaker-training reads this one itself.
    options = re.sub(
        r"--NCCL_DEBUG[ =]+", "-x NCCL_DEBUG=", str(job.sagemaker.get(OPTIONS_KEY) or "")
    )
    try:
        argv += shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"{OPTIONS_KEY} cannot be read: {error}.", "Close the quotes.") from error
    return [*argv, *_SIGNED]


def check_started(folder: Path) -> None:
    """Check that each rank of this host left its file in `folder`. Raises CodeError."""
    sizes = [path.read_text().strip() for path in folder.glob("rank-*")]
    if not sizes or not all(size.isdecimal() and len(sizes) >= int(size) for size in sizes):
        raise CodeError(
            f"mpirun ended with exit code 0, but started {len(sizes)} of"
            f" {max(sizes, default='') or 'its'} ranks on this host.",
            "Start the job again, or use torch_distributed.",
        )


def create_agent(folder: Path) -> None:
    """Create the launch agent in the new folder `folder`, and the folder of its commands."""
    (folder / COMMANDS).mkdir(parents=True)
    (folder / AGENT).write_text(_AGENT)
