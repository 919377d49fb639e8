"""PyTorch's own ways to compute an encoder faster on one thread of a CPU: CPU-ms a text.

    pip install torchao==0.18.0 zentorch==2.13.0.2
    .venv/bin/python benchmarks/bench_torch_int8.py --model FOLDER

Prints for each call (tokens, texts) and way the least of five calls, and the seconds of the first.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
import zentorch  # noqa: F401 (registers its compiler)
from common import minilm, parser
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from transformers import AutoModel

CALLS = ((24, 1), (24, 32), (128, 8))


def texts(tokens: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and a mask [count, tokens]."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(1000, 20000, (count, tokens)))
    return ids, torch.ones_like(ids)


class States(torch.nn.Module):
    """The last hidden states of ids and mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return [count, tokens, hidden]."""
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def quantize_exported(model: Any) -> Any:
    """Return the model quantized by PT2E for x86, compiled."""
    sizes = {0: torch.export.Dim("count", min=2, max=64), 1: torch.export.Dim("tokens", min=4)}
    shapes = {"ids": sizes, "mask": sizes}
    exported = torch.export.export(States(model), texts(24, 8), dynamic_shapes=shapes).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    prepared(*texts(24, 8))
    return torch.compile(convert_pt2e(prepared), dynamic=True)


@torch.no_grad()
def main() -> None:
    """Measure, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, default=minilm())
    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(arguments.parse_args().model).eval()
    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    ways: dict[str, Any] = {
        "PyTorch": States(model),
        "compiled": torch.compile(States(copy.deepcopy(model)), dynamic=True),
        "zentorch": torch.compile(States(copy.deepcopy(model)), backend="zentorch", dynamic=True),
        "torchao": States(quantized),
        "torchao, compiled": torch.compile(States(copy.deepcopy(quantized)), dynamic=True),
    }
    try:
        ways["PT2E"] = quantize_exported(model)
    except Exception as error:
        print(f"PT2E: {type(error).__name__}: {error}")
    for tokens, count in CALLS:
        for name, way in ways.items():
            began = time.monotonic()
            way(*texts(tokens, count))
            first, least = time.monotonic() - began, float("inf")
            for _ in range(5):
                spent = time.process_time()
                way(*texts(tokens, count))
                least = min(least, (time.process_time() - spent) * 1000 / count)
            print(f"{count} x {tokens} tokens, {name}: {least:.2f} ({first:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
