"""The precision in which a model is served: bfloat16 if the device computes in it.

On GPUs without bfloat16 (T4, V100), float16 takes its place if the answers stay the same. Its range
is smaller: values overflow or vanish in models that were not trained for it, often only in long
texts. So it is the default only for encoders of known families, whose layers end in a
normalisation, and for decoders whose weights were published in float16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin
from recipe.backend.static import programs
from recipe.backend.tolerances import are_close, tolerance_of
from recipe.console import log
from recipe.models import packed_encoders
from recipe.runtime import device

DEVICES = frozenset(name for name, kind in device.KINDS.items() if kind.has_fast_float16)
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def chosen(environ: Mapping[str, str]) -> tuple[str, str, torch.dtype]:
    """Return the device, AMPHORA_DTYPE or its default there, and the type of the weights.

    Raises:
        ValueError: AMPHORA_DTYPE is not a precision, or the device does not support it.
    """
    choice = device.choose(environ, bf16=None, use_cpu=False, fp16=False)
    name = environ.get("AMPHORA_DTYPE") or ("bfloat16" if choice.bf16 else "float32")
    if name == "int8":
        raise ValueError(
            "AMPHORA_DTYPE is 'int8'. Leave it out, and quantize the model once: train with "
            "quantize=int8, or run `amphora quantize`."
        )
    if name not in _DTYPES:
        raise ValueError(f"AMPHORA_DTYPE is {name!r}. Give {', '.join(_DTYPES)}.")
    return choice.kind, name, _DTYPES[name]


def library_precision(environ: Mapping[str, str], what: str) -> tuple[str, str, torch.dtype]:
    """Return the device, AMPHORA_DTYPE or float32, and its type, for a model that another library
    computes.

    Args:
        environ: AMPHORA_DTYPE.
        what: The class or the task, for messages.

    Raises:
        ModelError: The device needs fixed shapes.
        ValueError: AMPHORA_DTYPE is not a precision.
    """
    # Libraries convert answers to NumPy arrays, which do not support bfloat16.
    kind, name, dtype = chosen(
        {**environ, "AMPHORA_DTYPE": environ.get("AMPHORA_DTYPE") or "float32"}
    )
    if kind in programs.DEVICES:
        raise programs.refused(kind, f"{what} has no fixed shapes")
    return kind, name, dtype


def may_replace(kind: str, name: str, environ: Mapping[str, str]) -> bool:
    """Return whether float16 may replace the precision `name` on a device. It may replace float32
    only, and only if AMPHORA_DTYPE does not request that."""
    return kind in DEVICES and name == "float32" and not environ.get("AMPHORA_DTYPE")


def is_published_in(origin: Origin) -> bool:
    """Return whether the weights of a model are in float16, by its configuration."""
    config: Any = origin.config()
    return getattr(config, "dtype", None) in (torch.float16, "float16")


def settled(
    model: PreTrainedModel,
    origin: Origin,
    architecture: Any,
    name: str,
    environ: Mapping[str, str],
    answers: Callable[[bool], Sequence[Tensor]],
) -> tuple[PreTrainedModel, str]:
    """Return the model in a precision that it supports, and the name of that precision.

    Args:
        model: The model as it was loaded, on its device.
        origin: Its folder or name, to load it again.
        architecture: The Auto class that loads it.
        name: The precision in which it was loaded.
        environ: AMPHORA_DTYPE.
        answers: Computes values of some short texts; with True, also of the longest text.
    """
    if name == "bfloat16" and not environ.get("AMPHORA_DTYPE"):
        if computes(model, answers):
            return model, name
        name = "float32"
    elif may_replace(model.device.type, name, environ) and packed_encoders.family_of(model.config):
        if converted(model, functools.partial(answers, True)):
            return model, "float16"
    else:
        return model, name
    return weights.read(origin, architecture, torch.float32).eval().to(model.device), name


def computes(model: PreTrainedModel, answers: Callable[[bool], object]) -> bool:
    """Return whether a model computes in bfloat16, else log the reason. DeBERTa's first version,
    XLNet and FNet create float32 tensors, or use operations without other types."""
    try:
        answers(False)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        kind, why = type(model).__name__, str(error).partition("\n")[0]
        log(f"precision: float32, since {kind} does not support bfloat16: {why}")
        return False
    return True


def converted(model: PreTrainedModel, answers: Callable[[], Sequence[Tensor]]) -> bool:
    """Convert a model's weights to float16, and return whether its answers stay those of float32.

    Args:
        model: The model. Its float32 weights are lost.
        answers: Computes its values of short texts and of the longest text.
    """
    expected = answers()
    torch.nn.Module.to(model, dtype=torch.float16)
    try:
        return are_close(answers(), expected, tolerance_of(expected, torch.float16) / 6)
    except RuntimeError as error:
        log(f"float16: {str(error)[:200]}")
        return False
