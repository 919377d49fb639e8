"""Select the values that identify a job: all that can change its final weights.

A value counts if it is not its default, no hash covers it, and it is not listed as without effect.
So a new hyperparameter counts until somebody lists it: a resume that changes it is refused.
"""

from __future__ import annotations

import dataclasses
import enum
from fnmatch import fnmatchcase
from typing import Any

from transformers import TrainingArguments

from recipe.hyperparameters import Hyperparameters
from recipe.settings import DataSettings, JobSettings

_OF_DATA = {item.name for item in dataclasses.fields(DataSettings)}
_OF_JOB = {item.name for item in dataclasses.fields(JobSettings)}
# Checkpoints of this version list negative_columns, although the hash of the samples covers it.
HASHED = frozenset(_OF_DATA - _OF_JOB - {"negative_columns"}) | {
    *("model_name_or_path", "trust_remote_code", "hf_token"),
    *("packing", "per_device_train_batch_size"),
}
"""The hashes of samples and initial weights, and the samples of a step, depend on these only."""
# Evaluation, saving, logging, and where and how fast training computes.
_LISTED = """
    do_* eval_* *_full_eval per_device_eval_batch_size prediction_loss_only tune_thresholds
    save_* lora_save output_dir resume_from_checkpoint enable_jit_checkpoint
    restore_callback_states_from_checkpoint push_to_hub* hub_*
    log_* logging_* include_* report_to run_name project trackio_* disable_tqdm debug
    skip_memory_metrics price_per_hour
    use_cpu local_rank ddp_backend ddp_timeout dataloader_* fsdp* mp_parameters
    gradient_accumulation_steps gradient_checkpointing* activation_checkpointing* use_cache
    torch_empty_cache_steps remove_unused_columns length_column_name
"""
WITHOUT_EFFECT = tuple(_LISTED.split())
"""Names and patterns of values that do not change the final weights."""
OF_THE_BEST = frozenset(
    (
        *("eval_strategy", "eval_steps", "save_strategy", "save_steps"),
        *("predict_with_generate", "generated_rows", "num_beams"),
    )
)
"""They determine which weights can be the best, and count only if the best are kept."""


def decisive(hyperparameters: Hyperparameters, args: TrainingArguments) -> dict[str, Any]:
    """Return the values that can change the final weights and are not defaults, by name."""
    usual = {
        item.name: item.default
        if item.default_factory is dataclasses.MISSING
        else item.default_factory()
        for item in dataclasses.fields(TrainingArguments)
    }
    usual |= {"warmup_steps": None, "bf16": None}
    values = {
        name: getattr(args, name)
        for name, default in usual.items()
        if _plain(getattr(args, name, None)) != _plain(default)
    }
    values |= {
        item.name: getattr(hyperparameters, item.name)
        for item in dataclasses.fields(Hyperparameters)
        if item.metadata
        and item.name not in {*usual, "max_train_steps"}  # the Trainer's are in `args`
        and getattr(hyperparameters, item.name) != item.default
    }
    if hyperparameters.task == "text-classification":
        del values["task"]  # the former default: older checkpoints do not have it
    best = OF_THE_BEST if args.load_best_model_at_end else ()
    return {name: _plain(value) for name, value in values.items() if name in best or counts(name)}


def counts(name: str) -> bool:
    """Return whether a value of this name can change the final weights of any job."""
    is_listed = any(fnmatchcase(name, pattern) for pattern in WITHOUT_EFFECT)
    return not (name in HASHED or name in OF_THE_BEST or is_listed)


def _plain(value: object) -> object:
    """Return the value as JSON restores it."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
