"""Select the values that identify a job: all that can change its final weights.

A value counts if it is not its default, no hash covers it, and it has an effect on them: the
`effect` of the recipe's hyperparameters, and a list for the Trainer's. So a new hyperparameter
counts until somebody declares it to have no effect: a resume that changes it is refused.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from transformers import TrainingArguments

from recipe.batching import packing
from recipe.hyperparameters import FIELDS, defaults_of
from recipe.option_fields import Effect
from recipe.plan import batch_layout
from recipe.plan.batch_layout import BatchPlan
from recipe.settings import DataSettings, JobSettings
from recipe.storage import checkpoints
from recipe.training.resuming import hash_weights

_OF_DATA = {item.name for item in dataclasses.fields(DataSettings)}
_OF_JOB = {item.name for item in dataclasses.fields(JobSettings)}
_EFFECTS: Mapping[str, Effect] = {
    **{name: item.metadata["effect"] for name, item in FIELDS.items()},
    **dict.fromkeys(_OF_DATA - _OF_JOB, Effect.SAMPLES),
    **dict.fromkeys(("eval_strategy", "eval_steps", "save_strategy", "save_steps"), Effect.BEST),
}
# Evaluation, saving, logging, and where and how fast training computes.
_LISTED = """
    do_* eval_* *_full_eval prediction_loss_only
    save_* resume_from_checkpoint enable_jit_checkpoint
    restore_callback_states_from_checkpoint push_to_hub* hub_*
    log_* logging_* include_* report_to run_name project trackio_* disable_tqdm debug
    skip_memory_metrics
    use_cpu local_rank ddp_backend ddp_timeout dataloader_* fsdp*
    gradient_accumulation_steps gradient_checkpointing* activation_checkpointing* use_cache
    torch_empty_cache_steps remove_unused_columns length_column_name
"""
WITHOUT_EFFECT = tuple(_LISTED.split())
"""Names and patterns of the Trainer's values that do not change the final weights."""

_SAME = (
    *("learning_rate", "warmup_steps", "weight_decay", "num_train_epochs", "max_steps"),
    *("max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "seed"),
)
"""Arguments of the Trainer that every checkpoint records."""


def decisive(given: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """Return the values, of `Hyperparameters.values` and the Trainer's arguments, that can change
    the final weights and are not defaults, by name."""
    usual = {**defaults_of(TrainingArguments), "warmup_steps": None, "bf16": None}
    values = {
        name: getattr(args, name)
        for name, default in usual.items()
        if _plain(getattr(args, name, None)) != _plain(default)
    }
    values |= {
        name: value
        for name, value in given.items()
        if name not in {*usual, "max_train_steps"}  # the Trainer's are in `args`
        and value != FIELDS[name].default
    }
    decides = evaluation_decides(given, args)
    return {name: _plain(value) for name, value in values.items() if counts(name, decides)}


def evaluation_decides(given: Mapping[str, Any], args: TrainingArguments) -> bool:
    """Return whether the final weights depend on the evaluations during training."""
    return (
        args.load_best_model_at_end
        or given["early_stopping_patience"] is not None
        or args.lr_scheduler_type == "reduce_lr_on_plateau"
    )


def counts(name: str, evaluation_decides: bool = False) -> bool:
    """Return whether a value of this name can change the final weights."""
    if effect := _EFFECTS.get(name):
        return effect is Effect.WEIGHTS or (effect is Effect.BEST and evaluation_decides)
    return not any(fnmatchcase(name, pattern) for pattern in WITHOUT_EFFECT)


def _plain(value: object) -> object:
    """Return the value as JSON restores it."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def record(
    model: Any,
    args: TrainingArguments,
    decided: BatchPlan,
    decisive: Mapping[str, Any] | None,
    is_fixed: bool,
) -> dict[str, Any]:
    """Return what a checkpoint keeps of its job, to compare it on a resume.

    Args:
        model: With its initial weights.
        decisive: What `decisive` returned, and more.
        is_fixed: Whether the split of a step affects the result.
    """
    training, cut, layout = decided.training, decided.cut, decided.train_layout
    return {
        **(decisive or {}),
        **({"steps cut into": batch_layout.shown(cut.as_job())} if is_fixed else {}),
        checkpoints.SAMPLES: cut.samples,
        checkpoints.CUT: {**cut.as_job(), "batches": layout.describe()},
        "data": training.samples.fingerprint(),
        "model": hash_weights(model),
        "batches": "packed" if layout.balanced else "padded",
        "version of the plan of batches": packing.VERSION,
        "version of checkpoints": checkpoints.VERSION,
        "optim": str(args.optim),
        "lr_scheduler_type": str(args.lr_scheduler_type),
        **{name: getattr(args, name) for name in _SAME},
    }
