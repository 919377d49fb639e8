"""A model whose weights are kept in 4 bits under LoRA's adapters (QLoRA), by bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from recipe.errors import HyperparameterError, ModelError
from recipe.runtime.device import Device

BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight: 4 bits, 8 bits of scale per 64 weights, and 4 bytes per 256 scales."""
_REFUSED = "Hyperparameter load_in_4bit has value True, but"
_REMEDY = "Leave it out: lora_r alone trains with little memory."


def check(chosen: Device, is_sharded: bool, is_compiled: bool) -> None:
    """Raise HyperparameterError if weights in 4 bits, which are requested, are not possible."""
    if chosen.kind != "cuda":
        raise HyperparameterError(
            f"{_REFUSED} this host computes on {chosen.kind}: bitsandbytes' layers run on NVIDIA "
            "GPUs only.",
            f"Choose an instance with one, or leave it out: {_REMEDY.partition(': ')[2]}",
        )
    if is_sharded:
        raise HyperparameterError(
            f"{_REFUSED} the model is to be sharded (fsdp): 4-bit weights need "
            "their scales and cannot be sharded.",
            "Leave one of them out. In 4 bits each GPU has the whole model, 0.52 bytes a parameter "
            "(4.2 GB of 8 billion, 36 GB of 70 billion).",
        )
    if is_compiled:
        raise HyperparameterError(
            f"{_REFUSED} the model is to be compiled, which is not tested with bitsandbytes' "
            "layers.",
            "Leave compile out.",
        )


def check_base(name: str, settings: Mapping[str, Any], model: Any, in_4_bits: bool) -> None:
    """Raise ModelError if a model to be trained has quantized weights: training would leave them
    unchanged, merging adapters would round them, or a library is missing.

    Args:
        settings: The content of its config.json.
        model: The loaded model; None before that.
        in_4_bits: The hyperparameter load_in_4bit.
    """
    saved = settings.get("quantization_config")
    if not saved:
        return
    method = saved.get("quant_method") or "bitsandbytes"
    # transformers dequantizes these if it has no kernels for them.
    becomes_whole = method == "mxfp4" and not in_4_bits
    if becomes_whole and not getattr(model, "is_quantized", False):
        return
    raise ModelError(
        f"The model {name} was saved with quantized weights ({method}), which cannot be trained.",
        "Give the original model; for a decoder, load_in_4bit=True with lora_r and "
        "lora_save=adapter keeps its weights in 4 bits in a training on a GPU.",
    )


def options(bf16: bool, fp16: bool) -> dict[str, Any]:
    """Return the arguments of from_pretrained that read weights into 4 bits.

    They are NF4 with quantized scales, and multiplied in the precision of the training. The head
    and layers that are not linear stay in float32.
    """
    dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config}


def layers(model: Any) -> list[nn.Linear]:
    """Return the layers of a decoder, maybe with adapters, whose weights would be in 4 bits."""
    head = model.get_output_embeddings()
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and "lora_" not in name
    ]
