"""The precision in which a model is served: bfloat16 if the device computes in it.

On GPUs without bfloat16 (T4, V100), float16 takes its place if the answers stay the same. Its range
is smaller: values overflow or vanish in models that were not trained for it, often only in long
texts. So it is the default only for encoders of known families, whose layers end in a
normalisation, and for decoders whose weights were published in float16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from recipe.backend.loaded_model import LoadedModel
from recipe.backend.rows import Reading, are_close, tolerance_of
from recipe.backend.saved import weights
from recipe.console import log
from recipe.models import packed_encoders
from recipe.models.sources.origin import Origin
from recipe.runtime import device

DEVICES = frozenset(name for name, kind in device.KINDS.items() if kind.has_fast_float16)
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_REFERENCE = ContextVar[str]("_REFERENCE", default="")


@contextlib.contextmanager
def as_reference(name: str = "float32") -> Iterator[None]:
    """Load models of the block for reference answers: on the CPU in the precision `name`, each text
    alone."""
    token = _REFERENCE.set(name)
    try:
        yield
    finally:
        _REFERENCE.reset(token)


def is_reference() -> bool:
    """Return whether models are loaded for reference answers."""
    return bool(_REFERENCE.get())


def chosen(environ: Mapping[str, str]) -> tuple[str, str, torch.dtype]:
    """Return the device, AMPHORA_DTYPE or its default there, and the type of the weights. Raise
    ValueError if AMPHORA_DTYPE is not a precision, or the device does not support it."""
    if name := _REFERENCE.get():
        return "cpu", name, _DTYPES[name]
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


def may_replace(kind: str, name: str, environ: Mapping[str, str]) -> bool:
    """Return whether float16 may replace the precision `name` on a device. It may replace float32
    only, and only if AMPHORA_DTYPE does not request that."""
    return kind in DEVICES and name == "float32" and not environ.get("AMPHORA_DTYPE")


def settled(
    loaded: LoadedModel,
    origin: Origin,
    architecture: Any,
    name: str,
    environ: Mapping[str, str],
    reading: Reading,
) -> tuple[LoadedModel, str]:
    """Return the model in a precision that it supports, and the name of that precision.

    The model is on its device, in the precision `name`. Its values of `reading` are compared; if
    they differ, it is loaded again by `architecture`.
    """
    model, alone = loaded.model, loaded.alone()
    if name == "bfloat16" and not environ.get("AMPHORA_DTYPE"):
        try:
            alone.forward(loaded.probes(), reading)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # DeBERTa's first version, XLNet and FNet create float32 tensors, or use operations
            # without other types.
            kind, why = type(model).__name__, str(error).partition("\n")[0]
            log(f"precision: float32, since {kind} does not support bfloat16: {why}")
        else:
            return loaded, name
    elif may_replace(model.device.type, name, environ) and packed_encoders.family_of(model.config):
        rows = [*loaded.probes(), loaded.longest()]
        expected = alone.forward(rows, reading)
        torch.nn.Module.to(model, dtype=torch.float16)
        try:
            tolerance = tolerance_of(expected, torch.float16) / 6
            if are_close(alone.forward(rows, reading), expected, tolerance):
                return loaded, "float16"
        except RuntimeError as error:
            log(f"float16: {str(error)[:200]}")
    else:
        return loaded, name
    model = weights.read(origin, architecture, torch.float32).eval().to(model.device)
    return replace(loaded, model=model), "float32"
