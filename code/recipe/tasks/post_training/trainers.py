"""TRL's trainers: one for each task, with its arguments."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from recipe.errors import HyperparameterError, did_you_mean
from recipe.reports.model_card import About
from recipe.settings import ModelSettings, split_values

_LEAST_TRL = (1, 16)
_OWN_DEFAULTS = ("remove_unused_columns", "train_sampling_strategy")
"""Arguments of the Trainer of which TRL's trainers need their own values."""
_NOT_RESUMED = ("sync_ref_model", "use_adaptive_entropy")
_FROM_TASK = (
    "beta", "loss_type", "temperature", "max_completion_length", "desirable_weight",
    "undesirable_weight", "center_rewards_coefficient", "num_generations",
)  # fmt: skip
"""Hyperparameters that are TRL's arguments of the same names."""


@dataclass(frozen=True)
class TrainerKind:
    """The trainer of a task, and what its model card and report show."""

    module: str
    trainer: str
    """The beginning of the names of TRL's trainer and of its arguments."""
    about: About
    curves: Sequence[str]
    """What the report shows by step."""
    has_reference: bool = False
    generates: bool = False


_PAIRS = ("rewards/margins", "rewards/accuracies", "loss")
_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
_IMPLICIT = (
    "Rewards are how much more probable answers are than at the start, times beta; the margin is "
    "that of the chosen one less that of the rejected one, the accuracy how often it is positive."
)


def _text_generation(title: str, purpose: str, metrics: str, headline: Sequence[str]) -> About:
    return About(title=title, pipeline="text-generation", purpose=purpose, metrics=metrics,
                 headline=headline)  # fmt: skip


KINDS: Mapping[str, TrainerKind] = {
    "dpo": TrainerKind(
        "trl", "DPO",
        _text_generation("Preference-tuned model (DPO)", "prefer the chosen answers of its pairs",
                         _IMPLICIT, _PAIRS),
        _REWARDS, has_reference=True,
    ),
    "kto": TrainerKind(
        "trl", "KTO",
        _text_generation("Preference-tuned model (KTO)", "prefer completions that are judged good",
                         _IMPLICIT, ("rewards/margins", "loss")),
        _REWARDS[:3], has_reference=True,
    ),
    "orpo": TrainerKind(
        "trl.experimental.orpo", "ORPO",
        _text_generation("Preference-tuned model (ORPO)", "prefer the chosen answers of its pairs",
                         "Rewards are mean logarithms of probabilities, times beta.", _PAIRS),
        _REWARDS,
    ),
    "reward": TrainerKind(
        "trl", "Reward",
        About(title="Reward model", pipeline="text-classification",
              purpose="score answers as its pairs do",
              metrics="The accuracy is how often the chosen answer has the higher score, the "
              "margin how much higher it is. A request's text is prompt and answer as in "
              "training: with the end token, or as the chat template writes them.",
              headline=("accuracy", "margin", "loss")),
        ("accuracy", "margin", "mean_reward"),
    ),
    "grpo": TrainerKind(
        "trl", "GRPO",
        _text_generation("Policy (GRPO)", "write completions of high rewards",
                         "The reward is the mean of sampled completions, the loss is near 0.",
                         ("reward", "loss")),
        ("reward", "reward_std", "kl"), generates=True,
    ),
    "distillation": TrainerKind(
        "trl", "Distillation",
        _text_generation("Distilled model", "write as its teacher does",
                         "The loss is the divergence from the teacher, on the model's own "
                         "completions.", ("loss",)),
        (), generates=True,
    ),
}  # fmt: skip


def check_library(name: str) -> None:
    """Raise HyperparameterError if TRL is missing or too old."""
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version or tuple(map(int, version.split(".")[:2])) < _LEAST_TRL:
        least = ".".join(map(str, _LEAST_TRL))
        raise HyperparameterError(
            f"Hyperparameter task has value {name!r}, which needs TRL {least} or later; this image "
            f"has {version or 'none'}.",
            "Use the image for GPUs or CPUs: TRL needs transformers 5.",
        )


def make_arguments(
    kind: Any,
    args: TrainingArguments,
    settings: ModelSettings,
    options: Any,
    max_length: int,
) -> TrainingArguments:
    """Return TRL's arguments of the class `kind`: the Trainer's, the task's, and those of trl_args.
    Raise HyperparameterError if TRL does not take them.

    Args:
        options: The hyperparameters of the task alone.
    """
    usual = {item.name for item in dataclasses.fields(TrainingArguments)}
    known = {item.name for item in dataclasses.fields(kind)} - usual
    given = dict(settings.trl_args or {})
    for name in given:
        if name in known and name not in _NOT_RESUMED:
            continue
        why = (
            "is not resumed from checkpoints" if name in _NOT_RESUMED
            else "is a hyperparameter of its own" if name in usual
            else f"TRL's {kind.__name__} does not have"
        )  # fmt: skip
        raise HyperparameterError(
            f"Hyperparameter trl_args has {name}, which {why}.",
            did_you_mean(name, known) or "Leave it out.",
        )
    values = {
        item.name: getattr(args, item.name)
        for item in dataclasses.fields(TrainingArguments)
        if item.init and item.name not in _OWN_DEFAULTS
    }
    every = {**vars(settings), **vars(options)}
    values |= {
        name: every[name] for name in _FROM_TASK if every.get(name) is not None and name in known
    }
    if weights := split_values(getattr(options, "reward_weights", None)):
        values["reward_weights"] = [float(weight) for weight in weights]
    values |= {"use_vllm": True} if settings.use_vllm else {}
    values |= {"max_length": max_length} if "max_length" in known else {}
    try:
        made: TrainingArguments = kind(**{**values, **given})
    except (TypeError, ValueError) as error:
        raise HyperparameterError(f"TRL's {kind.__name__} cannot be made: {error}") from error
    return made
