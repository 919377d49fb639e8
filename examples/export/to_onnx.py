"""Write a trained encoder as an ONNX file, and compare its answers with PyTorch's.

Channel: `model`, a model's folder or the model.tar.gz of a training job. The job's model has
model.onnx, the configuration and the tokenizer. It uses PyTorch's exporter, since optimum's
(optimum-onnx 0.1.0) needs transformers before 4.58. Start it like any script (script_*.py
--source-dir examples/export --entry-point to_onnx.py).
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import transformers

NAMES = ("input_ids", "attention_mask", "token_type_ids")
TEXTS = ("a text", "another, longer text")


def main() -> None:
    folder = Path(os.environ["SM_CHANNEL_MODEL"])
    if (archive := folder / "model.tar.gz").is_file():
        folder = Path(tempfile.mkdtemp())
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    config = transformers.AutoConfig.from_pretrained(folder)
    most = getattr(config, "max_position_embeddings", 4096)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    architecture = getattr(transformers, config.architectures[0])
    model = architecture.from_pretrained(folder, dtype=torch.float32).eval()

    def inputs(texts: tuple[str, ...]) -> dict[str, torch.Tensor]:
        encoded = tokenizer(
            list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt"
        )
        return {name: encoded[name] for name in NAMES if name in encoded}

    out = Path(os.environ["SM_MODEL_DIR"])
    example = inputs(TEXTS)
    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens", max=most)
    torch.onnx.export(
        model,
        (),
        out / "model.onnx",
        kwargs=example,
        input_names=list(example),
        dynamic_shapes={name: {0: rows, 1: tokens} for name in example},
        dynamo=True,
        verbose=False,
    )
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)

    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    # Other numbers of rows and tokens than those that were traced.
    other = inputs((*TEXTS, TEXTS[1] * 2))
    answer = session.run(None, {name: value.numpy() for name, value in other.items()})[0]
    with torch.no_grad():
        expected = model(**other)[0].numpy()
    difference = float(np.abs(answer - expected).max())
    print(f"metric onnx_difference={difference:.3g}", flush=True)
    if difference > 1e-3:
        raise SystemExit(f"model.onnx answers otherwise than PyTorch, by up to {difference:.3g}.")


if __name__ == "__main__":
    main()
