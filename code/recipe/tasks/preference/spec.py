"""Preference optimization: which of two answers to a prompt was chosen (DPO)."""

from __future__ import annotations

from recipe.spec import PROMPT_NAMES, Column, Form, TaskSpec

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
        hyperparameters=(
            *("prompt_column", "chosen_column", "rejected_column", "beta", "loss_type"),
            *("label_smoothing", "load_in_4bit"),
        ),
        learning_rates=(1e-6, 5e-6),
    ),
)  # fmt: skip
