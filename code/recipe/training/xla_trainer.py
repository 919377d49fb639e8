"""Adapt HF Trainer to the legacy stack torch-xla: one graph for all steps, and savable states.

On every other device this is HF Trainer unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import SkipBatchSampler  # type: ignore[import-untyped]
from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers import trainer as hf_trainer

from recipe.runtime import xla
from recipe.runtime.device import everyones


class XlaTrainer(Trainer):
    """HF Trainer with a graph boundary after each step, and gathers over the hosts' network."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if xla.is_used():
            self.add_callback(_Syncs())
            # accelerate's version accepts only its own loaders on torch-xla.
            training_loop: Any = hf_trainer
            training_loop.skip_first_batches = _skip_first_batches

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        if not xla.is_used():
            transformers_4: Any = super()
            return transformers_4._nested_gather(tensors, name)
        return torch.stack(everyones(tensors.cpu()))


class _Syncs(TrainerCallback):
    """Calls `sync` after the same operations each time, so that the same graphs recur."""

    def _sync(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        xla.sync()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Seed by the step: each sync draws a new seed, and a resumed run had fewer of them."""
        xla.seed(args.seed + 1_000_003 * state.global_step)

    # Loading is not part of the first step's graph, and a log's reset not of the next step's.
    on_train_begin = on_substep_end = on_step_end = on_prediction_step = on_log = _sync


def _skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader of the batches of an epoch that a resumed training has not seen."""
    return DataLoader(
        loader.dataset,
        batch_sampler=SkipBatchSampler(loader.batch_sampler, skip_batches=num_batches),
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        num_workers=loader.num_workers,
    )
