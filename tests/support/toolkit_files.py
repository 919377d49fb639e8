"""Inference files as users write them for the images of AWS and Hugging Face, and requests.

Modelled on what those toolkits document and test: every subset of the functions, models of every
kind, each of the types that the defaults read and write. None is copied.
"""

from __future__ import annotations

from tests.support.toolkit_files_hub import HUGGING_FACE
from tests.support.toolkit_files_torch import PYTORCH
from tests.support.toolkit_questions import (
    CSV,
    NPY,
    ROWS,
    File,
    ask,
    ask_bytes,
    ask_csv,
    ask_npy,
)

BASE = [
    File(name="base-all-but-output", oracle="base", model="empty", code="""
        import json, numpy as np
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return np.array(json.loads(body))
        def predict_fn(data, model): return data * model
        """, questions=[ask(ROWS), ask(ROWS, CSV), ask(ROWS, NPY), ask(ROWS, "a/b", ours=406)]),
    File(name="base-decoders-of-the-toolkit", oracle="base", model="empty", code="""
        from sagemaker_inference import decoder, encoder
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return decoder.decode(body, content_type)
        def predict_fn(data, model): return data * model
        def output_fn(prediction, accept): return encoder.encode(prediction, accept)
        """, questions=[ask(ROWS), ask_csv("1,2\n3,4\n", CSV), ask_npy(ROWS, NPY),
                        ask_bytes(b"x", "a/b", ours=415)]),
]  # fmt: skip

FILES = [*HUGGING_FACE, *PYTORCH, *BASE]
