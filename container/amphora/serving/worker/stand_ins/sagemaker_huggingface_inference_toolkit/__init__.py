"""Stands in for Hugging Face's toolkit of that name, which needs a Java server: `decoder_encoder`
for user files that import it, and the replacement of everything else."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name in ("decoder_encoder", "handler_service"):
        raise AttributeError(name)
    raise ImportError(
        f"sagemaker_huggingface_inference_toolkit.{name} is not in this image. Of the toolkit it"
        " has decoder_encoder (decode, encode); leave model_fn out for a pipeline by HF_TASK."
    )
