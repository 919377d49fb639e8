"""Counts the logical Neuron cores of a host, and those that this job may use.

Source: the neuron-ls guide, "Logical NeuronCore configuration" and the list of runtime variables of
the AWS Neuron documentation. neuron-ls lists logical cores: at LNC 2, the default of trn2 and trn3,
two physical cores are one. The sum of its `nc_count` is SM_NUM_NEURONS, as in SageMaker's toolkit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.common.probe import PROBE_SECONDS, DetectedDevices, probe

_MESSAGE_CHARACTERS = 200
_DEV = Path("/dev")
# Where AWS's packages put it; PATH has that only in a login shell.
_NEURON_TOOLS = "/opt/aws/neuron/bin"


def count(environ: Mapping[str, str]) -> DetectedDevices:
    """Count by neuron-ls, or take SM_NUM_NEURONS if that lists nothing.

    Raises ConfigError if it does not list devices that exist, or a variable names absent cores.
    """
    path = f"{environ.get('PATH', '')}{os.pathsep}{_NEURON_TOOLS}"
    tool = shutil.which("neuron-ls", path=path)
    result = probe([tool, "-j"], environ) if tool else None
    if tool is None:
        silence = "no neuron-ls"
    elif result is None:
        silence = f"neuron-ls does not answer (waited {PROBE_SECONDS:g} s at most)"
    else:
        message = " ".join((result.stderr or result.stdout).split())[-_MESSAGE_CHARACTERS:]
        silence = f"neuron-ls finds no device ({message or f'exit code {result.returncode}'})"
    declared = environ.get("SM_NUM_NEURONS", "")
    if result is not None and result.returncode == 0:
        cores, reason = _listed_cores(result.stdout, environ)
    elif declared.isdecimal() and int(declared):
        cores, reason = int(declared), f"SM_NUM_NEURONS is {declared}, as {silence}"
    else:
        present = sorted(path.name for path in _DEV.glob("neuron[0-9]*"))
        if present:
            raise ConfigError(
                f"This host has Neuron devices ({_DEV / present[0]}), but {silence}.",
                "Run `neuron-ls -j` in the container to see why, or set SM_NUM_NEURONS to the"
                " number of cores to train on.",
            )
        return DetectedDevices(reason=silence)
    # The runtime's own rule: the list takes precedence over the number, and 0 means all cores.
    name = "NEURON_RT_VISIBLE_CORES"
    parts = environ.get(name, "").split(",")
    matches = [re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part) for part in parts]
    spans = [range(int(m[1]), int(m[2] or m[1]) + 1) if m else range(0) for m in matches]
    chosen = [core for span in spans for core in span] if all(spans) else []
    if not environ.get(name):
        name = "NEURON_RT_NUM_CORES"
        number = environ.get(name) or "0"
        if number == "0":
            return DetectedDevices(usable=cores, listed=cores, reason=reason)
        chosen = list(range(int(number))) if number.isdecimal() and len(number) < 5 else []
    if not chosen or max(chosen) >= cores or len(set(chosen)) < len(chosen):
        raise ConfigError(
            f"{name} is {environ[name]!r}, and this host has {cores} cores.",
            "NEURON_RT_NUM_CORES takes their number; NEURON_RT_VISIBLE_CORES takes cores counted"
            " from 0, each once: 3, 0-3 or 0,2. On trn2 and trn3 logical cores count.",
        )
    reason = f"{reason}, {name}={environ[name]} leaves {len(chosen)}"
    return DetectedDevices(usable=len(chosen), listed=cores, reason=reason)


def _listed_cores(text: str, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of logical cores in the output of neuron-ls, and a sentence for the log."""
    try:
        devices = json.loads(text)
        if not isinstance(devices, list):
            raise ValueError("not a list")
        total = sum(int(device["nc_count"]) for device in devices)
        # Not listed if the hardware joins no cores (trn1, inf2).
        joined = max(
            (int(entry.get("logical_neuroncore_config", 0)) for entry in devices), default=0
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"`neuron-ls -j` printed something other than a list of devices ({error!r}).",
            "Run it on this host to see, and check that the Neuron driver and tools fit, or set"
            " SM_NUM_NEURONS and remove neuron-ls from PATH.",
        ) from error
    if not joined:
        return total, f"neuron-ls lists {total} Neuron cores"
    # The runtime refuses other values.
    requested = {"1": 1, "2": 2}.get(environ.get("NEURON_LOGICAL_NC_CONFIG", ""), joined)
    total = total * joined // requested
    return total, f"neuron-ls lists {total} logical Neuron cores at LNC {requested}"
