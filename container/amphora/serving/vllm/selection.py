"""Chooses the engine that generates a decoder's text: vLLM, if it is installed and lists the
model's architecture, or the model's own handlers (transformers)."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amphora.common.errors import ConfigError
from amphora.serving import handler_files
from amphora.serving.settings import ADAPTER_CONFIG, ServerSettings
from amphora.serving.vllm.vllm_source import find_package, read_architectures

VLLM, TRANSFORMERS = "vllm", "transformers"
PREFIX, _LMI = "SM_VLLM_", "OPTION_"
"""The prefix of variables that set vLLM's arguments, as in AWS's vLLM image."""
_TASK = "text-generation"
_OF_SENTENCES = ("modules.json", "config_sentence_transformers.json")


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine, and what vLLM serves."""

    engine: str
    reason: str
    """Empty if there was nothing to decide."""
    model: str = ""
    """A folder, or a name on the Hugging Face Hub."""
    adapter: Path | None = None
    """The LoRA adapter that is the model itself; `model` is then its base."""


def select(settings: ServerSettings, environ: Mapping[str, str]) -> EngineChoice:
    """Choose the engine.

    Raises ConfigError if AMPHORA_GENERATION asks for vLLM, which cannot serve the model; or if
    variables of LMI, or without vLLM its variables, would be ignored.
    """
    wish = settings.generation
    model, adapter = _model(settings, environ)
    has_handlers = bool(
        settings.submitted or handler_files.has_handlers(settings.code_dir, settings.program)
    )
    # A model's own handlers may read OPTION_* and adapters/ themselves.
    if not has_handlers and (lmi := sorted(name for name in environ if name.startswith(_LMI))):
        raise ConfigError(
            f"{', '.join(lmi)}: variables of AWS's LMI image are not read.",
            f"Set {PREFIX}* with vLLM's own names, such as {PREFIX}TENSOR_PARALLEL_SIZE for"
            f" OPTION_TENSOR_PARALLEL_DEGREE and {PREFIX}MAX_NUM_SEQS for"
            " OPTION_MAX_ROLLING_BATCH_SIZE.",
        )
    custom = sorted(name for name in environ if name.startswith("CUSTOM_FASTAPI_"))
    path = settings.model_dir / (environ.get("CUSTOM_SCRIPT_FILENAME") or "model.py")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if re.search(r"model_hosting_container_standards|def custom_sagemaker_", text):
        custom.append(str(path))
    if custom:
        raise ConfigError(
            f"{', '.join(custom)}: custom handlers of AWS's vLLM image are not run here.",
            "Leave them out, or write code/inference.py with model_fn and transform_fn.",
        )
    if wish == TRANSFORMERS:
        obstacle = "AMPHORA_GENERATION is transformers"
    elif find_package() is None:
        obstacle = f"vLLM is not installed for {sys.executable}"
    elif settings.is_multi_model:
        obstacle = "SAGEMAKER_MULTI_MODEL is set"
    elif has_handlers:
        obstacle = f"the model has its own handlers ({settings.submitted or settings.code_dir})"
    elif (task := environ.get("HF_TASK", "")) not in ("", _TASK):
        obstacle = f"HF_TASK is {task}"
    elif not model:
        obstacle = f"{settings.model_dir} holds no model, and HF_MODEL_ID names none"
    elif wish == VLLM:
        reason, obstacle = "AMPHORA_GENERATION is vllm", ""
    else:
        reason, obstacle = _select_by_files(model, adapter, environ)
    if not obstacle:
        return EngineChoice(engine=VLLM, reason=reason, model=model, adapter=adapter)
    if wish == VLLM:
        raise ConfigError(
            f"AMPHORA_GENERATION is vllm, but {obstacle}.", "Leave it out, or remove the cause."
        )
    if unused := sorted(name for name in environ if name.startswith(PREFIX)):
        remedy = "set AMPHORA_GENERATION to vllm" if find_package() else "use the vllm image"
        raise ConfigError(
            f"{', '.join(unused)} set arguments of vLLM, which is not used: {obstacle}.",
            f"Leave them out, or {remedy}.",
        )
    is_decided = wish or find_package() is not None
    return EngineChoice(engine=TRANSFORMERS, reason=obstacle if is_decided else "")


def _model(settings: ServerSettings, environ: Mapping[str, str]) -> tuple[str, Path | None]:
    """Return the model that vLLM would serve, or "", and the adapter to serve on it."""
    folder = settings.model_dir
    on_hub = environ.get("HF_MODEL_ID", "")
    if named := environ.get(f"{PREFIX}MODEL"):
        return named, None
    # The recipe saves config.json of the base with an adapter.
    has_weights = any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    if has_weights or not (folder / ADAPTER_CONFIG).is_file():
        if not (folder / "config.json").is_file():
            return on_hub, None
        if on_hub and Path(on_hub).absolute() != folder.absolute():
            raise ConfigError(
                f"HF_MODEL_ID is {on_hub!r}, but {folder} holds a model, too.",
                "Leave HF_MODEL_ID out to serve the model of model.tar.gz (AMPHORA_MODEL_NAME names"
                " it in answers), or leave out the archive.",
            )
        return str(folder), None
    base = str(_read(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    last = Path(base).name
    # The image's own handlers look in the same places.
    others = folder.parent / "additional-model-data-sources"
    folders = [folder / base, folder / last, others / last] if base else []
    base_model = next((path for path in folders if (path / "config.json").is_file()), None)
    return on_hub or str(base_model or base), folder


def _select_by_files(
    model: str, adapter: Path | None, environ: Mapping[str, str]
) -> tuple[str, str]:
    """Return the reason to serve a model with vLLM and "", or "" and the reason not to."""
    folder = Path(model)
    kind = _read(adapter / ADAPTER_CONFIG).get("task_type") if adapter is not None else None
    if kind not in (None, "CAUSAL_LM"):
        return "", f"the adapter's task_type is {kind}"
    # Models that make vectors may have a decoder's architecture.
    if "HF_TASK" not in environ and any((folder / name).is_file() for name in _OF_SENTENCES):
        return "", f"{model} is a model of sentence-transformers: set HF_TASK to generate text"
    named = _read(folder / "config.json").get("architectures")
    if not named:
        variables = [name for name in sorted(environ) if name.startswith(PREFIX)]
        if variables or environ.get("HF_TASK") == _TASK:
            return f"{variables[0] if variables else 'HF_TASK'} is set, for {model}", ""
        return "", f"the architecture of {model} is not known before it is fetched: set HF_TASK"
    package = find_package()
    assert package is not None
    if not (listed := read_architectures(package)):
        return "", f"no list of architectures was found in {package}"
    if named[0] in listed:
        return f"it lists {named[0]}", ""
    return "", f"vLLM does not list {named[0]} as a model that generates text"


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(value := json.loads(path.read_text()), dict):
            return value
    return {}
