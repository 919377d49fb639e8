"""scikit-learn's digits, which are real; the reference is run_image_classification.py's logic.

    python benchmarks/tasks/image_classification.py FOLDER

writes a small ViT with random weights and its image processor to FOLDER: the model to give to
run.py. The reference crops at random as the recipe does by default, and mirrors nothing.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ARGUMENTS = ["--task", "image-classification"]
_SIZE = 32


def data(rows: int, seed: int, source: Path | None) -> list[dict[str, Any]]:
    """Files of pictures, twice as large as the model reads, and their digits. Seeds from 1000 on
    have digits that the others have not."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = random.Random(0).sample(range(len(digits.target)), len(digits.target))
    kept = order[1400:] if seed >= 1000 else order[:1400]
    chosen = random.Random(seed).sample(kept, min(rows, len(kept)))
    folder = Path(tempfile.mkdtemp())
    results = []
    for number in chosen:
        picture = Image.fromarray((digits.images[number] * 15.9).astype(np.uint8))
        path = folder / f"{number}.png"
        picture.resize((2 * _SIZE, 2 * _SIZE), Image.Resampling.BICUBIC).save(path)
        results.append({"image_path": str(path), "label": str(digits.target[number])})
    return results


def _opened(row: dict[str, Any]) -> Any:
    from PIL import Image

    return Image.open(row["image_path"]).convert("RGB")


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The Trainer with transforms made anew for each picture of each epoch, and what saves it."""
    import numpy as np
    import torch
    from transformers import (
        AutoImageProcessor,
        AutoModelForImageClassification,
        Trainer,
        TrainingArguments,
    )

    processor: Any = AutoImageProcessor.from_pretrained(model)
    names = [str(digit) for digit in range(10)]
    classifier = AutoModelForImageClassification.from_pretrained(
        model, num_labels=10, id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)}, ignore_mismatched_sizes=True,
    )  # fmt: skip

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        cropped = []
        for row in batch:
            opened = _opened(row)
            width, height = opened.size
            wide, tall = np.random.uniform(0.75, 1, 2) * (width, height)
            left, top = np.random.random(2) * (width - wide, height - tall)
            cropped.append(opened.crop((left, top, left + wide, top + tall)))
        values = processor(cropped, return_tensors="pt")["pixel_values"]
        labels = torch.tensor([names.index(row["label"]) for row in batch])
        return {"pixel_values": values, "labels": labels}

    return Trainer(
        model=classifier,
        args=TrainingArguments(**settings, remove_unused_columns=False),
        processing_class=processor,
        train_dataset=rows,  # type: ignore[arg-type]
        data_collator=collate,
    )


def judge(folder: Path, rows: list[dict[str, Any]], _before: str) -> dict[str, float]:
    """Score the saved model, in float32."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    processor: Any = AutoImageProcessor.from_pretrained(str(folder))
    model: Any = AutoModelForImageClassification.from_pretrained(str(folder)).eval()
    right, loss = 0, 0.0
    for row in rows:
        label = torch.tensor([model.config.label2id[row["label"]]])
        with torch.no_grad():
            logits = model(**processor(_opened(row), return_tensors="pt")).logits
        right += int(logits.argmax() == label)
        loss += float(torch.nn.functional.cross_entropy(logits, label))
    return {"accuracy": right / len(rows), "loss": loss / len(rows)}


def make(folder: str) -> None:
    """A ViT of four layers, 128 wide, with random weights."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        image_size=_SIZE, patch_size=8, num_labels=10,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True, "size": {"height": _SIZE, "width": _SIZE}, "resample": 2,
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    make(*sys.argv[1:])
