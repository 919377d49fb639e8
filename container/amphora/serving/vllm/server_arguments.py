"""Builds the command that starts vLLM's server: the arguments that the front needs, and those that
the variables of AWS's vLLM image (SM_VLLM_*) set."""

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
from amphora.serving.vllm.selection import PREFIX, Selection

BASE = "base"
"""The name of the base of an adapter that is the model."""
# Arguments that this module sets from the same variables.
_ELSEWHERE = {"model", "served-model-name"}
# Arguments that would open another port, close the front's, start another kind of server, or hide
# the keys of its bodies.
_REFUSED = {
    "host", "port", "uds", "api-key", "ssl-keyfile", "ssl-certfile", "root-path", "middleware",
    "allowed-origins", "allowed-methods", "allowed-headers", "config", "headless", "grpc",
    "disable-fastapi-docs",
}  # fmt: skip
_OWN_FILES = {"tokenizer": "tokenizer_config.json", "generation-config": "generation_config.json"}
_DTYPES = ("float32", "bfloat16")
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The most adapters in device memory; others are in host memory.
_ADAPTERS_AT_ONCE = 8
# The share of a GPU's memory that weights may take; the rest is for the cache.
_WEIGHTS_SHARE = 0.7


def served_name(environ: Mapping[str, str]) -> str:
    """Return the model's name in clients' answers."""
    names = ("AMPHORA_MODEL_NAME", PREFIX + "SERVED_MODEL_NAME", "HF_MODEL_ID")
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
        # The maximum of OpenAI's API.
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
        usual["max-lora-rank"] = [str(next((size for size in _RANKS if size >= rank), rank))]
    if settings.device_kind == CUDA and "tensor-parallel-size" not in given:
        usual["tensor-parallel-size"] = [str(_gpus_needed(settings, selection.model))]
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", selection.model]
    for argument, values in {**usual, **given}.items():
        words += [f"--{argument}", *values]
    return words


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of vLLM's processes."""
    child = {name: text for name, text in environ.items() if not name.startswith(PREFIX)}
    child["PYTHONUNBUFFERED"] = "1"
    # It enables routes that only the front can call.
    child["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    child.setdefault("VLLM_NO_USAGE_STATS", "1")
    if environ.get("HF_API_TOKEN"):
        child.setdefault("HF_TOKEN", environ["HF_API_TOKEN"])
    return child


def _given(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return vLLM's arguments that variables set, with their words; a true flag has none."""
    given: dict[str, list[str]] = {}
    wrong: list[str] = []
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        argument = variable.removeprefix(PREFIX).lower().replace("_", "-")
        if argument in _REFUSED:
            wrong.append(variable)
        words = _words(text.strip())
        if argument not in _ELSEWHERE and words is not None:
            given[argument] = words
    if wrong:
        raise ConfigError(
            f"{', '.join(sorted(wrong))} cannot be set: clients reach the front, and not vLLM's"
            " server.",
            "Leave them out. SAGEMAKER_BIND_TO_PORT and AMPHORA_BIND set the address.",
        )
    return given


def _words(text: str) -> list[str] | None:
    """Return a variable's value as words of a command, as AWS's image reads it: one word for each
    item of a list. None leaves the argument out."""
    if text.lower() == "false":
        return None
    if text.lower() in ("", "true"):
        return []
    if text.startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            return [text]
        return [item if isinstance(item, str) else json.dumps(item) for item in items] or None
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
