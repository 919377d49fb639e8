"""Default handlers for the functions that a user's file does not define.

They follow the image for which the file was written: Hugging Face's, where a request is a dict and
the model a pipeline, or PyTorch's, where a request is a tensor. The image is inferred from the
loaded model and the file's imports, and printed once; AMPHORA_HANDLER_DEFAULTS (huggingface,
pytorch) sets it.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.backend.requests.payloads import BadRequest
from recipe.console import log
from recipe.inference.defaults import pytorch, task_pipeline

VARIABLE = "AMPHORA_HANDLER_DEFAULTS"
HUGGING_FACE, PYTORCH = "huggingface", "pytorch"
_TITLES = {HUGGING_FACE: "Hugging Face", PYTORCH: "PyTorch"}
_HUB_LIBRARIES = {
    "transformers", "sentence_transformers", "diffusers", "optimum", "peft", "setfit",
    "huggingface_hub", "sagemaker_huggingface_inference_toolkit",
}  # fmt: skip


def select_defaults(defined: frozenset[str], path: str) -> Defaults:
    """Return the defaults for a file of handlers, by the functions that it defines and its path,
    which is empty if there is none. Raise ValueError if AMPHORA_HANDLER_DEFAULTS is invalid."""
    setting = os.environ.get(VARIABLE, "").strip().lower()
    if setting not in ("", HUGGING_FACE, PYTORCH):
        raise ValueError(
            f"{VARIABLE} is {setting!r}. Give {HUGGING_FACE} or {PYTORCH}, or leave it out."
        )
    return Defaults(defined=defined, path=path, setting=setting)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The default functions of one file."""

    defined: frozenset[str]
    path: str
    setting: str

    def model_fn(self, model_dir: str) -> Any:
        """Load a pipeline, as Hugging Face's image does."""
        return task_pipeline.make_pipeline(model_dir, os.environ)

    def complete(self, model: Any) -> Mapping[str, Any]:
        """Return what replaces the functions that the file does not define, for its loaded model.
        Raise ValueError if that needs one of them.

        `predict_fn` is a handler. The server reads and writes bodies itself, as the image of
        `family` does, for the pipeline's `task`; of numbers `to_tensor` makes PyTorch's.
        """
        missing = sorted({"input_fn", "predict_fn", "output_fn"} - self.defined)
        if "transform_fn" in self.defined or not missing:
            return {}
        if "predict_fn" not in self.defined:
            kind = type(model).__name__
            if not callable(model) and library_call(model) is None:
                raise ValueError(
                    f"model_fn of {self.path} returned a {kind}, which cannot be called: define"
                    " predict_fn(data, model), or return a pipeline or a module."
                )
            reads_tokens = getattr(model, "main_input_name", "") == "input_ids"
            if (
                "input_fn" not in self.defined
                and reads_tokens
                and "transformers" in packages_of(model)
            ):
                raise ValueError(
                    f"model_fn of {self.path} returned a {kind}, and nothing in the file"
                    " tokenizes requests: return transformers.pipeline(...) from model_fn, or"
                    " define input_fn or predict_fn."
                )
        family, reason = self.family(model)
        log(
            f"handlers: {', '.join(missing)} as in the {_TITLES[family]} image, since {reason}"
            f" ({VARIABLE} sets it)"
        )
        task = str(getattr(model, "task", "") or os.environ.get("HF_TASK", ""))

        return {
            "family": family, "task": task, "predict_fn": predict,
            "to_tensor": lambda value: pytorch.to_tensor(value, model),
        }  # fmt: skip

    def family(self, model: Any) -> tuple[str, str]:
        """Return the image for which the file was written, HUGGING_FACE or PYTORCH, and why."""
        if self.setting:
            return self.setting, f"{VARIABLE} is {self.setting}"
        parts = [model]  # also look inside (model, tokenizer) and {"model": ...}
        if isinstance(model, Mapping):
            parts = list(model.values())
        elif isinstance(model, (list, tuple)):
            parts = list(model)
        name = type(model).__name__
        if name == "EndpointHandler":
            return HUGGING_FACE, "the model is an EndpointHandler"
        if isinstance(model, task_pipeline.TaskPipeline):
            return HUGGING_FACE, f"the model answers {model.task} as a pipeline"
        if any(packages_of(part) & _HUB_LIBRARIES for part in parts):
            return HUGGING_FACE, f"the model is a {name} of Hugging Face's libraries"
        if any("torch" in packages_of(part) for part in parts):
            return PYTORCH, f"the model is a {name}, a module of PyTorch"
        imported = imports_of(self.path)
        if libraries := sorted(imported & _HUB_LIBRARIES):
            return HUGGING_FACE, f"{Path(self.path).name} imports {', '.join(libraries)}"
        if "torch" in imported:
            return PYTORCH, f"{Path(self.path).name} imports torch"
        return HUGGING_FACE, f"nothing of PyTorch is in {Path(self.path).name} or its model"


def predict(data: Any, model: Any) -> Any:
    """Call the model with a request's data, as both images do.

    A dict is Hugging Face's request: {"inputs": ..., "parameters": {...}}, or without "inputs" the
    inputs themselves; a dict of tensors is what a tokenizer made. Any other value is the argument.

    Raises:
        BadRequest: (400) "parameters" is not an object, or a module is called without a tensor.
    """
    function = library_call(model) or model
    arguments: tuple[Any, ...] = (data,)
    named: dict[str, Any] = {}
    is_nested = False
    if isinstance(data, Mapping):
        data = dict(data)
        if data and all("torch" in packages_of(value) for value in data.values()):
            arguments, named = (), data
        else:
            arguments = (data.pop("inputs", data),)
            parameters = data.pop("parameters", None)
            if parameters is not None and not isinstance(parameters, Mapping):
                raise BadRequest(
                    '"parameters" must be an object, as in {"parameters": {"top_k": 2}}.'
                )
            named = dict(parameters or {})
            if named.get("return_all_scores") and "transformers" in packages_of(function):
                # transformers 5 would drop it. Version 4 answers one text with a list of lists.
                del named["return_all_scores"]
                is_nested = "top_k" not in named and isinstance(arguments[0], str)
                named["top_k"] = None
    elif "torch" in packages_of(function) and isinstance(data, list):
        raise BadRequest("The model takes a tensor: send a JSON array of numbers.")
    torch = sys.modules.get("torch")
    if torch is None:
        return function(*arguments, **named)
    if "torch" in packages_of(model):
        model.eval()
    with torch.no_grad():
        prediction = function(*arguments, **named)
    return [prediction] if is_nested else prediction


def library_call(model: Any) -> Callable[..., Any] | None:
    """Return the method by which a model of sentence-transformers answers texts; None for other
    models, which are called."""
    if "sentence_transformers" not in packages_of(model):
        return None
    return next(
        (getattr(model, name) for name in ("encode", "predict") if hasattr(model, name)), None
    )


def packages_of(value: Any) -> set[str]:
    """Return the top-level packages of a value's class and its base classes."""
    return {kind.__module__.partition(".")[0] for kind in type(value).__mro__}


def imports_of(path: str) -> set[str]:
    """Return the top-level packages that a file imports; empty if the file does not exist."""
    if not path or not Path(path).is_file():
        return set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}
