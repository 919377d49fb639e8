"""Post-training: preferences, rewards and a teacher's distributions, learned by TRL's trainers."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.option_fields import AT_LEAST_1, NOT_BELOW_0, option
from recipe.spec import (
    CHOSEN_NAMES,
    COMPLETION_NAMES,
    LABEL_NAMES,
    PROMPT_NAMES,
    REJECTED_NAMES,
    TALK_NAMES,
    Column,
    Form,
    TaskSpec,
)
from recipe.tasks.causal_lm.spec import ALPACA

_PROMPT = Column(role="prompt", names=PROMPT_NAMES, setting="prompt_column")
_TALK = Column(role="messages", names=TALK_NAMES, setting="messages_column")
_CHOSEN = Column(role="chosen", names=CHOSEN_NAMES, is_target=True)
_REJECTED = Column(role="rejected", names=REJECTED_NAMES, is_target=True)
_MARGIN = Column(role="margin", names=("margin",), is_optional=True, is_target=True)
_COMPLETION = Column(
    role="completion", names=COMPLETION_NAMES, setting="completion_column", is_target=True
)
_LABEL = Column(role="label", names=(*LABEL_NAMES, "kto_tag"),  # LLaMA-Factory has the last one
                setting="label_column", is_target=True)  # fmt: skip
_REPEATED = ("messages",)
"""A column of public data that repeats the chosen conversation."""
_PAIRS = (
    Form((*ALPACA.columns[:2], _CHOSEN, _REJECTED), needs_task=True, extras=_REPEATED),
    Form((_PROMPT, _CHOSEN, _REJECTED), needs_task=True, extras=_REPEATED),
    Form((_TALK, _CHOSEN, _REJECTED), needs_task=True),
    Form((_CHOSEN, _REJECTED), needs_task=True, extras=_REPEATED),
)
_SCORED_PAIRS = tuple(
    Form((*form.columns, _MARGIN), needs_task=True, extras=_REPEATED) for form in _PAIRS
)
_PROMPTS = (Form((_PROMPT,), needs_task=True, extras=COMPLETION_NAMES),)
_PREFERENCES = ("load_in_4bit", "beta", "trl_args")
_GENERATED = ("load_in_4bit", "beta", "temperature", "max_completion_length", "use_vllm",
              "trl_args")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class UnpairedOptions:
    """What only task=kto takes."""

    desirable_weight: float | None = option(
        None, "Factor of the losses of good completions. Default: 1.", valid=NOT_BELOW_0
    )
    undesirable_weight: float | None = option(
        None, "Factor of the losses of bad completions. Default: 1.", valid=NOT_BELOW_0
    )


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """What only task=reward takes."""

    center_rewards_coefficient: float | None = option(
        None, "Factor of the squared sum of a pair's rewards in the loss.", valid=NOT_BELOW_0
    )


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What only task=grpo takes."""

    reward_funcs: str | None = option(
        None,
        "Rewards, which are added: exact_answer, format, length, or functions of rewards.py in the "
        "channel code or in /opt/ml/code.",
        "reward_functions",
        "reward_func",
        separator=",",
    )
    reward_weights: str | None = option(
        None, "Factors of the rewards, in their order. Default: 1.", separator=","
    )
    num_generations: int | None = option(
        None, "Completions of each prompt. Default: 8.", valid=AT_LEAST_1
    )


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """What only task=distillation takes."""

    teacher_model: str | None = option(
        None,
        "The teacher: a folder, a channel or a name on the hub. Default: the channel teacher.",
        "teacher_model_name_or_path",
        "teacher_name_or_path",
    )


def _spec(
    name: str, forms: tuple[Form, ...], shared: tuple[str, ...], **others: object
) -> TaskSpec:
    """Return the spec of a task that is only chosen by name."""
    values: dict[str, object] = {
        "folder": "post_training", "models": frozenset(), "learning_rates": (1e-6, 1e-5),
        "served_as": "text-generation", **others,
    }  # fmt: skip
    return TaskSpec(name=name, forms=forms, shared_options=shared, **values)  # type: ignore[arg-type]


SPECS = (
    _spec("dpo", _PAIRS, (*_PREFERENCES, "loss_type")),
    _spec(
        "kto",
        (
            Form((*ALPACA.columns[:2], _COMPLETION, _LABEL), needs_task=True),
            Form((_PROMPT, _COMPLETION, _LABEL), needs_task=True),
            Form((_TALK, _LABEL), needs_task=True),
        ),
        (*_PREFERENCES, "loss_type"),
        options=UnpairedOptions,
    ),
    _spec("orpo", _PAIRS, _PREFERENCES),
    _spec(
        "reward",
        _SCORED_PAIRS,
        ("trl_args",),
        options=RewardOptions,
        learning_rates=(1e-5, 1e-4),
        served_as="text-classification",
    ),
    _spec("grpo", _PROMPTS, (*_GENERATED, "loss_type"), options=PolicyOptions),
    _spec("distillation", _PROMPTS, _GENERATED, options=TeacherOptions),
)
