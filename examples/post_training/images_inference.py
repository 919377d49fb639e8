"""Serve a model of images and texts by transformers' pipeline. sft_images.py saves it with a model.

A request is {"inputs": {"image": a file in base64, "text": "<image> What is it?"}, "parameters":
{"max_new_tokens": 20}}; the answer is what the pipeline returns.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import transformers
from PIL import Image


def model_fn(model_dir: str) -> Any:
    """Load the pipeline."""
    return transformers.pipeline("image-text-to-text", model=model_dir)


def predict_fn(body: dict[str, Any], pipeline: Any) -> Any:
    """Return the text that follows an image and a text."""
    inputs = body["inputs"]
    image = Image.open(io.BytesIO(base64.b64decode(inputs["image"]))).convert("RGB")
    return pipeline(images=image, text=inputs["text"], **body.get("parameters", {}))
