"""What a job on Neuron cores needs in its environment, by the stack that the image carries.

Two stacks drive Trainium: torch-xla with torch-neuronx ('xla'), and TorchNeuron ('native'). Both
compile a program for each new shape, which takes minutes, and keep what they compiled in a folder.

Source: "Neuron Persistent Cache", "TorchNeuron environment variables" and the EFA guide of the AWS
Neuron documentation. torchrun's processes need no
NEURON_RT_VISIBLE_CORES of their own on XLA: libneuronxla gives LOCAL_RANK its place in the list.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.contract.job import Job

XLA, NATIVE = "xla", "native"
STACK_VARIABLE = "AMPHORA_NEURON_STACK"
PARALLEL_COMPILE = "RUN_NEURON_PARALLEL_COMPILE"
CACHE_FOLDER = "neuron-compile-cache"
_CACHE_VARIABLES = {XLA: "NEURON_COMPILE_CACHE_URL", NATIVE: "TORCH_NEURONX_NEFF_CACHE_DIR"}
_CACHE_OPTION = re.compile(r"--cache_dir[= ](\S+)")
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    XLA: {"NEURON_CC_FLAGS": "--model-type=transformer"},
    # accelerate looks for XLA before it looks for the device `neuron`.
    NATIVE: {"USE_TORCH_XLA": "0"},
}
# The runtime forks; libfabric asks to be told on kernels before 5.15.
EFA_DEFAULTS: Mapping[str, str] = {"FI_EFA_FORK_SAFE": "1"}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a job's processes find the compiler and its cache."""

    stack: str
    """'xla' or 'native'; '' where the image carries neither."""
    defaults: Mapping[str, str]
    """Variables for what the environment leaves open."""
    completed: Mapping[str, str]
    """Variables that say what the environment's own say, and more."""
    cache: Path | None
    """The folder of compiled programs, where it is one of this host."""
    notes: tuple[str, ...]


def setup(job: Job, environ: Mapping[str, str], processes: int) -> Setup:
    """The stack of this image, and the defaults that go with it, for `processes` on this host.

    Raises:
        ConfigError: AMPHORA_NEURON_STACK names no stack, the recipe is to train on Neuron cores
            that no library of this image can use, or a variable cannot be honoured.
    """
    if environ.get(PARALLEL_COMPILE) == "1":
        raise ConfigError(
            f"{PARALLEL_COMPILE} is 1, but this image compiles no graphs ahead of a training.",
            "Leave it out: training compiles what it needs, and a later job with the same"
            " checkpoint_s3_uri finds it.",
        )
    # Told without importing anything of it.
    stack = environ.get(STACK_VARIABLE, "")
    if stack:
        why = f"by {STACK_VARIABLE}"
        if stack not in _DEFAULTS:
            raise ConfigError(f"{STACK_VARIABLE} is {stack!r}.", f"Give {XLA} or {NATIVE}.")
    elif importlib.util.find_spec("torch_xla") is not None:
        stack, why = XLA, "torch-xla is installed"
    elif importlib.util.find_spec("torch_neuronx") is not None:
        stack, why = NATIVE, "torch-neuronx is installed without torch-xla"
    else:
        why = "neither torch-xla nor torch-neuronx is installed"
    if not stack:
        if job.entry_point is None:
            raise ConfigError(
                "This host has Neuron cores, but this image has neither torch-xla nor"
                " torch-neuronx.",
                "Use an image built by ./build_and_push.sh neuron.",
            )
        return Setup(
            stack="", defaults={}, completed={}, cache=None, notes=(f"Neuron stack: none, {why}",)
        )
    cores = environ.get("NEURON_RT_VISIBLE_CORES", "")
    if stack == NATIVE and cores and processes > 1:
        # TorchNeuron gives each process its own core only where nothing names any.
        raise ConfigError(
            f"NEURON_RT_VISIBLE_CORES is {cores!r}, and each of {processes} processes would take"
            " all of these cores.",
            f"Give NEURON_RT_NUM_CORES={processes}: each process then takes the core of its number;"
            " or name one core.",
        )
    variable = _CACHE_VARIABLES[stack]
    # On XLA the compiler's option beats the variable.
    option = _CACHE_OPTION.search(environ.get("NEURON_CC_FLAGS", "")) if stack == XLA else None
    chosen = option[1] if option else environ.get(variable)
    place = chosen or str(job.paths.checkpoints / CACHE_FOLDER)
    local = place.removeprefix("file://")
    cache = None if "://" in local else Path(local)
    flags = environ.get("NEURON_CC_FLAGS", _DEFAULTS[stack].get("NEURON_CC_FLAGS", ""))
    completed = {}
    if stack == XLA and cache is not None and not option and "--no-cache" not in flags:
        # Means the same to the compiler. optimum-neuron's NeuronTrainer looks here alone, and at
        # the end of a training uploads the cache: where none is found, that is an exception.
        completed["NEURON_CC_FLAGS"] = f"{flags} --cache_dir={cache}"
    return Setup(
        stack=stack,
        defaults={**_DEFAULTS[stack], variable: place},
        completed=completed,
        cache=cache,
        notes=(f"Neuron stack: {stack}, {why}", f"compiled programs are kept in {place}"),
    )
