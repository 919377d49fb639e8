"""How long a step waits for a checkpoint: written beside training, or in the step.

    nice -n 10 python benchmarks/bench_checkpoints.py [--sizes 22 110 600] [--folder FOLDER]

Random BERTs of so many million parameters in float32 with AdamW's moments, saved by what a training
saves by (`recipe.training.snapshot`, `recipe.storage.background`), each in a process of its own. A
line of JSON for each: bytes, and seconds of the copy that a step waits for (the first one is given
new memory by the host, later ones take that of the one before), of the writing beside it, and of
writing in the step; medians of some rounds in turns. A checkpoint takes 12 bytes a parameter on the
disk, and its copy as much memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "code"))

SHAPES = {
    22: {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12},
    110: {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    600: {"hidden_size": 1536, "num_hidden_layers": 19, "num_attention_heads": 24},
}


def measured(millions: int, folder: Path, rounds: int) -> dict[str, Any]:
    """Of one model, in this process."""
    import torch
    from transformers import BertConfig, BertModel

    from recipe.runtime import sharded
    from recipe.storage import checkpoints
    from recipe.storage.background import Background
    from recipe.training import snapshot

    shape = SHAPES[millions]
    model = BertModel(BertConfig(**shape, intermediate_size=4 * shape["hidden_size"]))
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():  # as a step leaves them, without the memory of gradients
        optimizer.state[weight] = {"step": torch.ones(()), "exp_avg": torch.rand_like(weight),
                                   "exp_avg_sq": torch.rand_like(weight)}  # fmt: skip

    def taken(copies: bool, before: snapshot.Snapshot | None = None) -> snapshot.Snapshot:
        weights, file = snapshot.weights_of(model)
        return snapshot.Snapshot(
            weights=sharded.copy_to_host(weights, True, copies, before and before.weights),
            weights_file=file,
            optimizer=sharded.copy_to_host(
                optimizer.state_dict(), True, copies, before and before.optimizer
            ),
            files={},
            also=lambda folder: None,
        )

    def write(what: snapshot.Snapshot) -> None:
        with checkpoints.writing(folder, 1, 0) as path:
            path.mkdir(parents=True)
            what.write(path)
            checkpoints.publish(folder, 1, {}, finished=False)
        for left in folder.iterdir():
            shutil.rmtree(left)

    copy, writer = None, Background()
    in_background, within, writing = [], [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        copy = taken(True, copy)
        writer.start(functools.partial(write, copy))
        in_background.append(time.perf_counter() - start)
        writer.wait()
        writing.append(time.perf_counter() - start - in_background[-1])
        start = time.perf_counter()
        write(taken(False))
        within.append(time.perf_counter() - start)
    first, *later = in_background
    waits = {"first copy": [first], "later copies": later, "written beside": writing,
             "in the step": within}  # fmt: skip
    return {
        "millions": round(sum(weight.numel() for weight in model.parameters()) / 1e6, 1),
        "gigabytes": round(
            snapshot.bytes_of([dict(model.named_parameters()), optimizer.state_dict()]) / 1e9, 2
        ),
        "seconds": {name: round(statistics.median(value), 2) for name, value in waits.items()},
        "in the step / later copies": round(
            statistics.median(within) / statistics.median(later), 1
        ),
    }


def main() -> None:
    """Print a line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps(measured(options.one, Path(folder), options.rounds)), flush=True)
        return
    for size in options.sizes:
        command = [sys.executable, __file__, "--one", str(size), "--rounds", str(options.rounds)]
        command += [] if options.folder is None else ["--folder", str(options.folder)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
