"""Steps of padded samples cut by length into 1, 2 or 4 batches, and as the recipe chooses.

    python benchmarks/tasks/padded_steps.py --model MINILM --words 55

Texts of random words, log-normal in number (sigma 0.6), are classified with `packing=False`; for a
model of texts to texts (`--task summarization`) each has a target of two words. In bfloat16 on one
thread; variants take turns, and a line of each says rows a CPU-second of the training alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import tempfile
from pathlib import Path

from recipe_training import cpu_seconds
from words import FILLERS


def main() -> None:
    """A line for each variant and round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="text-classification")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--words", type=float, default=55, help="of the median text")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import torch

    from recipe.plan import worlds

    torch.set_num_threads(1)
    drawn = random.Random(0)
    rows = []
    for number in range(options.rows):
        count = round(min(240, max(2, drawn.lognormvariate(math.log(options.words), 0.6))))
        text = " ".join(drawn.choices(FILLERS, k=count))
        pair = {"document": text, "summary": " ".join(drawn.choices(FILLERS, k=2))}
        is_class = options.task == "text-classification"
        rows.append({"text": text, "label": "ab"[number % 2]} if is_class else pair)
    chosen = worlds._PARTS
    for _ in range(options.rounds):
        for parts in ((1,), (2,), (4,), chosen):
            worlds._PARTS = parts  # type: ignore[assignment]
            argv = ["--model_id", options.model, "--task", options.task, "--use_cpu", "True"]
            argv += ["--bf16", "True", "--epochs", "1", "--max_length", "256", "--packing", "False"]
            argv += ["--batch_size", str(options.batch_size), "--eval_strategy", "no"]
            log = io.StringIO()
            with tempfile.TemporaryDirectory() as base, contextlib.redirect_stdout(log):
                (Path(base) / "data").mkdir()
                lines = "\n".join(map(json.dumps, rows))
                (Path(base) / "data" / "rows.jsonl").write_text(lines)
                seconds = cpu_seconds([*argv, "--save_strategy", "no"], Path(base))
            step_lines = [line for line in log.getvalue().splitlines() if line.startswith("steps ")]
            name = f"cut into {parts[0]}" if len(parts) == 1 else "as chosen"
            print(
                f"{name}: {options.rows / seconds:.1f} rows a CPU-second {step_lines}", flush=True
            )


if __name__ == "__main__":
    main()
