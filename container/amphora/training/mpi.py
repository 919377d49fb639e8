"""Open MPI's part: the command of the first host, and what the others run meanwhile.

mpirun reaches the other hosts by ssh, with the keys that the image brings (AWS's containers have
them under /root/.ssh): those hosts run sshd until the first one has ended.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence

from amphora.common.errors import ConfigError
from amphora.contract.job import Job

KEY = "sagemaker_mpi_enabled"
PROCESSES_KEY = "sagemaker_mpi_num_of_processes_per_host"
OPTIONS_KEY = "sagemaker_mpi_custom_mpi_options"
SSH_PORT = 22
# Of a rank's environment on another host: what a login there would not have.
_PASSED_ON = (
    "PATH",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "ACCELERATE_USE_CPU",
    "FI_PROVIDER",
    "FI_EFA_USE_DEVICE_RDMA",
)


def mpirun(
    job: Job,
    hosts: Sequence[str],
    processes: int,
    names: Iterable[str],
    environ: Mapping[str, str],
    interface: str | None,
) -> list[str]:
    """mpirun with its options, up to the program.

    Args:
        processes: Of each host.
        names: The variables that every rank gets.
        interface: The network interface between the hosts, where it is known.

    Raises:
        ConfigError: There is no mpirun, or the options of the job cannot be read.
    """
    path = environ.get("PATH")
    _required("mpirun", "Open MPI", path)
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output", "-bind-to", "none"]
    argv += ["-np", str(processes * len(hosts))]
    if len(hosts) > 1:
        _required("ssh", "the OpenSSH client", path)
        slots = ",".join(f"{host}:{processes}" for host in hosts)
        argv += ["--host", slots, "-mca", "plm_rsh_no_tree_spawn", "1"]
        # The hosts of a job are new each time: there is no key of theirs to know.
        argv += ["-mca", "plm_rsh_args", "-o StrictHostKeyChecking=no -o LogLevel=ERROR"]
        if interface is not None:
            for layer in ("btl_tcp_if_include", "oob_tcp_if_include"):
                argv += ["-mca", layer, interface]
    try:
        argv += shlex.split(str(job.sagemaker.get(OPTIONS_KEY) or ""))
    except ValueError as error:
        raise ConfigError(f"{OPTIONS_KEY} cannot be read: {error}.", "Close the quotes.") from error
    for name in sorted({*names, *(name for name in _PASSED_ON if name in environ)}):
        argv += ["-x", name]
    return argv


def sshd(environ: Mapping[str, str]) -> list[str]:
    """What a host runs while the first one's mpirun starts ranks on it.

    Raises:
        ConfigError: There is no sshd.
    """
    path = f"{environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [_required("sshd", "the OpenSSH server", path), "-D", "-e"]


def _required(program: str, name: str, path: str | None) -> str:
    """Where a program is that `name` brings."""
    place = shutil.which(program, path=path)
    if place is None:
        raise ConfigError(
            f"{KEY} is on, but there is no {program} in this image.",
            f"Use torch_distributed, or install {name} in an image built on this one.",
        )
    return place
