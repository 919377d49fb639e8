"""Builds the command that starts vLLM's server: the arguments that the front needs, and those that
the variables of AWS's vLLM image (SM_VLLM_*) set."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from amphora.common.devices import CPU, CUDA
from amphora.common.errors import ConfigError, did_you_mean
from amphora.serving.settings import ADAPTER_CONFIG, ADAPTERS, ServerSettings
from amphora.serving.vllm import vllm_source
from amphora.serving.vllm.selection import PREFIX, EngineChoice
from amphora.serving.vllm.vllm_source import ArgumentKind

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
_TRUE, _FALSE = ("true", "1", "yes", "on", ""), ("false", "0", "no", "off")
_OWN_FILES = {"tokenizer": "tokenizer_config.json", "generation-config": "generation_config.json"}
_TOKENIZERS = ("tokenizer*", "vocab*", "spiece.model", "*.tiktoken", "tekken.json", "*.gguf")
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The most adapters in device memory; others are in host memory.
_ADAPTER_SLOTS = 8
# vLLM's kernels for CPUs give a base's requests the weights of the last slot, if they share a batch
# with an adapter's: so that slot stays empty. An unloaded adapter keeps its slot, so there are
# spare ones.
_EMPTY_SLOTS, _RELOADS = 1, 8
# The share of a GPU's memory that weights may take; the rest is for the cache.
_WEIGHTS_SHARE = 0.7


def served_names(environ: Mapping[str, str]) -> list[str]:
    """Return the model's names, that of answers first. SM_VLLM_SERVED_MODEL_NAME may be a list."""
    names = ("AMPHORA_MODEL_NAME", PREFIX + "SERVED_MODEL_NAME", "HF_MODEL_ID")
    text = next((environ[name] for name in names if environ.get(name)), "model")
    return _words(text.strip(), ArgumentKind.LIST) or ["model"]


def loads_of_engine(settings: ServerSettings) -> int:
    """Return how many adapters vLLM's CPU build may load, unloaded ones included."""
    return max(settings.adapters, 1) + _RELOADS


def command(
    settings: ServerSettings, environ: Mapping[str, str], selection: EngineChoice, socket: Path
) -> list[str]:
    """Return the command of vLLM's server, which listens on a Unix socket.

    Raises ConfigError that names the variables that set what may not be set.
    """
    given = _given(environ)
    _check_files(selection, given)
    names = served_names(environ)
    usual: dict[str, list[str]] = {
        "uds": [str(socket)],
        "served-model-name": [BASE] if selection.adapter else names,
        "disable-uvicorn-access-log": [],
        # The maximum of OpenAI's API.
        "max-logprobs": ["20"],
    }
    if dtype := environ.get("AMPHORA_DTYPE"):
        usual["dtype"] = [dtype]
    if revision := environ.get("HF_MODEL_REVISION"):
        usual["revision"] = [revision]
    if environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true"):
        usual["trust-remote-code"] = []
    folders = [path.parent for path in settings.model_dir.glob(f"{ADAPTERS}/*/{ADAPTER_CONFIG}")]
    if selection.adapter is not None:
        folders.append(selection.adapter)
        usual["lora-modules"] = [f"{names[0]}={selection.adapter}"]
        # By default vLLM takes the base's tokenizer and settings, and not the adapter's.
        for argument, file in _OWN_FILES.items():
            if (selection.adapter / file).is_file():
                usual[argument] = [str(selection.adapter)]
    if folders or settings.adapters:
        usual["enable-lora"] = []
        most = max(settings.adapters, 1)
        slots = min(most, _ADAPTER_SLOTS)
        if settings.device_kind == CPU:
            most = slots = loads_of_engine(settings) + _EMPTY_SLOTS
        usual |= {"max-loras": [str(slots)], "max-cpu-loras": [str(most)]}
        configs = [json.loads((folder / ADAPTER_CONFIG).read_text()) for folder in folders]
        ranks = [int(config.get("r", 0)) for config in configs]
        ranks += [int(r) for config in configs for r in (config.get("rank_pattern") or {}).values()]
        rank = max(ranks, default=16)
        usual["max-lora-rank"] = [str(next((size for size in _RANKS if size >= rank), rank))]
    if settings.device_kind == CUDA and "tensor-parallel-size" not in given:
        weights = sum(path.stat().st_size for path in Path(selection.model).glob("*.safetensors"))
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        listing = subprocess.run(query, capture_output=True, text=True, timeout=60, env=os.environ)
        sizes = [int(line) * 2**20 for line in listing.stdout.split() if line.isdecimal()]
        fits = not sizes or weights < _WEIGHTS_SHARE * min(sizes)
        usual["tensor-parallel-size"] = ["1" if fits else str(settings.accelerators)]
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", selection.model]
    for argument, values in {**usual, **given}.items():
        words += [f"--{argument}", *values]
    return words


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    child = {name: text for name, text in environ.items() if not name.startswith(PREFIX)}
    child["PYTHONUNBUFFERED"] = "1"
    # It enables routes that only the front can call.
    child["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    child.setdefault("VLLM_NO_USAGE_STATS", "1")
    if environ.get("HF_API_TOKEN"):
        child.setdefault("HF_TOKEN", environ["HF_API_TOKEN"])
    return child


def _given(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return vLLM's arguments that variables set, with their words; a flag has none."""
    given: dict[str, list[str]] = {}
    problems: list[str] = []
    # A start that fails takes minutes.
    package = vllm_source.find_package()
    kinds = vllm_source.read_arguments(package) if package else {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        argument, value = variable.removeprefix(PREFIX).lower().replace("_", "-"), text.strip()
        positive = argument.removeprefix("no-")
        is_negated = argument not in kinds and kinds.get(positive) is ArgumentKind.FLAG
        kind = kinds.get(positive if is_negated else argument)
        if argument in _REFUSED:
            problems.append(
                f"{variable} cannot be set: clients reach the front (SAGEMAKER_BIND_TO_PORT,"
                " AMPHORA_BIND), and not vLLM's server."
            )
        elif kinds and kind is None:
            hint = did_you_mean(argument, kinds)
            problems.append(f"{variable} names no argument of vLLM.{hint}")
        elif argument in _ELSEWHERE:
            continue
        elif kind in (ArgumentKind.FLAG, ArgumentKind.SWITCH):
            if value.lower() not in (*_TRUE, *_FALSE):
                problems.append(f"{variable} is {value!r}: give true or false.")
            is_on = (value.lower() in _TRUE) != is_negated
            if is_on or kind is ArgumentKind.FLAG:
                given[positive if is_on else f"no-{positive}"] = []
        elif (words := _words(value, kind)) is not None:
            given[argument] = words
    if problems:
        raise ConfigError(
            " ".join(problems),
            f"Leave out or correct: {PREFIX}MAX_MODEL_LEN is --max-model-len of `vllm serve`.",
        )
    return given


def _check_files(selection: EngineChoice, given: Mapping[str, list[str]]) -> None:
    """Raise ConfigError if vLLM would end after minutes, or answer no chat, for want of a tokenizer
    or because of the chat template."""
    from jinja2 import Environment, TemplateSyntaxError

    folder = Path(selection.adapter or selection.model)
    if not Path(selection.model).is_dir():
        return
    folders = (folder, Path(selection.model))
    files = (path for folder in folders for name in _TOKENIZERS for path in folder.glob(name))
    if not {"tokenizer", "skip-tokenizer-init"} & {*given} and not any(files):
        raise ConfigError(
            f"{folder} has no tokenizer: none of {', '.join(_TOKENIZERS)}.",
            f"Save the tokenizer next to the model, or set {PREFIX}TOKENIZER.",
        )
    templates = {path: path.read_text() for path in folder.glob("chat_template.jinja")}
    with contextlib.suppress(OSError, ValueError):
        path = folder / "tokenizer_config.json"
        templates[path] = json.loads(path.read_text()).get("chat_template")
    for text in given.get("chat-template", ()):
        path = Path(text)
        templates[path] = text if "{" in text else path.read_text() if path.is_file() else ""
    for path, template in templates.items():
        try:
            # transformers' own tag.
            text = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", str(template or ""))
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template in {path} cannot be read (line {error.lineno}): {error}.",
                f"Correct it, or set {PREFIX}CHAT_TEMPLATE.",
            ) from error


def _words(text: str, kind: ArgumentKind | None) -> list[str] | None:
    """Return a variable's value as words of a command; None leaves the argument out, as AWS's image
    does with false.

    A list has a word for each item of a JSON list, of several JSON objects, or between spaces. The
    kind is None if vLLM's source was not read: then values alone decide, as in AWS's image.
    """
    if text.lower() == "false" or (not text and kind not in (None, ArgumentKind.OPTIONAL)):
        return None
    if kind in (None, ArgumentKind.OPTIONAL) and text.lower() in ("", "true"):
        return []
    if kind in (None, ArgumentKind.LIST):
        with contextlib.suppress(ValueError):
            if text.startswith("["):
                items = json.loads(text)
                return [
                    item if isinstance(item, str) else json.dumps(item) for item in items
                ] or None
            words, rest = [], text
            while rest.startswith("{"):
                _, end = json.JSONDecoder().raw_decode(rest)
                words.append(rest[:end])
                rest = rest[end:].lstrip()
            if not rest:
                return words
        if kind is ArgumentKind.LIST and not text.startswith(("[", "{")):
            return text.split()
    return [text]
