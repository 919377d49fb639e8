"""KTO: train on answers marked good or bad, without pairs, by TRL's trainer.

Data: JSON Lines in the channel `train`, each with `prompt`, `completion` and `label`, true or
false. Start it as any script (script_*.py --source-dir examples/post_training --entry-point
kto.py), on several processes with --torchrun.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import KTOConfig, KTOTrainer

CHECKPOINTS = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")) / "checkpoints"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--max_steps", type=int, default=-1, help="in place of epochs")
    parser.add_argument("--save_steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=8, help="rows, for each process")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    options = parser.parse_args()

    trainer = KTOTrainer(
        model=options.model_name_or_path,
        train_dataset=load_dataset("json", data_dir=os.environ["SM_CHANNEL_TRAIN"], split="train"),
        args=KTOConfig(
            output_dir=str(CHECKPOINTS),
            num_train_epochs=options.epochs,
            max_steps=options.max_steps,
            save_steps=options.save_steps,
            save_total_limit=2,
            enable_jit_checkpoint=True,  # on SIGTERM, before a spot instance goes
            per_device_train_batch_size=options.batch_size,
            max_length=options.max_length,
            learning_rate=options.learning_rate,
            logging_steps=1,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    last = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(os.environ["SM_MODEL_DIR"])


if __name__ == "__main__":
    main()
