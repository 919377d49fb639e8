"""Count the logical Neuron cores of a host, and those that this job may use.

Source: the neuron-ls guide, "Logical NeuronCore configuration" and the list of runtime variables of
the AWS Neuron documentation. neuron-ls lists logical cores: at LNC 2, the default of trn2 and trn3,
two physical cores are one. The sum of its `nc_count` is SM_NUM_NEURONS, as in SageMaker's toolkit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.common.probe import PROBE_SECONDS, Found, probe

_MESSAGE_CHARACTERS = 200
_DEV = Path("/dev")
# Where AWS's packages put it; PATH has that only in a login shell.
_NEURON_TOOLS = "/opt/aws/neuron/bin"
_MOST_CORES = 4096


def count(environ: Mapping[str, str]) -> Found:
    """Count by neuron-ls, or take SM_NUM_NEURONS if that lists nothing.

    Raises:
        ConfigError: There are devices that neuron-ls does not list, or a variable asks for cores
            that the host does not have.
    """
    listing, silence = _neuron_ls(environ)
    declared = environ.get("SM_NUM_NEURONS", "")
    cores: Sequence[int]
    if listing is not None:
        cores, reason = _listed_cores(listing, environ)
    elif declared.isdecimal() and int(declared):
        cores, reason = range(int(declared)), f"SM_NUM_NEURONS is {declared}, as {silence}"
    else:
        present = sorted(path.name for path in _DEV.glob("neuron[0-9]*"))
        if present:
            raise ConfigError(
                f"This host has Neuron devices ({_DEV / present[0]}), but {silence}.",
                "Run `neuron-ls -j` in the container to see why, or set SM_NUM_NEURONS to the"
                " number of cores to train on.",
            )
        return Found(reason=silence)
    usable, limit = _usable_cores(cores, environ)
    return Found(usable=usable, listed=len(cores), reason=f"{reason}{limit}")


def _neuron_ls(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return what neuron-ls prints as JSON, or None and why it prints nothing."""
    path = f"{environ.get('PATH', '')}{os.pathsep}{_NEURON_TOOLS}"
    tool = shutil.which("neuron-ls", path=path)
    if tool is None:
        return None, "no neuron-ls"
    result = probe([tool, "-j"], environ)
    if result is None:
        return None, f"neuron-ls does not answer (waited {PROBE_SECONDS:g} s at most)"
    if result.returncode == 0:
        return result.stdout, ""
    message = " ".join((result.stderr or result.stdout).split())[-_MESSAGE_CHARACTERS:]
    return None, f"neuron-ls finds no device ({message or f'exit code {result.returncode}'})"


def _listed_cores(text: str, environ: Mapping[str, str]) -> tuple[Sequence[int], str]:
    """Return the ids of the logical cores, as NEURON_RT_VISIBLE_CORES counts them."""
    try:
        devices = json.loads(text)
        if not isinstance(devices, list):
            raise ValueError("no list")
        total = sum(int(device["nc_count"]) for device in devices)
        listed_lnc = {int(device.get("logical_neuroncore_config", 0)) for device in devices}
        ids = [int(core) for device in devices for core in device.get("neuroncore_ids") or ()]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"`neuron-ls -j` printed what is not a list of devices ({error!r}).",
            "Run it on this host to see, and check that the Neuron driver and tools fit, or set"
            " SM_NUM_NEURONS and take neuron-ls off PATH.",
        ) from error
    # 0: the hardware joins no cores (trn1, inf2).
    joined = max(listed_lnc, default=0)
    requested = environ.get("NEURON_LOGICAL_NC_CONFIG", "")
    if requested not in ("", "1", "2"):
        raise ConfigError(
            f"NEURON_LOGICAL_NC_CONFIG is {requested!r}.",
            "Give 1 or 2, the physical cores that make one logical core.",
        )
    if not joined and requested == "2":
        raise ConfigError(
            "NEURON_LOGICAL_NC_CONFIG is 2, but cores are joined on trn2 and trn3 only.",
            "Leave it out on this instance type.",
        )
    reason = f"neuron-ls lists {total} Neuron cores"
    if joined:
        lnc = int(requested or joined)
        total = total * joined // lnc
        reason = f"neuron-ls lists {total} logical Neuron cores at LNC {lnc}"
    return (ids if len(ids) == total else range(total)), reason


def _usable_cores(cores: Sequence[int], environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many of `cores` the environment leaves to this job, and by which variable."""
    visible = environ.get("NEURON_RT_VISIBLE_CORES", "")
    if visible:
        chosen = _core_list(visible)
        if not set(chosen) <= set(cores):
            span = f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else "".join(map(str, cores))
            raise ConfigError(
                f"NEURON_RT_VISIBLE_CORES is {visible!r}, but the cores of this host are"
                f" {span or 'none'}.",
                "Name cores that it has, counted as logical cores on trn2 and trn3.",
            )
        return len(chosen), f", NEURON_RT_VISIBLE_CORES={visible} leaves {len(chosen)}"
    number = environ.get("NEURON_RT_NUM_CORES", "")
    if number in ("", "0"):  # The runtime takes 0 for all of them.
        return len(cores), ""
    if not number.isdecimal() or int(number) > len(cores):
        raise ConfigError(
            f"NEURON_RT_NUM_CORES is {number!r}, and this host has {len(cores)} cores.",
            "Give a number between 1 and that.",
        )
    return int(number), f", NEURON_RT_NUM_CORES={number} leaves {int(number)}"


def _core_list(text: str) -> list[int]:
    """Return the cores that a text such as '0', '0-3' or '0,2-3' names."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > _MOST_CORES:
            break
        cores += range(first, last + 1)
    else:
        if len(set(cores)) == len(cores):
            return cores
    raise ConfigError(
        f"NEURON_RT_VISIBLE_CORES is {text!r}.",
        "Give one core, a range or a list, each core once: 3 or 0-3 or 0,2.",
    )
