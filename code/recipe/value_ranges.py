"""Define the valid values of hyperparameters, and the Trainer's fields that are refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from recipe.task_table import TASKS

PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
"""Values of `problem_type`, as in a model's configuration."""
SPLIT, TRUNCATE = "split", "truncate"
"""Values of `long_texts`."""
CHOICES: Mapping[str, Sequence[str]] = {
    "task": tuple(TASKS),
    "problem_type": PROBLEMS,
    "class_weight": ("balanced",),
    "lora_save": ("merged", "adapter"),
    "loss_type": ("sigmoid", "robust", "hinge", "ipo"),
    "augmentation": ("none", "crop", "flip"),
    "sample_by": ("line", "paragraph", "document"),
    "long_texts": (SPLIT, TRUNCATE),
    "hub_strategy": ("end", "every_save"),
    # Other modes use CUDA graphs, which overwrite gradients that a step accumulates.
    "torch_compile_mode": ("default", "max-autotune-no-cudagraphs"),
}
"""Valid values by name."""
_AT_LEAST_1: tuple[Callable[[Any], bool], str] = (lambda value: value >= 1, "1 or more")
_ABOVE_0: tuple[Callable[[Any], bool], str] = (lambda value: value > 0, "a number above 0")
_NOT_BELOW_0: tuple[Callable[[Any], bool], str] = (lambda value: value >= 0, "0 or more")
_SHARE: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < 1, "a number from 0 to 1")
RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "num_labels": _AT_LEAST_1,
    "scale": _ABOVE_0,
    "beta": _ABOVE_0,
    "label_smoothing": (lambda value: 0 <= value < 0.5, "a number from 0 to below 0.5"),
    "mini_batch_size": _AT_LEAST_1,
    "num_train_epochs": _ABOVE_0,
    "max_train_steps": (lambda value: value == -1 or value > 0, "1 or more"),
    "per_device_train_batch_size": _AT_LEAST_1,
    "per_device_eval_batch_size": _AT_LEAST_1,
    "learning_rate": _ABOVE_0,
    "warmup_steps": _NOT_BELOW_0,
    "weight_decay": _NOT_BELOW_0,
    "max_length": (lambda value: value >= 4, "4 or more"),
    "seed": (lambda value: 0 <= value < 2**32, "a whole number from 0 to 2**32 - 1"),
    "max_target_length": _AT_LEAST_1,
    "generated_rows": _AT_LEAST_1,
    "num_beams": _AT_LEAST_1,
    "mlm_probability": (lambda value: 0 < value < 1, "a number between 0 and 1"),
    "doc_stride": _NOT_BELOW_0,
    "lora_r": _AT_LEAST_1,
    "lora_alpha": _AT_LEAST_1,
    "lora_dropout": _SHARE,
    "save_total_limit": _AT_LEAST_1,
    "save_minutes": _ABOVE_0,
    "early_stopping_patience": _AT_LEAST_1,
    "early_stopping_threshold": _NOT_BELOW_0,
    "price_per_hour": _NOT_BELOW_0,
    "max_minutes": _ABOVE_0,
    "max_price": _ABOVE_0,
    "gradient_accumulation_steps": _AT_LEAST_1,
    "label_smoothing_factor": _SHARE,
    "max_grad_norm": _NOT_BELOW_0,
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _ABOVE_0,
}
"""Valid numbers by name: a test, and its description."""
REFUSED: Mapping[str, str] = {
    "dataloader_drop_last": "no text is left out",
    "train_sampling_strategy": "batches are already balanced or grouped by length",
    "ignore_data_skip": "a resumed run would see some texts twice",
    "auto_find_batch_size": "a batch has one size; lower per_device_train_batch_size",
    "batch_eval_metrics": "metrics are computed over the whole evaluation",
    "include_for_metrics": "metrics are computed from logits and labels",
    "deepspeed": "weights are sharded by PyTorch's FSDP2; give fsdp=True",
    "save_only_model": "a stopped job could not resume exactly; "
    "save_total_limit=1 keeps one checkpoint",
    "enable_jit_checkpoint": "the recipe itself saves a checkpoint on SIGTERM",
    "restore_callback_states_from_checkpoint": "a resumed job would count evaluations without "
    "improvement from the beginning",
    "bf16_full_eval": "evaluation computes as training does (bf16)",
    "fp16_full_eval": "evaluation computes as training does (fp16)",
    "prediction_loss_only": "evaluation computes all scores of the task",
    "eval_accumulation_steps": "the outputs of an evaluation stay on the device; lower "
    "per_device_eval_batch_size if memory is short",
    "use_liger_kernel": "it replaces forward passes that packed batches need; torch_compile=True "
    "fuses the same operations",
}
"""Fields of TrainingArguments that the recipe does not support, and why."""


def problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each invalid value, with the valid ones."""
    for name, (holds, expected) in RANGES.items():
        value = values.get(name)
        if value is None or isinstance(value, str):
            continue
        if not math.isfinite(value) or not holds(value):
            yield f"Hyperparameter {name} has value {value!r}. Give {expected}."
    for name, known in CHOICES.items():
        value = values.get(name)
        if value is not None and value not in known:
            yield f"Hyperparameter {name} has value {value!r}. Give {' or '.join(known)}."
    # Imported late: servers use this module, and this import takes a tenth of a second.
    from transformers import TrainingArguments

    usual = {
        item.name: item.default
        if item.default_factory is dataclasses.MISSING
        else item.default_factory()
        for item in dataclasses.fields(TrainingArguments)
        if item.name in REFUSED  # transformers 4 lacks some of them
    }
    usual["restore_callback_states_from_checkpoint"] = True  # the recipe's default
    for name, why in REFUSED.items():
        value = values.get(name)
        if value is not None and value != usual.get(name):
            yield (
                f"Hyperparameter {name} has value {value!r}, which this recipe does not support: "
                f"{why}. Leave it out."
            )
