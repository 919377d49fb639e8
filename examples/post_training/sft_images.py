"""Train a vision-language model on conversations with images, by TRL's trainer.

Data: in the channel `train`, JSON Lines with `messages` (contents of parts of the types text and
image) and `images`, the images' paths in the channel, in the order of the parts. Start it as any
script (script_*.py --source-dir examples/post_training --entry-point sft_images.py), on several
processes with --torchrun.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from datasets import Image, List, load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

CHECKPOINTS = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")) / "checkpoints"
CHANNEL = Path(os.environ["SM_CHANNEL_TRAIN"])


def located(row: dict[str, Any]) -> dict[str, list[str]]:
    """Return the images of a row by their paths on this host."""
    return {"images": [str(CHANNEL / name) for name in row["images"]]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--max_steps", type=int, default=-1, help="in place of epochs")
    parser.add_argument("--save_steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=4, help="rows, for each process")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    options = parser.parse_args()

    files = [str(path) for path in sorted(CHANNEL.glob("*.jsonl"))]
    rows = load_dataset("json", data_files=files, split="train").map(located)
    last = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.is_dir() else None
    trainer = SFTTrainer(
        # The Trainer itself does not find the names that such a model is saved with.
        model=last or options.model_name_or_path,
        train_dataset=rows.cast_column("images", List(Image())),
        args=SFTConfig(
            output_dir=str(CHECKPOINTS),
            num_train_epochs=options.epochs,
            max_steps=options.max_steps,
            save_steps=options.save_steps,
            save_total_limit=2,
            enable_jit_checkpoint=True,  # on SIGTERM, before a spot instance goes
            per_device_train_batch_size=options.batch_size,
            max_length=None,  # a cut would go through an image
            learning_rate=options.learning_rate,
            logging_steps=1,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(os.environ["SM_MODEL_DIR"])
    if trainer.is_world_process_zero():
        code = Path(os.environ["SM_MODEL_DIR"]) / "code"
        code.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("images_inference.py"), code / "inference.py")


if __name__ == "__main__":
    main()
