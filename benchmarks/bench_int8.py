"""A BERT classifier in int8 by OpenVINO, ONNX Runtime and CTranslate2: changed labels, and speed.

    pip install onnx onnxruntime ctranslate2    # in addition to make setup
    python benchmarks/bench_int8.py --model FOLDER --texts FILE --calibration FILE

FILE has one text a line; 300 of the second file set the scales of activations. The model is one of
AutoModelForSequenceClassification. Labels are compared with those of OpenVINO in float32, over
batches of 16 texts of similar length; CPU-ms a text are the least of five rounds in which the
variants take turns, over random texts, on one thread.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from common import parser, table, take_turns
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAMES = ["input_ids", "attention_mask", "token_type_ids"]
CALIBRATION, ROUNDS, TEXTS = 300, 5, 64
Compute = Callable[[dict[str, Any]], Any]


class _Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, *inputs: Any) -> Any:
        """Compute logits of `NAMES` in their order."""
        return self._model(**dict(zip(NAMES, inputs, strict=True))).logits


def variants(
    model: Any, tokenizer: Any, calibration: list[dict[str, Any]], folder: Path
) -> dict[str, Compute]:
    """Return what computes logits, by the names of engine and precision."""
    import ctranslate2
    import nncf
    import onnxruntime
    import openvino
    from onnxruntime.quantization import QuantType, quantize_dynamic

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

    def compile_ctranslate2() -> Compute:
        """Compute states by CTranslate2, and the head by PyTorch."""
        source, target = str(folder / "source"), str(folder / "ctranslate2")
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        ctranslate2.converters.TransformersConverter(source).convert(target, quantization="int8")
        encoder = ctranslate2.Encoder(target, intra_threads=1, compute_type="int8")

        def compute(batch: dict[str, Any]) -> Any:
            lengths = batch["attention_mask"].sum(1).tolist()
            rows = [ids[:n].tolist() for ids, n in zip(batch["input_ids"], lengths, strict=True)]
            pooled = torch.from_numpy(np.array(encoder.forward_batch(rows).pooler_output))
            with torch.no_grad():
                return model.classifier(pooled).numpy()

        return compute

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
        "CTranslate2, int8": compile_ctranslate2(),
    }


def cpu_milliseconds(compute: Compute, calls: list[dict[str, Any]]) -> float:
    """Measure a text of `calls`, after a pass that compiles the kernels of their shapes."""
    for call in calls:
        compute(call)
    start = time.process_time()
    for call in calls:
        compute(call)
    return (time.process_time() - start) * 1000 / sum(len(call[NAMES[0]]) for call in calls)


def main() -> None:
    """Compare the variants on the texts of a file."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--texts", type=Path, required=True)
    arguments.add_argument("--calibration", type=Path, required=True)
    options = arguments.parse_args()
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
        computes = variants(model, tokenizer, samples, Path(folder))
    draw = random.Random(0)
    calls = {
        size: [batch(draw.sample(texts, size)) for _ in range(max(2, TEXTS // size))]
        for size in (1, 8, 32)
    }
    ways = {
        (name, size): partial(cpu_milliseconds, compute, calls[size])
        for size in calls
        for name, compute in computes.items()
    }
    speeds = take_turns(ways, ROUNDS)
    texts.sort(key=lambda text: len(tokenizer(text)["input_ids"]))
    batches = [batch(texts[index : index + 16]) for index in range(0, len(texts), 16)]
    rows, reference = [], None
    for name, compute in computes.items():
        labels = np.concatenate([compute(call).argmax(1) for call in batches])
        reference = labels if reference is None else reference
        changed = f"{int((labels != reference).sum())} of {len(texts)}"
        milliseconds = {
            f"CPU-ms a text, {size} a call": f"{min(speeds[name, size]):.2f}" for size in calls
        }
        rows.append({"": name, "labels changed": changed, **milliseconds})
    print(table(rows))


if __name__ == "__main__":
    main()
