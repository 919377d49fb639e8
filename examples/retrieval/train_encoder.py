"""Train a sparse encoder (SPLADE) or one of late interaction (ColBERT) by sentence-transformers.

Data: JSON Lines in the channel `train`, each with `anchor`, `positive` and maybe `negative`. The
model is one that the library has saved, or an encoder: for `sparse` one with a head of masked
tokens. It is saved with inference.py, by which `amphora serve` serves it. Start it as any script
(script_*.py --source-dir examples/retrieval --entry-point train_encoder.py), on several processes
with --torchrun.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import sentence_transformers as st
import torch
from datasets import load_dataset
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.sparse_encoder.losses import (
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from transformers.trainer_utils import get_last_checkpoint

CHECKPOINTS = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")) / "checkpoints"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True, choices=("sparse", "multi_vector"))
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--max_steps", type=int, default=-1, help="in place of epochs")
    parser.add_argument("--save_steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=32, help="rows, for each process")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    options = parser.parse_args()

    model: Any
    loss: Any
    if options.kind == "sparse":
        model = st.SparseEncoder(options.model_name_or_path)
        ranking = SparseMultipleNegativesRankingLoss(model)
        # The weights of the library's own example for SPLADE: more of them, fewer tokens.
        loss = SpladeLoss(
            model, ranking, document_regularizer_weight=3e-5, query_regularizer_weight=5e-5
        )
        trainer_class, arguments = st.SparseEncoderTrainer, st.SparseEncoderTrainingArguments
    else:
        model = st.MultiVectorEncoder(options.model_name_or_path)
        loss = MultiVectorMultipleNegativesRankingLoss(model)
        trainer_class = st.MultiVectorEncoderTrainer
        arguments = st.MultiVectorEncoderTrainingArguments
    trainer: Any = trainer_class(
        model=model,
        loss=loss,
        train_dataset=load_dataset("json", data_dir=os.environ["SM_CHANNEL_TRAIN"], split="train"),
        args=arguments(
            output_dir=str(CHECKPOINTS),
            num_train_epochs=options.epochs,
            max_steps=options.max_steps,
            save_steps=options.save_steps,
            save_total_limit=2,
            enable_jit_checkpoint=True,  # on SIGTERM, before a spot instance goes
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            logging_steps=1,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    last = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        folder = Path(os.environ["SM_MODEL_DIR"])
        model.save_pretrained(str(folder))
        (folder / "code").mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("inference.py"), folder / "code")


if __name__ == "__main__":
    main()
