"""Builds the command of mpirun on the first host, and of sshd on the others.

mpirun reaches the other hosts by ssh; they run sshd until the first one has ended. Each host
creates a key pair for this job and sends the others the public key (see `cluster`). The sshd of a
host accepts only the key of the first host, from that host's addresses, for the user of the job.
Keys in the image are not used: everybody who pulls AWS's public images can read their private key.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from amphora.common.errors import CodeError, ConfigError
from amphora.contract.job import Job

KEY = "sagemaker_mpi_enabled"
PROCESSES_KEY = "sagemaker_mpi_num_of_processes_per_host"
OPTIONS_KEY = "sagemaker_mpi_custom_mpi_options"
SSH_PORT = 22
_KEY = re.compile(r"ecdsa-sha2-nistp256 [A-Za-z0-9+/=]+")
# Each rank leaves a file, because mpirun may exit with 0 without having started any.
_SIGNED = (
    "/bin/sh",
    "-c",
    '{ echo "$OMPI_COMM_WORLD_LOCAL_SIZE" >"$AMPHORA_ERROR_DIR/rank-$OMPI_COMM_WORLD_RANK"; }'
    ' 2>/dev/null; exec "$@"',
    "sh",
)
# Variables of a rank on another host that a login there would not set.
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
    ssh: Path,
) -> list[str]:
    """Return mpirun with its options, up to the program.

    Args:
        processes: The number on each host.
        names: The variables that every rank gets.
        interface: The network interface between the hosts, if it is known.
        ssh: The folder of this host's key and ssh_config.

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
        argv += ["-mca", "plm_rsh_args", f"-F {ssh / 'ssh_config'}"]
        if interface is not None:
            for layer in ("btl_tcp_if_include", "oob_tcp_if_include"):
                argv += ["-mca", layer, interface]
    try:
        argv += shlex.split(str(job.sagemaker.get(OPTIONS_KEY) or ""))
    except ValueError as error:
        raise ConfigError(f"{OPTIONS_KEY} cannot be read: {error}.", "Close the quotes.") from error
    for name in sorted({*names, *(name for name in _PASSED_ON if name in environ)}):
        argv += ["-x", name]
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


def sshd(environ: Mapping[str, str], ssh: Path) -> list[str]:
    """Return the sshd that a host runs while mpirun of the first host starts ranks on it.

    Args:
        ssh: The folder of this host's key and sshd_config.

    Raises:
        ConfigError: There is no sshd.
    """
    path = f"{environ.get('PATH', '')}:/usr/sbin:/sbin"
    config = str(ssh / "sshd_config")
    return [_required("sshd", "the OpenSSH server", path), "-D", "-e", "-f", config]


def make_key(ssh: Path, environ: Mapping[str, str]) -> str:
    """Create this host's key pair in the new folder `ssh`, and return the public key.

    Raises:
        ConfigError: There is no ssh-keygen, or it fails.
    """
    program = _required("ssh-keygen", "the OpenSSH client", environ.get("PATH"))
    ssh.mkdir(mode=0o700)
    argv = [program, "-q", "-t", "ecdsa", "-b", "256", "-N", "", "-C", "", "-f", str(ssh / "key")]
    made = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if made.returncode != 0:
        raise ConfigError(
            f"ssh-keygen created no key: {made.stderr.strip()}.", "Correct what it names."
        )
    return (ssh / "key.pub").read_text().strip()


def trust(
    ssh: Path,
    keys: Mapping[str, str],
    addresses: Mapping[str, Iterable[str]],
    environ: Mapping[str, str],
) -> None:
    """Write the configuration of ssh and sshd for this host and those of `keys`.

    Raises:
        ConfigError: One of `keys` is not a public key.
    """
    for host, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(f"The SSH key of {host} is {key!r}.", "See that host's log.")
    (ssh / "known_hosts").write_text("".join(f"{host} {key}\n" for host, key in keys.items()))
    (ssh / "ssh_config").write_text(
        f'IdentityFile "{ssh}/key"\nIdentitiesOnly yes\nIdentityAgent none\nBatchMode yes\n'
        f'UserKnownHostsFile "{ssh}/known_hosts"\nGlobalKnownHostsFile none\n'
        "StrictHostKeyChecking yes\nLogLevel ERROR\n"
    )
    own = {host: sorted(addresses[host]) for host in keys}
    (ssh / "authorized_keys").write_text(
        "".join(f'restrict,from="{",".join(own[host])}" {key}\n' for host, key in keys.items())
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    users = " ".join(f"{user}@{address}" for each in own.values() for address in each)
    # What ranks need before mpirun's daemon sets their environment.
    passed = [f"{name}={environ[name]}" for name in _PASSED_ON[:2] if environ.get(name)]
    set_env = f"SetEnv {' '.join(map(_quoted, passed))}\n" if passed else ""
    # Without PAM, sshd refuses a user without a password. StrictModes would also check the folders
    # above `ssh`, which itself is private.
    (ssh / "sshd_config").write_text(
        f'Port {SSH_PORT}\nHostKey "{ssh}/key"\nAuthorizedKeysFile "{ssh}/authorized_keys"\n'
        f"AllowUsers {users}\nAuthenticationMethods publickey\nPermitRootLogin prohibit-password\n"
        f"UsePAM yes\nStrictModes no\nPidFile none\n{set_env}"
    )


def _quoted(text: str) -> str:
    """Quote a value of sshd_config."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _required(program: str, name: str, path: str | None) -> str:
    """Return the path of a program of the package `name`. Raises ConfigError."""
    place = shutil.which(program, path=path)
    if place is None:
        raise ConfigError(
            f"{KEY} is on, but there is no {program} in this image.",
            f"Use torch_distributed, or install {name} in an image built on this one.",
        )
    return place
