"""The precision that a model is served in: bfloat16 where the device computes in it.

On GPUs that do not (T4, V100) float16 takes its place where the answers stay. It has fewer
exponents: what a model was not made for overflows, or ends as zero, often only in long texts. So it
is the default for encoders of known families alone, whose layers end in a normalisation, and for
decoders whose weights were published in it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.backend.rows import are_close, tolerance_of
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin
from recipe.backend.static import programs
from recipe.models import packed_encoders
from recipe.runtime import device

DEVICES = frozenset(name for name, kind in device.KINDS.items() if kind.has_fast_float16)
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}


def chosen(environ: Mapping[str, str]) -> tuple[str, str, torch.dtype]:
    """Return the device, AMPHORA_DTYPE or its default there, and the type of the weights.

    Raises:
        ValueError: AMPHORA_DTYPE is not the name of a precision, or of one that the device lacks.
    """
    choice = device.choose(environ, bf16=None, use_cpu=False, fp16=False)
    name = environ.get("AMPHORA_DTYPE") or ("bfloat16" if choice.bf16 else "float32")
    if name not in _DTYPES:
        raise ValueError(f"AMPHORA_DTYPE is {name!r}. Give {', '.join(_DTYPES)}.")
    if name == "int8" and choice.kind != "cpu":
        raise ValueError(
            f"AMPHORA_DTYPE is 'int8', which is computed on a CPU only, and models are served on "
            f"{choice.kind} here. Give bfloat16 or float16."
        )
    return choice.kind, name, _DTYPES[name]


def of_library(environ: Mapping[str, str], what: str) -> tuple[str, str, torch.dtype]:
    """Return the device, AMPHORA_DTYPE or float32, and its type, for a library's own model class.

    Args:
        environ: AMPHORA_DTYPE.
        what: The class or the task.

    Raises:
        ModelError: The device takes fixed shapes only.
        ValueError: AMPHORA_DTYPE is a precision that the library does not have.
    """
    # Libraries make arrays of what models answer, and numpy has no bfloat16.
    kind, name, dtype = chosen(
        {**environ, "AMPHORA_DTYPE": environ.get("AMPHORA_DTYPE") or "float32"}
    )
    if name == "int8":
        raise ValueError(f"AMPHORA_DTYPE is 'int8', which {what} does not have. Give float32.")
    if kind in programs.DEVICES:
        raise programs.refused(kind, f"{what} has no fixed shapes")
    return kind, name, dtype


def may_replace(kind: str, name: str, environ: Mapping[str, str]) -> bool:
    """Return whether float16 may replace a precision: float32 that AMPHORA_DTYPE does not name.

    Args:
        kind: Of the device.
        name: The precision.
        environ: AMPHORA_DTYPE.
    """
    return kind in DEVICES and name == "float32" and not environ.get("AMPHORA_DTYPE")


def is_published_in(origin: Origin) -> bool:
    """Return whether a model's configuration names float16 for its weights."""
    config: Any = origin.config()
    return getattr(config, "dtype", None) in (torch.float16, "float16")


def is_made_for(model: PreTrainedModel) -> bool:
    """Return whether a model is an encoder of a family whose sums stay small."""
    return packed_encoders.family_of(model.config) is not None


def settled(
    model: PreTrainedModel,
    origin: Origin,
    architecture: Any,
    name: str,
    environ: Mapping[str, str],
    answers: Callable[[bool], Sequence[Tensor]],
) -> tuple[PreTrainedModel, str]:
    """Return the model in a precision that it computes in, and that precision's name.

    Args:
        model: As it was read, on its device.
        origin: Where it is, to be read again.
        architecture: The Auto class that reads it.
        name: The precision that it was read in.
        environ: AMPHORA_DTYPE.
        answers: Those of the model to some short texts; of True also to the longest that it reads.
    """
    if name == "bfloat16" and not environ.get("AMPHORA_DTYPE"):
        if computes(model, answers):
            return model, name
        name = "float32"
    elif may_replace(model.device.type, name, environ) and is_made_for(model):
        if converted(model, functools.partial(answers, True)):
            return model, "float16"
    else:
        return model, name
    return weights.read(origin, architecture, torch.float32).eval().to(model.device), name


def computes(model: PreTrainedModel, answers: Callable[[bool], object]) -> bool:
    """Return whether a model computes in bfloat16; a log line says why not. DeBERTa's first
    version, XLNet and FNet make float32 tensors, or use operations that have no other type."""
    try:
        answers(False)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        kind, why = type(model).__name__, str(error).partition("\n")[0]
        print(f"precision: float32, since {kind} is not computed in bfloat16: {why}", flush=True)
        return False
    return True


def converted(model: PreTrainedModel, answers: Callable[[], Sequence[Tensor]]) -> bool:
    """Convert a model's weights to float16, and return whether its answers stay those of float32.

    Args:
        model: Its weights are lost where the result is False.
        answers: Those of the model to a short text and to the longest that it reads.
    """
    expected = answers()
    torch.nn.Module.to(model, dtype=torch.float16)
    try:
        return are_close(answers(), expected, tolerance_of(expected, torch.float16) / 6)
    except RuntimeError as error:
        print(f"float16: {str(error)[:200]}", flush=True)
        return False


def in_int8(model: PreTrainedModel) -> Any:
    """Return the model on the CPU with linear layers that compute in int8."""
    quantisation: Any = torch.ao.quantization
    # A scale for each row of a weight halves the labels that change, at no cost.
    layers = {torch.nn.Linear: quantisation.per_channel_dynamic_qconfig}
    with warnings.catch_warnings():
        # torch means to leave it to torchao, which is slower without torch.compile.
        warnings.simplefilter("ignore")
        return quantisation.quantize_dynamic(model.cpu(), layers)
