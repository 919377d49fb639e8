"""Chooses the environment variables of a job on Neuron cores, by the stack the image declares.

Two stacks drive Trainium: TorchNeuron ('native'), and the legacy torch-xla with torch-neuronx
('xla'). Both compile a program for each new shape, which takes minutes, and keep it in a folder. On
XLA, each process takes the core at its LOCAL_RANK in NEURON_RT_VISIBLE_CORES.

Source: "Neuron Persistent Cache", "TorchNeuron environment variables" and the EFA guide of the AWS
Neuron documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.contract.job import Job

XLA, NATIVE = "xla", "native"
STACK_VARIABLE = "AMPHORA_NEURON_STACK"
CACHE_FOLDER = "neuron-compile-cache"
_CACHE_VARIABLES = {XLA: "NEURON_COMPILE_CACHE_URL", NATIVE: "TORCH_NEURONX_NEFF_CACHE_DIR"}
_FLAGS = "NEURON_CC_FLAGS"
_CACHE_OPTION = re.compile(r"--cache_dir[= ](\S+)")
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    XLA: {_FLAGS: "--model-type=transformer"},
    # accelerate looks for XLA before it looks for the device `neuron`.
    NATIVE: {"USE_TORCH_XLA": "0"},
}
# The runtime forks, which libfabric must know on kernels before 5.15.
EFA_DEFAULTS: Mapping[str, str] = {"FI_EFA_FORK_SAFE": "1"}


def setup(
    job: Job, environ: Mapping[str, str], processes: int
) -> tuple[dict[str, str], Path | None, list[str]]:
    """Choose the variables for the stack that the image declares.

    Returns the variables of every process, in which values of the container's environment are kept
    or extended; the folder of compiled programs, if it is on this host; and notes for the log.
    Raises ConfigError if the recipe's image declares none, or a variable does not fit the stack.
    """
    stack = environ.get(STACK_VARIABLE, "")
    if not stack and job.entry_point is not None:
        note = f"Neuron stack: {STACK_VARIABLE} is not set, so the script sets up Neuron itself"
        return {}, None, [note]
    if stack not in _DEFAULTS:
        raise ConfigError(
            f"This host has Neuron cores, and {STACK_VARIABLE} is {stack!r}.",
            "Use an image built by ./build_and_push.sh neuron, which sets it, or set it to"
            f" {NATIVE} (TorchNeuron) or {XLA} (torch-xla) as the image has it.",
        )
    cores = environ.get("NEURON_RT_VISIBLE_CORES", "")
    if stack == NATIVE and cores and processes > 1:
        # TorchNeuron gives each process its own core only if the variable is not set.
        raise ConfigError(
            f"NEURON_RT_VISIBLE_CORES is {cores!r}, and {processes} processes would take all of"
            " these cores each.",
            f"Give NEURON_RT_NUM_CORES={processes}, one core for each process, or name one core.",
        )
    variables = {name: environ.get(name, value) for name, value in _DEFAULTS[stack].items()}
    variable = _CACHE_VARIABLES[stack]
    flags = variables.get(_FLAGS, "")
    # On XLA the compiler's option takes precedence over the variable.
    option = _CACHE_OPTION.search(flags)
    default = str(job.paths.checkpoints / CACHE_FOLDER)
    location = option[1] if option else environ.get(variable, default)
    variables[variable] = environ.get(variable, location)
    local = location.removeprefix("file://")
    cache = None if "://" in local else Path(local)
    if stack == XLA and cache is not None and not option and "--no-cache" not in flags:
        # optimum-neuron's NeuronTrainer looks here only, and fails at the end of a training if it
        # finds no cache to upload.
        variables[_FLAGS] = f"{flags} --cache_dir={cache}"
    return variables, cache, [f"Neuron stack: {stack}", f"compiled programs are kept in {location}"]
