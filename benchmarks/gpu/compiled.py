"""Layers compiled one at a time: seconds to the first step, and time of a step, beside eager.

    python benchmarks/gpu/compiled.py [--smoke] [--only BERT]

Each model trains twice in processes that share a folder of compiled programs: the second start must
compile nothing. No dropout, so that losses are comparable. Exits with 1 if a step breaks, if the
loss differs by more than a thousandth, or if the second start compiles.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from typing import Any

import graph
import speed
from stage import Failed, Stage, Values, run

from recipe.models import cpu_kernels, flat_attention
from recipe.runtime import compiled_layers
from recipe.training import engine

TRAIN = "--train"
KINDS = ("BERT", "ModernBERT", "Llama, LoRA")
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def train(stage: Stage, kind: str, way: str) -> dict[str, Any]:
    """Train some steps, eager or compiled."""
    sizes = graph.SIZES | STILL | ({} if stage.smoke else graph.BASE)
    size, steps = (graph.SIZE, 12) if stage.smoke else (64, 40)
    with tempfile.TemporaryDirectory() as folder:
        prepared = graph.prepare(
            kind, folder, sizes, size, steps, bf16=not stage.smoke,
            bf16_weights="bf16 weights" in way, torch_compile=way.startswith("compiled"),
        )  # fmt: skip
        trainer = engine.build(prepared)
        seconds, first = speed.seconds_of_steps(stage, trainer, min(speed.WARM_UP, steps - 1))
    loss = next(row["train_loss"] for row in trainer.state.log_history if "train_loss" in row)
    return {
        "first step, s": round(first, 2),
        "step, ms": round(1000 * seconds / (steps - min(speed.WARM_UP, steps - 1)), 2),
        "loss": loss,
    }


def start_in_process(stage: Stage, kind: str, ways: list[str], cache: str) -> dict[str, Any]:
    """Train in a process of its own, each way in turn."""
    command = [sys.executable, __file__, TRAIN, json.dumps([kind, *ways])]
    output = run([*command, *["--smoke"] * stage.smoke], {"TORCHINDUCTOR_CACHE_DIR": cache})
    results: dict[str, Any] = json.loads(output.splitlines()[-1])
    return results


def measure_starts(stage: Stage, kind: str) -> Values:
    """Start cold and from the cache, and compare with eager steps."""
    ways = ["eager", "compiled"] + ["compiled, bf16 weights"] * (not stage.smoke)
    with tempfile.TemporaryDirectory() as cache:
        cold = start_in_process(stage, kind, ways, cache)
        warm = start_in_process(stage, kind, ["compiled"], cache)
    results = {"cold": cold, "warm": warm}
    apart = abs(cold["compiled"]["loss"] - cold["eager"]["loss"])
    if "with 0 breaks" not in cold["graphs"]:
        raise Failed("a layer is not whole", **results)
    if ", 0 programs compiled" not in warm["graphs"]:
        raise Failed("the second start compiles", **results)
    if apart > (1e-3 if stage.smoke else 1e-2) * abs(cold["eager"]["loss"]):
        raise Failed(f"the loss differs by {apart}", **results)
    return results


def main() -> None:
    """Run all checks, or train in this process."""
    kind, *ways = json.loads(sys.argv[2]) if sys.argv[1:2] == [TRAIN] else [None]
    del sys.argv[1 : 3 if ways else 1]
    stage = Stage("compiled", __doc__, seconds=400)
    if kind is None:
        for name in KINDS:
            stage.check(name, 120, partial(measure_starts, stage, name))
        stage.end()
    if stage.device.type == "cpu":  # rows as on a GPU, by the CPU's operator
        flat_attention.why_not = lambda *arguments: None
        cpu_kernels.lighten = lambda *arguments, **options: None
    results = {way: train(stage, kind, way) for way in ways}
    print(json.dumps({**results, "graphs": compiled_layers.describe()}))


if __name__ == "__main__":
    main()
