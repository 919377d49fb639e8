"""The command that starts vLLM's server, with arguments from the variables of AWS's vLLM image
(SM_VLLM_*) and of LMI (OPTION_*), and those that the front needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from amphora.common.devices import CUDA
from amphora.common.errors import ConfigError
from amphora.serving.settings import ADAPTER_CONFIG, ADAPTERS, ServerSettings
from amphora.serving.vllm.selection import PREFIXES, Selection

BASE = "base"
"""The name of the base of an adapter that is the model."""
_AWS, _LMI = PREFIXES
# Arguments that are set from here.
_ELSEWHERE = {"model", "served-model-name"}
# Arguments that would open another port, or close the front's.
_REFUSED = {
    **dict.fromkeys(("host", "port", "uds"), "SAGEMAKER_BIND_TO_PORT and AMPHORA_BIND are read"),
    **dict.fromkeys(
        (
            "api-key",
            "ssl-keyfile",
            "ssl-certfile",
            "root-path",
            "middleware",
            "allowed-origins",
            "allowed-methods",
            "allowed-headers",
        ),
        "clients see the front, and not vLLM's server",
    ),
    **dict.fromkeys(("config", "headless", "grpc"), "it would start another kind of server"),
}
# LMI's names for vLLM's arguments.
_LMI_NAMES = {
    "model-id": "model",
    "tensor-parallel-degree": "tensor-parallel-size",
    "pipeline-parallel-degree": "pipeline-parallel-size",
    "max-rolling-batch-size": "max-num-seqs",
    "max-rolling-batch-prefill-tokens": "max-num-batched-tokens",
    "quantize": "quantization",
}
# LMI's own settings, with the values that describe this server; other values are refused.
_LMI_GIVEN = {
    "rolling-batch": ("auto", "vllm", "disable"),
    "async-mode": ("true",),
    "engine": ("python",),
    "entrypoint": ("djl_python.lmi_vllm.vllm_async_service",),
}
_OWN_FILES = {"tokenizer": "tokenizer_config.json", "generation-config": "generation_config.json"}
_DTYPES = ("float32", "bfloat16")
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The most adapters in a device's memory; others are in the host's.
_ADAPTERS_AT_ONCE = 8
# The share of a GPU's memory for weights: the rest is for the cache.
_WEIGHTS_SHARE = 0.7


def served_name(environ: Mapping[str, str]) -> str:
    """Return the model's name in clients' answers."""
    names = ("AMPHORA_MODEL_NAME", _AWS + "SERVED_MODEL_NAME", "HF_MODEL_ID")
    return next((environ[name] for name in names if environ.get(name)), "model")


def command(
    settings: ServerSettings, environ: Mapping[str, str], selection: Selection, socket: Path
) -> list[str]:
    """Return the command of vLLM's server, which listens on a Unix socket.

    Raises:
        ConfigError: Variables set arguments that may not be set; the message names all of them.
    """
    given = _given(environ)
    name = served_name(environ)
    usual: dict[str, list[str]] = {
        "uds": [str(socket)],
        "served-model-name": [BASE if selection.adapter else name],
        "disable-uvicorn-access-log": [],
        # The most of OpenAI's API.
        "max-logprobs": ["20"],
    }
    if dtype := environ.get("AMPHORA_DTYPE"):
        if dtype not in _DTYPES:
            raise ConfigError(
                f"AMPHORA_DTYPE is {dtype!r}, and vLLM serves this model.",
                f"Give {' or '.join(_DTYPES)}, or quantize the model's folder for vLLM.",
            )
        usual["dtype"] = [dtype]
    if environ.get("HF_MODEL_REVISION"):
        usual["revision"] = [environ["HF_MODEL_REVISION"]]
    if environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true"):
        usual["trust-remote-code"] = []
    folders = [path.parent for path in settings.model_dir.glob(f"{ADAPTERS}/*/{ADAPTER_CONFIG}")]
    if selection.adapter is not None:
        folders.append(selection.adapter)
        usual["lora-modules"] = [f"{name}={selection.adapter}"]
        # By default vLLM takes the base's tokenizer and settings, and not the adapter's.
        for argument, file in _OWN_FILES.items():
            if (selection.adapter / file).is_file():
                usual[argument] = [str(selection.adapter)]
    if folders or settings.adapters:
        most = max(settings.adapters, 1)
        usual["enable-lora"] = []
        usual["max-loras"] = [str(min(most, _ADAPTERS_AT_ONCE))]
        usual["max-cpu-loras"] = [str(most)]
        rank = max((_rank(folder) for folder in folders), default=16)
        usual["max-lora-rank"] = [str(next((each for each in _RANKS if each >= rank), rank))]
    if settings.device_kind == CUDA and "tensor-parallel-size" not in given:
        usual["tensor-parallel-size"] = [str(_gpus_needed(settings, selection.model))]
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", selection.model]
    for argument, values in {**usual, **given}.items():
        words += [f"--{argument}", *values]
    return words


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of vLLM's processes."""
    child = {name: text for name, text in environ.items() if not name.startswith(PREFIXES)}
    child["PYTHONUNBUFFERED"] = "1"
    # Only the front can call the routes that this opens.
    child["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    child.setdefault("VLLM_NO_USAGE_STATS", "1")
    if environ.get("HF_API_TOKEN"):
        child.setdefault("HF_TOKEN", environ["HF_API_TOKEN"])
    return child


def _given(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return vLLM's arguments that variables set, with their words; a true flag has none."""
    given: dict[str, list[str]] = {}
    wrong: list[str] = []
    for variable in sorted(environ, reverse=True):  # SM_VLLM_ comes before OPTION_
        prefix = next((each for each in PREFIXES if variable.startswith(each)), None)
        if prefix is None:
            continue
        argument = variable.removeprefix(prefix).lower().replace("_", "-")
        text = environ[variable].strip()
        if prefix == _LMI:
            if argument in _LMI_GIVEN:
                if text.lower() not in (allowed := _LMI_GIVEN[argument]):
                    wrong.append(f"{variable} is {text!r}: give {' or '.join(allowed)}.")
                continue
            argument = _LMI_NAMES.get(argument, argument)
            if argument.endswith("parallel-size") and text == "max":
                continue
        if argument in _REFUSED:
            wrong.append(f"{variable} cannot be set: {_REFUSED[argument]}.")
        if argument in _ELSEWHERE | set(given) or text.lower() == "false":
            continue
        words = _words(text)
        if words is not None:
            given[argument] = words
    if wrong:
        raise ConfigError(" ".join(wrong))
    return given


def _words(text: str) -> list[str] | None:
    """Return a variable's value as words of a command, as AWS's image reads it: one word for each
    item of a list. None leaves the argument out."""
    if text.lower() in ("", "true"):
        return []
    if text.startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            return [text]
        return [each if isinstance(each, str) else json.dumps(each) for each in items] or None
    return [text]


def _rank(folder: Path) -> int:
    """Return the largest rank of an adapter's layers."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    return max([int(config.get("r", 0)), *map(int, (config.get("rank_pattern") or {}).values())])


def _gpus_needed(settings: ServerSettings, model: str) -> int:
    """Return how many GPUs hold the weights: one, or all if one is too small."""
    weights = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=60, env=os.environ)
    sizes = [int(line) * 2**20 for line in found.stdout.split() if line.isdecimal()]
    fits = not sizes or weights < _WEIGHTS_SHARE * min(sizes)
    return 1 if fits else settings.accelerators
