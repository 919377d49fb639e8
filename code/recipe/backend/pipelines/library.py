"""Makes the pipelines of transformers, and finds their tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

from recipe.backend import precision, programs
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.pipelines import dropped
from recipe.backend.saved import weights
from recipe.compat import dtype_argument
from recipe.console import log
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.models.changes import adapters
from recipe.models.sources import tokenizers
from recipe.models.sources.origin import Origin

_FILES = {"tokenizer": "tokenizer_config.json", "image_processor": "preprocessor_config.json"}
"""The files of an adapter, in addition to its weights, by the arguments of a pipeline."""
for _task, _class, _heads in dropped.PIPELINES:
    if _task not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            _task + dropped.SUFFIX, _class, _heads, type="multimodal"
        )


def wrap_pipeline(task: str, loaded: LoadedModel) -> Any:
    """Return transformers' pipeline for a task around a loaded model."""
    make: Any = transformers.pipeline
    # The pipeline truncates texts at the tokenizer's limit, which some folders lack.
    loaded.tokenizer.model_max_length = loaded.max_length
    device = loaded.model.device
    return make(task, model=loaded.model, tokenizer=loaded.tokenizer, device=device)


def names() -> list[str]:
    """Return the tasks that the installed transformers has pipelines for."""
    known = PIPELINE_REGISTRY.supported_tasks
    return sorted(name.removesuffix(dropped.SUFFIX) for name in known)


def registered_name(task: str) -> str:
    """Return the name by which transformers makes the pipeline of a task."""
    older = task + dropped.SUFFIX
    return older if older in PIPELINE_REGISTRY.supported_tasks else task


def architectures(task: str) -> list[str]:
    """Return transformers' Auto classes whose models have the task's head."""
    entry = PIPELINE_REGISTRY.supported_tasks[registered_name(task)]
    return [model.__name__ for model in entry["pt"]]


def load_pipeline(origin: Origin, task: str, environ: Mapping[str, str]) -> Any:
    """Load transformers' own pipeline for a task. Raise ModelError if the model cannot be loaded
    for it, a library is missing, or the device needs fixed shapes, and ValueError if AMPHORA_DTYPE
    is not a precision."""
    # The library converts answers to NumPy arrays, which do not support bfloat16.
    requested = environ.get("AMPHORA_DTYPE") or "float32"
    kind, name, dtype = precision.chosen({**environ, "AMPHORA_DTYPE": requested})
    if kind in programs.DEVICES:
        raise programs.refused(kind, f"transformers' pipeline for {task} has no fixed shapes")
    # A model of models (LightGlue) would pass it on, before transformers 5.5 (CVE-2026-5241).
    trusts = bool(origin.options.get("trust_remote_code"))
    if origin.read_settings().get("trust_remote_code") and not trusts:
        raise ModelError(
            f"The config.json of {origin.location} has trust_remote_code, which would run code.",
            "If you trust it, set HF_TRUST_REMOTE_CODE=true, else set it to false in the file.",
        )
    make: Any = transformers.pipeline
    parts = {"model": origin.location, **dtype_argument(dtype)}
    if origin.adapter:
        parts = {
            name: origin.location
            for name, file in _FILES.items()
            if (Path(origin.location) / file).is_file()
        }
        architecture = getattr(transformers, architectures(task)[0])
        parts["model"] = adapters.merged(origin, architecture, dtype)
    try:
        pipeline = make(registered_name(task), device=kind, **parts, **origin.options)
    except ImportError as error:
        raise lacks_library(task, error) from error
    except (*UNLOADABLE, KeyError, TypeError) as error:
        raise ModelError(
            f"The model {origin.location} cannot be loaded for {task}: {why_unloadable(error)}",
            "Check that its files are complete, and that HF_TASK is what it was trained for.",
        ) from error
    weights.refuse_broken(pipeline.model, origin)
    weights.refuse_headless(pipeline.model, origin)
    if pipeline.tokenizer is not None:
        tokenizer = tokenizers.match_file(pipeline.tokenizer, origin.location, **origin.options)
        pipeline.tokenizer = tokenizer
        processor: Any = getattr(pipeline, "processor", None)
        if hasattr(processor, "tokenizer"):
            processor.tokenizer = tokenizer
        tokenizers.log_replacement(tokenizer)
    log(
        f"model: {type(pipeline.model).__name__} on {kind} in {name}, by transformers' own "
        "pipeline: one request at a time"
    )
    return pipeline


def lacks_library(task: str, error: ImportError) -> ModelError:
    """Return the error for a pipeline that needs a library."""
    why = " ".join(str(error).split())
    why = re.split(r" You can install| Check out the instructions", why)[0]
    return ModelError(
        f"The pipeline for {task} cannot be computed here: {why}",
        "Name the library that is missing in code/requirements.txt.",
    )
