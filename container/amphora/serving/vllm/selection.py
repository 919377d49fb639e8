"""Which engine generates a decoder's text: vLLM, where it is installed and lists the model's
architecture, or the model's own handlers (transformers)."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amphora.common.errors import ConfigError
from amphora.serving import programs
from amphora.serving.settings import ADAPTER_CONFIG, ServerSettings

VLLM, TRANSFORMERS = "vllm", "transformers"
PREFIXES = ("SM_VLLM_", "OPTION_")
"""Of the variables that set vLLM's arguments: those of AWS's vLLM image, and of LMI."""
_REGISTRY = "model_executor/models/registry.py"
_LISTS = ("_TEXT_GENERATION_MODELS",)
_TASK = "text-generation"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The engine, why it was chosen, and what vLLM is to serve."""

    engine: str
    reason: str
    """Empty if there was nothing to decide."""
    model: str = ""
    """A folder, or a name on the Hugging Face Hub."""
    adapter: Path | None = None
    """The LoRA adapter that is the model itself; `model` is then its base."""


def select(settings: ServerSettings, environ: Mapping[str, str]) -> Selection:
    """Choose the engine.

    Raises:
        ConfigError: AMPHORA_GENERATION asks for vLLM and the model cannot be served by it, or
            variables of vLLM's are set and vLLM is not used.
    """
    wish = settings.generation
    model, adapter = _model(settings, environ)
    obstacle = _obstacle(settings, environ)
    if wish == TRANSFORMERS:
        obstacle = "AMPHORA_GENERATION is transformers"
    elif not obstacle and not model:
        obstacle = f"{settings.model_dir} holds no model, and HF_MODEL_ID names none"
    if not obstacle and wish != VLLM:
        reason, obstacle = _by_architecture(model, environ)
    else:
        reason = "AMPHORA_GENERATION is vllm"
    if not obstacle:
        return Selection(engine=VLLM, reason=reason, model=model, adapter=adapter)
    if wish == VLLM:
        raise ConfigError(
            f"AMPHORA_GENERATION is vllm, but {obstacle}.", "Leave it out, or change that."
        )
    if unused := sorted(name for name in environ if name.startswith(PREFIXES[0])):
        raise ConfigError(
            f"{', '.join(unused)} set arguments of vLLM, which is not used: {obstacle}.",
            "Leave them out, or set AMPHORA_GENERATION to vllm.",
        )
    is_decided = wish or _package() is not None
    return Selection(engine=TRANSFORMERS, reason=obstacle if is_decided else "")


def _package() -> Path | None:
    """vLLM's folder, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or not spec.origin else Path(spec.origin).parent


def _obstacle(settings: ServerSettings, environ: Mapping[str, str]) -> str:
    """What rules vLLM out whatever the model is, or ''."""
    if _package() is None:
        return f"vLLM is not installed for {sys.executable}"
    if settings.is_multi_model:
        return "SAGEMAKER_MULTI_MODEL is set"
    if settings.submitted or programs.has_handlers(settings.code_dir, settings.program):
        return f"the model has handlers of its own ({settings.submitted or settings.code_dir})"
    if (task := environ.get("HF_TASK", "")) not in ("", _TASK):
        return f"HF_TASK is {task}"
    return ""


def _model(settings: ServerSettings, environ: Mapping[str, str]) -> tuple[str, Path | None]:
    """The model that vLLM would serve, or '', and the adapter that is to be served on it."""
    folder = settings.model_dir
    named = environ.get("SM_VLLM_MODEL") or environ.get("OPTION_MODEL_ID") or ""
    on_hub = environ.get("HF_MODEL_ID", "")
    if named:
        return named, None
    # The recipe saves an adapter with its base's config.json.
    has_weights = any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    if has_weights or not (folder / ADAPTER_CONFIG).is_file():
        return (str(folder) if (folder / "config.json").is_file() else on_hub), None
    base = str(_read(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    last = Path(base).name
    # As the image's own handlers look for it.
    others = folder.parent / "additional-model-data-sources"
    places = [folder / base, folder / last, others / last] if base else []
    found = next((place for place in places if (place / "config.json").is_file()), None)
    return on_hub or str(found or base), folder


def _by_architecture(model: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Why vLLM serves this model and '', or '' and why it does not."""
    named = _read(Path(model) / "config.json").get("architectures")
    if not named:
        asked = [name for name in sorted(environ) if name.startswith(PREFIXES[0])]
        if asked or environ.get("HF_TASK") == _TASK:
            return f"{asked[0] if asked else 'HF_TASK'} is set, for {model}", ""
        return "", f"the architecture of {model} is not known before it is fetched: set HF_TASK"
    package = _package()
    assert package is not None
    listed = _listed(package / _REGISTRY)
    if not listed:
        return "", f"no list of architectures was found in {package / _REGISTRY}"
    if named[0] in listed:
        return f"it lists {named[0]}", ""
    return "", f"vLLM does not list {named[0]} as a model that generates text"


def _listed(registry: Path) -> set[str]:
    """The architectures that vLLM lists as models that generate text, read from its source: to
    import it takes ten seconds."""
    names: set[str] = set()
    with contextlib.suppress(OSError, SyntaxError):
        for node in ast.parse(registry.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id in _LISTS for target in targets):
                assert isinstance(node, ast.Assign)
                keys = node.value.keys if isinstance(node.value, ast.Dict) else []
                names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return names


def _read(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty if it is not there or is something else."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(value := json.loads(path.read_text()), dict):
            return value
    return {}
