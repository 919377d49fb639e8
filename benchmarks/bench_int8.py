"""A classifier in 8 bits by OpenVINO's and ONNX Runtime's own tools: labels that change, and speed.

    pip install nncf onnx onnxruntime    # beside the recipe's environment
    python benchmarks/bench_int8.py --model FOLDER --texts FILE --calibration FILE

A text a line; 300 of the second file set the scales of activations. The model is one of
AutoModelForSequenceClassification. Labels are compared with those of OpenVINO in float32, over
batches of 16 of like length; CPU-milliseconds a text are the least of five rounds in which the
variants take turns, over texts drawn at random, on one thread.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import nncf
import numpy as np
import onnxruntime
import openvino
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAMES = ["input_ids", "attention_mask", "token_type_ids"]
CALIBRATION, ROUNDS, TEXTS = 300, 5, 64
Compute = Callable[[dict[str, Any]], Any]


class _Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, *inputs: Any) -> Any:
        """Of `NAMES` in their order."""
        return self._model(**dict(zip(NAMES, inputs, strict=True))).logits


def variants(model: Any, calibration: list[dict[str, Any]], folder: Path) -> dict[str, Compute]:
    """What computes logits, by the names of engine and precision."""
    example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in NAMES)
    exact, reduced = str(folder / "model.onnx"), str(folder / "int8.onnx")
    axes = {name: {0: "texts", 1: "tokens"} for name in NAMES}
    torch.onnx.export(
        _Logits(model), example, exact, input_names=NAMES, dynamic_axes=axes, dynamo=False
    )
    quantize_dynamic(exact, reduced, weight_type=QuantType.QInt8, per_channel=True)
    graph = openvino.convert_model(model, example_input=dict(zip(NAMES, example, strict=True)))

    def compile_openvino(graph: Any, precision: str) -> Compute:
        settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": 1,
                    "INFERENCE_PRECISION_HINT": precision}  # fmt: skip
        request = openvino.Core().compile_model(graph, "CPU", settings).create_infer_request()
        return lambda batch: request.infer(batch)[0].copy()

    def compile_onnxruntime(path: str) -> Compute:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda batch: session.run(None, batch)[0]

    def quantized(is_fast: bool) -> Any:
        return nncf.quantize(
            graph.clone(), nncf.Dataset(calibration), model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(calibration), fast_bias_correction=is_fast,
        )  # fmt: skip

    weights = nncf.compress_weights(graph.clone(), mode=nncf.CompressWeightsMode.INT8_ASYM)
    return {
        "OpenVINO, float32": compile_openvino(graph, "f32"),
        "OpenVINO, bfloat16": compile_openvino(graph, "bf16"),
        "OpenVINO, int8 by nncf": compile_openvino(quantized(True), "bf16"),
        "the same, biases corrected by inference": compile_openvino(quantized(False), "bf16"),
        "OpenVINO, weights in int8": compile_openvino(weights, "bf16"),
        "ONNX Runtime, float32": compile_onnxruntime(exact),
        "ONNX Runtime, int8 with dynamic scales": compile_onnxruntime(reduced),
    }


def main() -> None:
    """A line for each variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForSequenceClassification.from_pretrained(options.model).eval()

    def batch(texts: list[str]) -> dict[str, Any]:
        rows = tokenizer(texts, padding=True, pad_to_multiple_of=8, truncation=True,
                         max_length=128, return_tensors="np")  # fmt: skip
        return {name: rows[name] for name in NAMES}

    texts = options.texts.read_text().splitlines()
    samples = [batch([text]) for text in options.calibration.read_text().splitlines()[:CALIBRATION]]
    with tempfile.TemporaryDirectory() as folder:
        computes = variants(model, samples, Path(folder))
    texts.sort(key=lambda text: len(tokenizer(text)["input_ids"]))
    labels = {
        name: np.concatenate(
            [
                compute(batch(texts[index : index + 16])).argmax(1)
                for index in range(0, len(texts), 16)
            ]
        )
        for name, compute in computes.items()
    }
    first = next(iter(labels.values()))
    speeds: dict[str, list[float]] = {name: [] for name in computes}
    sizes = (1, 8, 32)
    for size in sizes:
        least = dict.fromkeys(computes, float("inf"))
        for turn in range(ROUNDS):
            drawn = random.Random(turn)
            calls = [batch(drawn.sample(texts, size)) for _ in range(max(2, TEXTS // size))]
            for name, compute in computes.items():
                for call in calls:  # kernels of its shapes
                    compute(call)
                start = time.process_time()
                for call in calls:
                    compute(call)
                seconds = (time.process_time() - start) / len(calls) / size
                least[name] = min(least[name], seconds)
        for name, seconds in least.items():
            speeds[name].append(1000 * seconds)
    print(f"| | labels changed of {len(texts)} | CPU-ms a text, calls of {sizes} |")
    for name in computes:
        shown = ", ".join(f"{speed:.2f}" for speed in speeds[name])
        print(f"| {name} | {int((labels[name] != first).sum())} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
