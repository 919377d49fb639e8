"""Preference optimization: which of two answers to a prompt was chosen (DPO)."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.option_fields import ABOVE_0, option
from recipe.spec import PROMPT_NAMES, Column, Form, TaskSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    beta: float = option(
        0.1,
        "preference: rewards are beta times the change of log-probabilities. A higher value "
        "keeps the model closer to the initial one.",
        valid=ABOVE_0,
    )
    loss_type: str = option(
        "sigmoid",
        "preference: sigmoid (DPO), robust (with label_smoothing), hinge, or ipo (averages "
        "over the tokens of an answer).",
        choices=("sigmoid", "robust", "hinge", "ipo"),
    )
    label_smoothing: float = option(
        0.0,
        "preference: probability that chosen and rejected are swapped, for loss_type sigmoid "
        "(conservative DPO) and robust.",
        valid=(lambda value: 0 <= value < 0.5, "a number from 0 to below 0.5"),
    )


SPECS = (
    TaskSpec(
        name="preference",
        folder="preference",
        forms=(
            Form((
                Column(
                    role="prompt",
                    # LLaMA-Factory's conversations stand before `chosen` and `rejected`.
                    names=(*PROMPT_NAMES, "context", "conversations"),
                    setting="prompt_column",
                    is_optional=True,
                ),
                Column(
                    role="chosen",
                    names=(
                        *("chosen", "chosen_response", "chosen_answer", "response_chosen"),
                        *("accepted", "chosen.value"),
                    ),
                    setting="chosen_column",
                    is_target=True,
                ),
                Column(
                    role="rejected",
                    names=(
                        *("rejected", "rejected_response", "rejected_answer"),
                        *("response_rejected", "rejected.value"),
                    ),
                    setting="rejected_column",
                    is_target=True,
                ),
                Column(role="status", names=("status",), is_optional=True, is_content=False),
            ), extras=("messages",)),  # UltraFeedback repeats the chosen conversation
        ),
        options=Options,
        shared_options=("load_in_4bit",),
        learning_rates=(1e-6, 5e-6),
    ),
)  # fmt: skip
