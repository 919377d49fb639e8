"""Hold all hyperparameters of a job in one frozen value, and check them together.

`recipe.arguments` parses it from argv. `FIELDS` are the declarations: those of `recipe.settings`,
which are for all tasks or several, and the `options` of each task's spec.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.errors import HyperparameterError
from recipe.metrics import LOWER_IS_BETTER
from recipe.option_fields import ABOVE_0, AT_LEAST_1, NOT_BELOW_0, SHARE, Valid
from recipe.secret_rules import is_secret_name, mask_shapes
from recipe.settings import DataSettings, JobSettings, ModelSettings
from recipe.spec import PREFERENCES
from recipe.task_table import TASKS

GROUPS = (JobSettings, ModelSettings, DataSettings, *(spec.options for spec in TASKS.values()))
FIELDS: Mapping[str, dataclasses.Field[Any]] = {
    item.name: item for group in GROUPS for item in dataclasses.fields(group) if item.metadata
}
"""The declarations of the recipe's hyperparameters, without those in `passed`."""
_TOPICS: Mapping[str, tuple[str, str]] = {
    "task": ("Task, seed, classes", "task=text-classification class_weight=balanced"),
    "num_train_epochs": ("Steps and optimizer", "epochs=3 batch_size=16 lr=2e-5"),
    "output_dir": ("Checkpoints", "save_minutes=5 save_total_limit=1"),
    "early_stopping_patience": ("Early stopping", "early_stopping_patience=2 eval_steps=100"),
    "price_per_hour": ("Budget", "max_price=5 price_per_hour=1.52"),
    "push_to_hub": ("Hugging Face hub", "push_to_hub=True hub_model_id=owner/name"),
    "model_name_or_path": ("Model", "model_name_or_path=bert-base-uncased bf16=True"),
    "lora_r": ("LoRA", "lora_r=16 lora_alpha=32 lora_save=adapter"),
    "freeze_layers": ("Changes to the model", "freeze_layers=6"),
    "load_in_4bit": ("Weights of 4 bits", "load_in_4bit=True lora_r=16 lora_save=adapter"),
    "beta": ("Post-training", "task=dpo beta=0.1"),
    "quantize": ("Weights of 8 bits for CPUs", "quantize=int8 max_flips=0.02"),
    "text_column": ("Columns", "text_column=review label_column=stars"),
    "problem_type": ("Labels", "class_names=negative,positive missing_labels=NA"),
    "validation_split": ("Held-out rows", "validation_split=0.2 validation_group=customer"),
    "sample_by": ("Lengths of texts", "max_length=256 long_texts=truncate"),
    "source_lang": ("Languages", "task=translation source_lang=en target_lang=de"),
}
"""The title and an example of each topic, by its first hyperparameter."""
_NO_ENCODINGS = {"punycode", "idna", "unicode-escape", "raw-unicode-escape", "utf-7"}
"""Codecs of Python that are not encodings of files, by their normal names."""
_TRAINER_RANGES: Mapping[str, Valid] = {
    "gradient_accumulation_steps": AT_LEAST_1,
    "label_smoothing_factor": SHARE,
    "max_grad_norm": NOT_BELOW_0,
    "dataloader_num_workers": NOT_BELOW_0,
    "adam_beta1": SHARE,
    "adam_beta2": SHARE,
    "adam_epsilon": ABOVE_0,
    "eval_steps": ABOVE_0,
    "save_steps": ABOVE_0,
    "logging_steps": ABOVE_0,
}
"""Valid numbers of fields of TrainingArguments."""
CHOICES: Mapping[str, Sequence[str]] = {
    # Other modes use CUDA graphs, which overwrite gradients that a step accumulates.
    "torch_compile_mode": ("default", "max-autotune-no-cudagraphs"),
    **{name: item.metadata["choices"] for name, item in FIELDS.items() if item.metadata["choices"]},
}
"""Valid texts by name."""
ADAPTER_SETTINGS = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"),
    "modules_to_save",
)
"""Settings that an adapter keeps."""
_OF_START = (
    *(*ADAPTER_SETTINGS, "init_lora_weights", "merge_adapter", "freeze_layers"),
    *("freeze_modules", "added_tokens", "rope_scaling"),
)
"""What is done to the model to start from."""
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
    "parallelism_config": "a text is not split between GPUs, since accelerate's attention for that "
    "takes one text in each row, and rows are packed; fsdp=True shards weights",
    "average_tokens_across_devices": "the loss is the mean over the step's tokens on all devices",
    "use_liger_kernel": "it replaces forward passes that packed batches need; torch_compile=True "
    "fuses the same operations",
}
"""Fields of TrainingArguments that the recipe does not support, and why."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(DataSettings, ModelSettings):
    """The recipe's own hyperparameters, and `passed` for the Trainer's."""

    task_values: Mapping[str, Any] = field(default_factory=dict)
    """Values of tasks' own hyperparameters that are given."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """One line for each hyperparameter that has no effect."""

    def __post_init__(self) -> None:
        """Raise HyperparameterError with all invalid values."""
        problems = [*self._invalid(), *self._ignored_hyperparameters()]
        if problems:
            raise combine_problems(problems)

    def budget_seconds(self, hosts: int) -> float | None:
        """Return the seconds that max_minutes and max_price allow on this number of hosts."""
        limits = [] if self.max_minutes is None else [60 * self.max_minutes]
        if self.max_price is not None and self.price_per_hour:
            limits.append(3600 * self.max_price / (self.price_per_hour * hosts))
        return min(limits, default=None)

    @property
    def values(self) -> Mapping[str, Any]:
        """Return the value of each hyperparameter, including those of single tasks."""
        common = {name: getattr(self, name, item.default) for name, item in FIELDS.items()}
        return {**common, **self.task_values}

    def options(self) -> Any:
        """Return the hyperparameters that only the job's task has, as the `options` type of its
        spec."""
        kind = TASKS[str(self.task)].options
        names = {item.name for item in dataclasses.fields(kind)}
        return kind(**{name: self.task_values[name] for name in names & {*self.task_values}})

    def after_training(self) -> Hyperparameters:
        """Return the hyperparameters for the trained model, in which adapters are merged, and which
        has added tokens and scaled positions."""
        usual: dict[str, Any] = {name: FIELDS[name].default for name in _OF_START}
        return dataclasses.replace(self, **usual)

    def as_text(self) -> dict[str, str]:
        """Return the hyperparameters that are set, as text, without secrets such as hub_token and
        those of other tasks.
        """
        foreign = set(_TASKS_BY_NAME).difference(TASKS[self.task].takes if self.task else ())
        return {
            key: mask_shapes(value if isinstance(value, str) else json.dumps(value, default=str))
            for key, value in {**self.values, **self.passed}.items()
            if value is not None and not is_secret_name(key) and key not in foreign
        }

    def _invalid_values(self, values: Mapping[str, Any]) -> Iterator[str]:
        ranges = {name: item.metadata["valid"] for name, item in FIELDS.items()}
        for name, valid in {**ranges, **_TRAINER_RANGES}.items():
            value = values.get(name)
            if valid is None or value is None or isinstance(value, str):
                continue
            if not math.isfinite(value) or not valid[0](value):
                yield f"Hyperparameter {name} has value {value!r}. Give {valid[1]}."
        for name, known in CHOICES.items():
            value = values.get(name)
            if value is not None and value not in known:
                is_preference = name == "task" and value == "preference"
                remedy = PREFERENCES if is_preference else f"Give {' or '.join(known)}."
                yield f"Hyperparameter {name} has value {value!r}. {remedy}"
        try:
            name = codecs.lookup(self.encoding or "utf-8").name
            "a".encode(name)
            is_known = name not in _NO_ENCODINGS
        except (LookupError, ValueError):
            is_known = False
        if not is_known:
            remedy = "Give a name that Python knows, such as windows-1252 or gb18030."
            yield f"Hyperparameter encoding has value {self.encoding!r}. {remedy}"

    def _invalid(self) -> Iterator[str]:
        values = {**self.passed, **self.values}
        yield from self._invalid_values(values)
        if given := {name: values[name] for name in REFUSED if self.passed.get(name) is not None}:
            # Imported late: servers use this module, and this import takes a tenth of a second.
            from transformers import TrainingArguments

            usual = defaults_of(TrainingArguments)
            # What the recipe does, whatever the default of this version is.
            usual |= {
                "restore_callback_states_from_checkpoint": True,
                "average_tokens_across_devices": True,
            }
            for name, value in given.items():
                if value != usual.get(name):  # transformers 4 lacks some of them
                    yield (
                        f"Hyperparameter {name} has value {value!r}, which this recipe does not "
                        f"support: {REFUSED[name]}. Leave it out."
                    )
        if self.passed.get("neftune_noise_alpha") and self.packing:
            yield (
                "neftune_noise_alpha scales its noise by the length of a row, and packing=True "
                "puts several texts into one. Leave packing out."
            )
        config = self.passed.get("accelerator_config") or {}
        if config.get("split_batches"):
            yield (
                "Hyperparameter accelerator_config has split_batches, but batch sizes are those of "
                "each process. Give per_device_train_batch_size divided by their number instead."
            )
        if "num_steps" in (config.get("gradient_accumulation_kwargs") or {}):
            yield (
                "Hyperparameter accelerator_config has num_steps in gradient_accumulation_kwargs. "
                "Give gradient_accumulation_steps instead."
            )
        metric = str(self.passed.get("metric_for_best_model") or "loss")
        is_lower_better = metric.endswith(LOWER_IS_BETTER)
        if self.passed.get("greater_is_better") is is_lower_better:
            yield (
                f"greater_is_better={is_lower_better} would keep the worst weights by {metric}. "
                "Leave it out."
            )
        if self.load_in_4bit and self.lora_r is None:
            yield (
                "load_in_4bit=True freezes the model's weights, and needs adapters to train. Give "
                "lora_r, such as 16."
            )
        if self.load_in_4bit and self.lora_save != "adapter":
            yield (
                "load_in_4bit=True trains an adapter that cannot be merged into weights of 4 bits. "
                "Give lora_save=adapter."
            )
        if self.max_price is not None and not self.price_per_hour:
            yield (
                f"max_price={self.max_price:g} needs the price of an instance. Give price_per_hour."
            )
        if self.push_to_hub and not self.hub_model_id:
            yield "push_to_hub=True needs the repository's name. Give hub_model_id=owner/name."

    @property
    def tasks_by_hyperparameter(self) -> Mapping[str, Sequence[str]]:
        """Return the tasks that take each hyperparameter that is set and that not all tasks
        take."""
        values = {**self.passed, **self.values}
        return {
            name: tasks
            for name, tasks in _TASKS_BY_NAME.items()
            if values.get(name) not in (None, 0.0, FIELDS[name].default if name in FIELDS else None)
        }

    def _ignored_hyperparameters(self) -> Iterator[str]:
        """Yield an error for each hyperparameter that the job would ignore."""
        adapter_settings = [
            name
            for name in (*ADAPTER_SETTINGS, "init_lora_weights")
            if getattr(self, name) != FIELDS[name].default
        ]
        if adapter_settings and self.lora_r is None:
            yield (
                f"Without lora_r all weights are trained, and {adapter_settings[0]} has no effect. "
                "Give lora_r, the rank of LoRA's adapters, or leave out "
                f"{', '.join(adapter_settings)} (an adapter that is trained further has its own)."
            )
        for name in ("freeze_layers", "freeze_modules"):
            if getattr(self, name) is not None and self.lora_r is not None:
                yield (
                    f"{name}={getattr(self, name)} has no effect: adapters are trained (lora_r), "
                    "and all other weights are frozen. Leave one of them out."
                )
        if self.added_tokens and not self.trains:
            yield "added_tokens are learned in training, and do_train is False. Leave them out."
        if self.init_lora_weights == "loftq" and self.lora_save == "adapter":
            yield (
                "init_lora_weights=loftq rounds the base, with which alone its adapter is right. "
                "Give lora_save=merged."
            )
        if self.load_in_4bit and not self.trains:
            yield "load_in_4bit is for training, and do_train is False. Leave it out."
        budgets = [name for name in ("max_minutes", "max_price") if getattr(self, name) is not None]
        if budgets and not self.trains:
            yield f"{budgets[0]} limits training, and do_train is False. Leave it out."
        if self.push_to_hub and not self.trains:
            yield "push_to_hub pushes the trained model, and do_train is False. Leave it out."
        if self.push_to_hub and self.passed.get("hub_revision"):
            yield (
                f"Hyperparameter hub_revision has value {self.passed['hub_revision']!r}, but the "
                "model is pushed to the main branch. Leave it out."
            )
        for name, tasks in self.tasks_by_hyperparameter.items():
            if self.task in TASKS and self.task not in tasks:
                listed = " or ".join(f"task={task}" for task in tasks)
                remedy = f"Leave it out, or give {listed}."
                if name == "long_texts" and self.task == "text-classification":
                    remedy = (
                        "Leave it out: longer texts are truncated. To classify whole texts, give a "
                        "model that reads them (ModernBERT: 8,192 tokens) and max_length."
                    )
                value = self.values.get(name, self.passed.get(name))
                yield (
                    f"Hyperparameter {name} has value {value!r}, but belongs to {listed}, and the "
                    f"task is {self.task}. {remedy}"
                )
        if self.task is None and not any(all_tasks_of(self.tasks_by_hyperparameter)):
            listed = "; ".join(
                f"{name} (task={' or '.join(tasks)})"
                for name, tasks in self.tasks_by_hyperparameter.items()
            )
            yield f"No task takes all of these hyperparameters: {listed}. Leave some out."
        if not (self.trains or self.passed.get("do_eval") or self.predicts):
            yield "do_train=False leaves nothing to do. Give do_eval=True or do_predict=True, too."
        kinds = {"text_column": "text", "prompt_column": "prompt", "completion_column": "prompt"}
        kinds["messages_column"] = "messages"
        names_set = [name for name in kinds if getattr(self, name) is not None]
        if len({kinds[name] for name in names_set}) > 1:
            listed = ", ".join(f"{name}={getattr(self, name)}" for name in names_set)
            yield (
                f"These hyperparameters name columns of several kinds of data: {listed}. "
                "Name texts, or prompts and completions, or messages."
            )


def all_tasks_of(tasks_by_hyperparameter: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tasks that take every hyperparameter of `tasks_by_hyperparameter`."""
    task_lists = tasks_by_hyperparameter.values()
    return [task for task in TASKS if all(task in tasks for tasks in task_lists)]


def fields_by_topic() -> Mapping[tuple[str, str], Sequence[dataclasses.Field[Any]]]:
    """Return the declarations by the title and example of their topic, those of all tasks first.

    Those that only some tasks take have their names as the title, and no example.
    """
    common = {item.name for item in dataclasses.fields(Hyperparameters)}
    topics: dict[tuple[str, str], list[dataclasses.Field[Any]]] = {}
    topic = ("", "")
    for name, item in FIELDS.items():
        if name in common:
            topic = _TOPICS.get(name, topic)
        else:
            topic = (f"Only task={' or '.join(_TASKS_BY_NAME[name])}", "")
        topics.setdefault(topic, []).append(item)
    return topics


def combine_problems(problems: Sequence[str]) -> HyperparameterError:
    """Return one error that lists every problem."""
    if len(problems) == 1:
        return HyperparameterError(problems[0])
    listed = "\n".join(f"- {problem}" for problem in problems)
    return HyperparameterError(f"{len(problems)} hyperparameters cannot be used:\n{listed}")


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the default of each field of a dataclass."""
    return {
        item.name: item.default
        if item.default_factory is dataclasses.MISSING
        else item.default_factory()
        for item in dataclasses.fields(kind)
    }


_TASKS_BY_NAME: Mapping[str, Sequence[str]] = {
    name: [task for task, spec in TASKS.items() if name in spec.takes]
    for spec in TASKS.values()
    for name in spec.takes
}
