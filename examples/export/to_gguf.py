"""Write a trained decoder as a GGUF file for llama.cpp and Ollama, by llama.cpp's converter.

Channel: `model`, a model's folder or the model.tar.gz of a training job. An adapter
(lora_save=adapter) is merged into its base. The job's model has model.gguf, whose tensors are read
again. Start it as any script (script_*.py --source-dir examples/export --entry-point to_gguf.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--outtype", choices=("f32", "f16", "bf16", "q8_0"), default="f16")
    kind = parser.parse_args().outtype

    folder = Path(os.environ["SM_CHANNEL_MODEL"])
    if (archive := folder / "model.tar.gz").is_file():
        folder = Path(tempfile.mkdtemp())
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    if (folder / "adapter_config.json").is_file():
        model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto").merge_and_unload()
        tokenizer, folder = AutoTokenizer.from_pretrained(folder), Path(tempfile.mkdtemp())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    path = Path(os.environ["SM_MODEL_DIR"]) / "model.gguf"
    converter = [sys.executable, "-m", "convert_hf_to_gguf", str(folder)]
    subprocess.run([*converter, "--outfile", str(path), "--outtype", kind], check=True)

    # The converter reorders rows (of queries and keys), so the norms of tensors are compared.
    written = [
        torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).double().norm()
        for tensor in GGUFReader(path).tensors
    ]
    trained = [weight.detach().double().norm() for weight in model.parameters()]
    if len(written) != len(trained):
        sys.exit(f"{path} has {len(written)} tensors, and the model {len(trained)}.")
    pairs = zip(sorted(written), sorted(trained), strict=True)
    lost = max(float((one - other).abs() / other.clamp(min=1e-12)) for one, other in pairs)
    print(f"metric gguf_difference={lost:.3g}", flush=True)


if __name__ == "__main__":
    main()
