"""Quantize a trained decoder by llm-compressor, as vLLM loads it, and compare its answers.

Channel: `model`, a model's folder or the model.tar.gz of a training job. An adapter
(lora_save=adapter) is merged into its base. The vllm image serves the job's model as any other.
Start it as any script (script_*.py --source-dir examples/export --entry-point quantize.py).
"""

from __future__ import annotations

import argparse
import os
import tarfile
import tempfile
from pathlib import Path

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The quick brown fox jumps over the lazy dog."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--scheme",
        choices=("FP8_DYNAMIC", "W8A8", "W4A16", "none"),
        default="FP8_DYNAMIC",
        help="FP8_DYNAMIC: floats of 8 bits; W8A8: integers of 8 bits; W4A16: weights of 4 bits "
        "in groups of 128 columns; none: merged only",
    )
    scheme = parser.parse_args().scheme

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
    tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(model.device)
    with torch.no_grad():
        expected = model.eval()(tokens).logits.float().log_softmax(-1)

    out = os.environ["SM_MODEL_DIR"]
    if scheme != "none":
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        oneshot(model=model, recipe=recipe)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)

    saved = AutoModelForCausalLM.from_pretrained(out, dtype="auto").to(tokens.device)
    with torch.no_grad():
        answer = saved(tokens).logits.float().log_softmax(-1)
    # Kullback-Leibler divergence of each next token's distribution, in nats.
    lost = float((expected.exp() * (expected - answer)).sum(-1).mean())
    print(f"metric divergence={lost:.3g}", flush=True)


if __name__ == "__main__":
    main()
