"""DPO: train on pairs of a better and a worse answer, by TRL's trainer.

Data: JSON Lines in the channel `train`, each with `prompt`, `chosen` and `rejected`, as texts or
lists of messages. Start it as any script (script_*.py --source-dir examples/post_training
--entry-point dpo.py), on several processes with --torchrun. With --lora_r, adapters are trained
and merged; their learning rate is about ten times as high.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer

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
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lora_r", type=int, help="the rank of adapters; without, all weights")
    options = parser.parse_args()

    adapters = LoraConfig(r=options.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = DPOTrainer(
        model=options.model_name_or_path,
        peft_config=adapters if options.lora_r else None,
        train_dataset=load_dataset("json", data_dir=os.environ["SM_CHANNEL_TRAIN"], split="train"),
        args=DPOConfig(
            output_dir=str(CHECKPOINTS),
            num_train_epochs=options.epochs,
            max_steps=options.max_steps,
            save_steps=options.save_steps,
            save_total_limit=2,
            enable_jit_checkpoint=True,  # on SIGTERM, before a spot instance goes
            per_device_train_batch_size=options.batch_size,
            max_length=options.max_length,
            learning_rate=options.learning_rate,
            beta=options.beta,
            logging_steps=1,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    last = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    if options.lora_r:  # merged, the model needs no other one to be served
        trainer.model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    trainer.save_model(os.environ["SM_MODEL_DIR"])


if __name__ == "__main__":
    main()
