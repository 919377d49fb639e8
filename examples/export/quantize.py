"""Quantize a trained decoder by llm-compressor, as vLLM loads it, and compare its answers.

Channels: `model`, a model's folder or the model.tar.gz of a training job; optionally `train`, JSON
Lines with `text`, `messages`, or `prompt` and `completion`. An adapter (lora_save=adapter) is
merged into its base. The vllm image serves the job's model as any other.
Start it as any script (script_*.py --source-dir examples/export --entry-point quantize.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The quick brown fox jumps over the lazy dog."


def read_rows(folder: Path, tokenizer: Any) -> list[str]:
    """Return the texts of a channel's JSON Lines."""
    texts = []
    for path in sorted(folder.glob("*.json*")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "messages" in row:
                texts.append(tokenizer.apply_chat_template(row["messages"], tokenize=False))
            else:
                texts.append(row["text"] if "text" in row else row["prompt"] + row["completion"])
    return texts


@torch.no_grad()
def log_probabilities(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each row [tokens, vocabulary]: those of what may follow each token."""
    return [
        model.eval()(row.to(model.device)).logits[0].float().log_softmax(-1).cpu() for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--scheme",
        choices=("FP8_DYNAMIC", "W8A8", "W4A16", "none"),
        default="FP8_DYNAMIC",
        help="FP8_DYNAMIC: floats of 8 bits; W8A8: integers of 8 bits; W4A16: weights of 4 bits "
        "in groups of 128 columns; none: merged only",
    )
    parser.add_argument(
        "--calibration_rows",
        type=int,
        default=0,
        help="rows of the channel train by which GPTQ chooses the integers; 0: the nearest ones. "
        "As many as a tenth of them, but of others, are compared",
    )
    parser.add_argument("--max_length", type=int, default=2048, help="tokens of a row")
    options = parser.parse_args()

    folder = Path(os.environ["SM_CHANNEL_MODEL"])
    if (archive := folder / "model.tar.gz").is_file():
        folder = Path(tempfile.mkdtemp())
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if (folder / "adapter_config.json").is_file():
        model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto").merge_and_unload()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    texts, count = [TEXT], options.calibration_rows
    if count:
        texts = read_rows(Path(os.environ["SM_CHANNEL_TRAIN"]), tokenizer)
        if len(texts) <= count:
            parser.error(f"--calibration_rows is {count}, and the channel has {len(texts)} rows")
    limits = {"truncation": True, "max_length": options.max_length}
    tokens = [tokenizer(text, **limits)["input_ids"] for text in texts]
    compared = [torch.tensor([ids]) for ids in tokens[count:][: max(1, count // 10)]]
    expected = log_probabilities(model, compared)

    out = os.environ["SM_MODEL_DIR"]
    if options.scheme != "none":
        more: dict[str, Any] = {
            "targets": "Linear",
            "scheme": options.scheme,
            "ignore": ["lm_head"],
        }
        if count:
            data = Dataset.from_dict({"input_ids": tokens[:count]})
            length = {"max_seq_length": options.max_length, "num_calibration_samples": count}
            oneshot(model=model, recipe=GPTQModifier(**more), dataset=data, **length)
        else:
            oneshot(model=model, recipe=QuantizationModifier(**more))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)

    saved = AutoModelForCausalLM.from_pretrained(out, dtype="auto").to(model.device)
    answers = log_probabilities(saved, compared)
    both = list(zip(expected, answers, strict=True))
    # Kullback-Leibler divergence of each next token's distribution, in nats.
    lost = torch.cat([(before.exp() * (before - after)).sum(-1) for before, after in both]).mean()
    print(f"metric divergence={float(lost):.3g}", flush=True)
    for name, tables in (("perplexity_before", expected), ("perplexity", answers)):
        right = [
            table[:-1].gather(-1, ids[0, 1:, None])
            for table, ids in zip(tables, compared, strict=True)
        ]
        print(f"metric {name}={math.exp(-float(torch.cat(right).mean())):.6g}", flush=True)


if __name__ == "__main__":
    main()
