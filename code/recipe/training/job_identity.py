"""Select the hyperparameters that identify a job: all that can change its final weights.

A name in none of the tables counts as one of them, so a new hyperparameter that differs on a resume
is refused, which is safe.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from transformers import TrainingArguments

from recipe.hyperparameters import Hyperparameters
from recipe.task_table import CLASSIFICATION

_DATA = """
    text_column text_pair_column label_column problem_type label_separator num_labels prompt_column
    completion_column messages_column sample_by long_texts max_length dataset_config_name
    image_column mlm_probability whole_word_masking source_prefix source_lang target_lang
    max_target_length label_all_tokens doc_stride chosen_column rejected_column
    class_names
"""
IN_THE_DATA = frozenset(_DATA.split())
"""They determine the samples, which are identified by a hash."""
IN_THE_MODEL = frozenset({"model_name_or_path", "trust_remote_code", "hf_token"})
"""They determine the initial weights, which are identified by a hash."""
IN_THE_BATCHES = frozenset({"packing", "per_device_train_batch_size"})
"""They are implied by the samples of a step and by whether these are packed."""
# Evaluation and saving, except those in OF_THE_BEST.
_KEEPING = """
    per_device_eval_batch_size save_total_limit save_minutes lora_save output_dir price_per_hour
    eval_delay prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object
    eval_accumulation_steps bf16_full_eval fp16_full_eval save_only_model save_on_each_node
    save_safetensors enable_jit_checkpoint restore_callback_states_from_checkpoint tune_thresholds
    resume_from_checkpoint overwrite_output_dir do_train do_eval do_predict
"""
_LOGGING = """
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter logging_dir
    log_on_each_node log_level log_level_replica disable_tqdm report_to run_name project
    include_num_input_tokens_seen include_tokens_per_second trackio_space_id trackio_bucket_id
    trackio_static_space_id push_to_hub push_to_hub_token push_to_hub_model_id
    push_to_hub_organization hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision debug skip_memory_metrics
"""
# Where and how fast training computes. The samples of a step are compared separately.
_PLACE = """
    use_cpu no_cuda local_rank ddp_backend ddp_timeout dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns length_column_name gradient_checkpointing
    gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs
    torch_empty_cache_steps use_cache mp_parameters fsdp fsdp_config
    gradient_accumulation_steps
"""
WITHOUT_EFFECT = frozenset(f"{_KEEPING} {_LOGGING} {_PLACE}".split())
"""They do not change the final weights."""
OF_THE_BEST = frozenset(
    (
        *("eval_strategy", "eval_steps", "save_strategy", "save_steps"),
        *("predict_with_generate", "generated_rows", "num_beams"),
    )
)
"""They determine which weights can be the best, if the best are kept."""
_RENAMED = "num_train_epochs max_train_steps learning_rate warmup_steps weight_decay seed bf16"
OF_THE_TRAINER = frozenset(_RENAMED.split())
"""Fields of the recipe that the Trainer has by another name."""


def decisive(hyperparameters: Hyperparameters, args: TrainingArguments) -> dict[str, Any]:
    """Return the values that can change the final weights and are not defaults, by name."""
    elsewhere = IN_THE_DATA | IN_THE_MODEL | IN_THE_BATCHES | WITHOUT_EFFECT
    if not args.load_best_model_at_end:
        elsewhere |= OF_THE_BEST
    of_recipe = {
        item.name: getattr(hyperparameters, item.name)
        for item in dataclasses.fields(Hyperparameters)
        if item.metadata
        and item.name not in OF_THE_TRAINER
        and getattr(hyperparameters, item.name) != item.default
    }
    usual = {
        item.name: item.default
        if item.default_factory is dataclasses.MISSING
        else item.default_factory()
        for item in dataclasses.fields(TrainingArguments)
    }
    usual |= {"warmup_steps": None, "bf16": None}
    trainers = {
        item.name: getattr(args, item.name)
        for item in dataclasses.fields(TrainingArguments)
        if _plain(getattr(args, item.name, None)) != _plain(usual[item.name])
    }
    both = {**trainers, **of_recipe}
    if hyperparameters.task == CLASSIFICATION:
        del both["task"]  # the former default: older checkpoints do not have it
    return {name: _plain(value) for name, value in both.items() if name not in elsewhere}


def _plain(value: object) -> object:
    """Return the value as JSON restores it."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
