"""GRPO: train with your reward function, by TRL's trainer.

Data: JSON Lines in the channel `train`, each with `prompt` and `answer`, a number. Replace
`correct` for your task. Start it like any script (script_*.py --source-dir
examples/post_training --entry-point grpo.py), on several processes with --torchrun.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

CHECKPOINTS = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")) / "checkpoints"


def correct(completions: list[str], answer: list[object], **_: object) -> list[float]:
    """Return 1 for each completion whose last number is the answer, otherwise 0."""
    numbers = [re.findall(r"-?\d+", text) for text in completions]
    pairs = zip(numbers, answer, strict=True)
    return [float(bool(answers) and answers[-1] == str(wanted)) for answers, wanted in pairs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--max_steps", type=int, default=500)
    parser.add_argument("--save_steps", type=int, default=50)
    parser.add_argument("--batch_size", type=int, default=8, help="answers, for each process")
    parser.add_argument("--num_generations", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max_completion_length", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    options = parser.parse_args()

    trainer = GRPOTrainer(
        model=options.model_name_or_path,
        reward_funcs=correct,
        train_dataset=load_dataset("json", data_dir=os.environ["SM_CHANNEL_TRAIN"], split="train"),
        args=GRPOConfig(
            output_dir=str(CHECKPOINTS),
            max_steps=options.max_steps,
            save_steps=options.save_steps,
            save_total_limit=2,
            enable_jit_checkpoint=True,  # on SIGTERM, before a spot instance goes
            per_device_train_batch_size=options.batch_size,
            num_generations=options.num_generations,
            max_completion_length=options.max_completion_length,
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
