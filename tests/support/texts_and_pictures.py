"""Tiny models without dropout, and data, for masked-lm, summarization and image-classification."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import serving_kit

WORDS = serving_kit.WORDS[:8]


@dataclass(frozen=True)
class Kind:
    """A task, its model and its channels."""

    task: str
    model: Path
    channels: dict[str, Path]
    arguments: list[str]


def make(task: str, folder: Path, rows: int = 72) -> Kind:
    """Write the model and the data of a task below `folder`."""
    drawn = random.Random(0)
    channels = {name: folder / name for name in ("train", "test")}
    model, arguments = folder / "model", []
    for path, count in zip(channels.values(), (rows, 24), strict=True):
        path.mkdir(parents=True)
        if task == "masked-lm":
            texts = [" ".join(drawn.choices(WORDS, k=drawn.randint(3, 12))) for _ in range(count)]
            (path / "texts.txt").write_text("\n".join(texts))
        elif task == "summarization":
            pairs = []
            for _ in range(count):
                words = drawn.choices(WORDS, k=drawn.randint(2, 6))
                pairs.append({"document": " ".join(words), "summary": words[0]})
            (path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        else:
            _draw(path, count, drawn)
    still: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if task == "masked-lm":
        serving_kit.save("BertForMaskedLM", model, **still)
        arguments = ["--task", task, "--mlm_probability", "0.3"]
    elif task == "summarization":
        serving_kit.save("T5ForConditionalGeneration", model, dropout_rate=0.0)
        arguments = ["--max_target_length", "6", "--source_prefix", "who "]
    else:
        _vit(model, still)
    return Kind(task, model, channels, arguments)


def _draw(path: Path, count: int, drawn: random.Random) -> None:
    """Write images with a bright left or right half."""
    import numpy as np
    from PIL import Image

    for number in range(count):
        pixels = np.random.default_rng(drawn.getrandbits(32)).integers(0, 90, (16, 16, 3))
        name = ("left", "right")[number % 2]
        pixels[:, :8] += 150 * (name == "left")
        pixels[:, 8:] += 150 * (name == "right")
        (path / name).mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path / name / f"{number}.png")


def _vit(folder: Path, still: dict[str, Any]) -> None:
    import torch
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, initializer_range=0.1, **still,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 16, "width": 16},
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
