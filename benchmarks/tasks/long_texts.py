"""Long texts cut (`long_texts` not given) and in windows (`long_texts=split`), by the recipe.

    python benchmarks/tasks/long_texts.py --model FOLDER --sentences FILE

FOLDER is that of an encoder such as MiniLM's; FILE has real prose, such as gensim's
test_data/lee_background.cor. A text is of sentences drawn from it, of as many words as IMDB's
reviews (log-normal, 230 on average, 2,000 at most), and one of them, anywhere, says whether
somebody liked a film. Both variants learn the same rows, taking turns, in bfloat16 on one thread; a
test row counts as long where it has more than the model reads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from recipe_training import cpu_seconds

LENGTH = 256
LIKED = ["wonderful", "superb", "delightful", "brilliant", "lovely", "excellent"]
DISLIKED = ["awful", "terrible", "dreadful", "boring", "horrible", "miserable"]


def texts(sentences: list[str], rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows with the place of what decides, as a share of the words before it."""
    drawn = random.Random(seed)
    made = []
    for number in range(rows):
        wanted = min(2000, max(20, round(drawn.lognormvariate(5.17, 0.73))))
        chosen: list[str] = []
        while sum(len(each.split()) for each in chosen) < wanted:
            chosen.append(drawn.choice(sentences))
        word = drawn.choice((DISLIKED, LIKED)[number % 2])
        chosen.insert(drawn.randint(0, len(chosen)), f"I thought that the film was {word}.")
        made.append({"text": " ".join(chosen), "label": ("no", "yes")[number % 2]})
    return made


def main() -> None:
    """A line for each variant and seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--sentences", required=True)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--test-rows", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", default="2e-4")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    prose = Path(options.sentences).read_text(encoding="utf-8")
    sentences = [each for each in re.split(r"(?<=\.)\s+", prose) if 5 <= len(each.split()) <= 60]
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    for seed in range(options.seeds):
        rows = texts(sentences, options.rows, seed)
        test = texts(sentences, options.test_rows, seed + 1000)
        is_long = [
            len(ids) > LENGTH for ids in tokenizer([row["text"] for row in test])["input_ids"]
        ]
        variants = [("cut", []), ("split", ["--long_texts", "split"])]
        for name, more in variants if seed % 2 == 0 else variants[::-1]:
            with tempfile.TemporaryDirectory() as base:
                folder = Path(base)
                for channel, each in (("data", rows), ("test", test)):
                    (folder / channel).mkdir()
                    lines = "\n".join(map(json.dumps, each))
                    (folder / channel / "rows.jsonl").write_text(lines)
                argv = ["--model_id", options.model, "--use_cpu", "True", "--bf16", "True"]
                argv += ["--max_length", str(LENGTH), "--epochs", str(options.epochs)]
                argv += ["--lr", options.lr, "--batch_size", "16", "--seed", str(seed)]
                argv += ["--eval_strategy", "no", "--save_strategy", "no", "--do_predict", "True"]
                seconds = cpu_seconds([*argv, *more], folder, test=folder / "test")
                lines = (folder / "output" / "predictions.jsonl").read_text().splitlines()
            right = [said["label"] == said["true"] for said in map(json.loads, lines)]
            of_long = [ok for ok, long in zip(right, is_long, strict=True) if long]
            print(
                f"seed {seed} {name}: accuracy {sum(right) / len(right):.3f}, of the "
                f"{len(of_long)} long ones {sum(of_long) / len(of_long):.3f}, "
                f"{options.rows * options.epochs / seconds:.2f} rows a CPU-second",
                file=sys.stderr, flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
