"""The memory of a step that `amphora doctor` predicts, beside what PyTorch allocated."""

from __future__ import annotations

import tempfile
from typing import Any

import graph
import torch
from stage import Failed, Stage, Values

from recipe.training import engine, step_memory

WAYS: dict[str, dict[str, Any]] = {
    "autocast": {},
    "bf16 weights": {"bf16_weights": True},
    "bf16 weights, graphs": {"bf16_weights": True, "cuda_graphs": True},
}


def compare_peaks(stage: Stage, kind: str) -> Values:
    """Compare the predicted peak with that of three steps; on a CPU, only predict."""
    sizes, size = (graph.SIZES, graph.SIZE) if stage.smoke else (graph.SIZES | graph.BASE, 256)
    results: dict[str, Any] = {}
    for way, options in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            prepared = graph.prepare(kind, folder, sizes, size, 3, **options)
            memory = step_memory.predict(prepared, "cuda", True)
            results[way] = {"predicted": memory.describe(), "MB": round(memory.total / 1e6, 1)}
            if memory.activations is None:
                raise Failed(f"{way}: activations are unknown", **results)
            if stage.device.type != "cuda":
                continue
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            trainer = engine.build(prepared)
            trainer.train()
            peak = torch.cuda.max_memory_allocated() - before
            results[way]["measured MB"] = round(peak / 1e6, 1)
            del trainer, prepared
        if abs(memory.total - peak) > 0.15 * peak:
            raise Failed(f"{way}: predicted {memory.total / peak:.2f} times the peak", **results)
    return results
