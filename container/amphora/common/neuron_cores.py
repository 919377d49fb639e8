"""How many logical Neuron cores a host has, and how many of them this job may use."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.common.probe import PROBE_SECONDS, probe

_SAID_CHARACTERS = 200
_DEV = Path("/dev")
# Where AWS's packages put it; PATH has that only in a login shell.
_NEURON_TOOLS = "/opt/aws/neuron/bin"
_MOST_CORES = 4096


def count(environ: Mapping[str, str]) -> tuple[int, str]:
    """The logical cores that this job may use, and where the number comes from."""
    listing, silence = _neuron_ls(environ)
    declared = environ.get("SM_NUM_NEURONS", "")
    cores: Sequence[int]
    if listing is not None:
        cores, reason = _neuron_cores(listing, environ)
    elif declared.isdecimal() and int(declared):
        cores, reason = range(int(declared)), f"SM_NUM_NEURONS is {declared}, as {silence}"
    else:
        present = sorted(path.name for path in _DEV.glob("neuron[0-9]*"))
        if present:
            raise ConfigError(
                f"This host has Neuron devices ({_DEV / present[0]}), but {silence}.",
                "Run `neuron-ls` in the container to see why, or set SM_NUM_NEURONS to the number"
                " of cores to train on.",
            )
        return 0, silence
    chosen, limit = _chosen_cores(cores, environ)
    return chosen, f"{reason}{limit}"


def _neuron_ls(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """What neuron-ls prints as JSON, or None and the reason."""
    path = f"{environ.get('PATH', '')}{os.pathsep}{_NEURON_TOOLS}"
    tool = shutil.which("neuron-ls", path=path)
    if tool is None:
        return None, "no neuron-ls"
    answer = ""
    for options in (["-j"], ["--output-format", "json"]):  # Neuron 2.34 ends the first.
        result = probe([tool, *options], environ)
        if result is None:
            return None, f"neuron-ls does not answer (waited {PROBE_SECONDS:g} s at most)"
        if result.returncode == 0:
            return result.stdout, ""
        answer = answer or " ".join((result.stderr or result.stdout).split())[-_SAID_CHARACTERS:]
    return None, f"neuron-ls finds no device ({answer or 'without a word'})"


def _neuron_cores(text: str, environ: Mapping[str, str]) -> tuple[Sequence[int], str]:
    """The ids of the logical cores, as NEURON_RT_VISIBLE_CORES counts them."""
    try:
        devices = json.loads(text)
        if isinstance(devices, dict):
            # As announced for Neuron 2.34: the list stands in an object about the host.
            lists = [value for value in devices.values() if isinstance(value, list)]
            devices = next((each for each in lists if "nc_count" in str(each)), None)
        if not isinstance(devices, list):
            raise ValueError("no list")
        counts = [int(device["nc_count"]) for device in devices]
        configured = {int(device.get("logical_neuroncore_config", 0)) for device in devices}
        ids = [int(core) for device in devices for core in device.get("neuroncore_ids") or ()]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"`neuron-ls -j` printed what is not a list of devices ({error!r}).",
            "Run it on this host to see, and check that the Neuron driver and tools fit, or set"
            " SM_NUM_NEURONS and take neuron-ls off PATH.",
        ) from error
    # Those of one logical core; 0 where the hardware joins none (trn1, inf2).
    joined = max(configured, default=0)
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
    if not joined:
        total = sum(counts)
        return (ids if len(ids) == total else range(total)), f"neuron-ls lists {total} Neuron cores"
    lnc = int(requested or 2)
    total = sum(counts) * joined // lnc
    reason = f"neuron-ls lists {total} logical Neuron cores at LNC {lnc}"
    return (ids if len(ids) == total else range(total)), reason


def _chosen_cores(cores: Sequence[int], environ: Mapping[str, str]) -> tuple[int, str]:
    """How many of `cores` the environment leaves to this job, and by which variable."""
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
    """The cores that '0', '0-3' or '0,2-3' names."""
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
