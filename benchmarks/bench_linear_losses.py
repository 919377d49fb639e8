"""Losses of a large vocabulary: our logits in parts beside torch's linear_cross_entropy.

    python benchmarks/bench_linear_losses.py [--places 512 --width 256 --vocabulary 32000]

Forward and backward in float32 on one thread, each variant in processes of its own that take turns.
A line for each: CPU-seconds, the least of the rounds; by how many megabytes the process grew at its
peak; and the loss.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "code"))

VARIANTS = {
    "whole": "all logits at once",
    "parts": "ours, 4 parts, computed again for their gradients",
    "128": "torch's, chunks of 128",
    "auto": "torch's, its own choice of chunks",
}


def one(kind: str, tokens: int, width: int, vocabulary: int) -> dict[str, float]:
    """CPU-seconds, megabytes and loss of a forward and backward pass in this process."""
    import torch
    from torch.nn import functional

    from recipe.models import packed_decoders

    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = torch.randn(tokens, width, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    targets = torch.randint(vocabulary, (tokens,))
    packed_decoders._MOST_LOGITS = tokens * vocabulary // 4

    def run() -> Any:
        if kind == "whole":
            loss = functional.cross_entropy(head(states), targets)
        elif kind == "parts":
            loss = packed_decoders.token_losses(states, head, targets, vocabulary)[:, 0].mean()
        else:
            chunks = {"batch_chunk_size": 128} if kind == "128" else {}
            options = torch.nn.LinearCrossEntropyOptions(**chunks)
            loss = functional.linear_cross_entropy(states, head.weight, targets, options=options)
        loss.backward()
        return loss

    head.weight.grad = torch.zeros_like(head.weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    loss = float(run())
    seconds = time.process_time() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "megabytes": grown / 1e3, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=VARIANTS, help="this variant, in this process")
    options = parser.parse_args()
    shape = [options.places, options.width, options.vocabulary]
    if options.one:
        print(json.dumps(one(options.one, *shape)))
        return
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in VARIANTS}
    names = ("--places", "--width", "--vocabulary")
    given = [text for name, size in zip(names, shape, strict=True) for text in (name, str(size))]
    for _ in range(options.rounds):
        for kind, measured in results.items():
            command = [sys.executable, __file__, "--one", kind, *given]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            measured.append(json.loads(done.stdout.splitlines()[-1]))
    for kind, measured in results.items():
        seconds = min(figures["seconds"] for figures in measured)
        megabytes = min(figures["megabytes"] for figures in measured)
        loss = measured[0]["loss"]
        print(f"{VARIANTS[kind]:50} {seconds:.2f} CPU-s {megabytes:5.0f} MB  loss {loss:.6f}")


if __name__ == "__main__":
    main()
