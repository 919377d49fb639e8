"""Causal language modelling: continuing texts, prompts and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipe import column_words
from recipe.option_fields import NOT_BELOW_0, Effect, option
from recipe.spec import (
    COMPLETION_NAMES,
    DESCRIPTIONS,
    MESSAGES_NAMES,
    PROMPT_NAMES,
    SUMMARY_PAIRS,
    TEXT,
    TOKEN_IDS,
    CellKind,
    Column,
    Form,
    Model,
    Served,
    TaskSpec,
)

CHAT = "/v1/chat/completions"
"""The route that needs a chat template."""

_MESSAGES = Column(
    role="messages", names=(*MESSAGES_NAMES, "dialog"), setting="messages_column"
)  # JumpStart's dialog
_TOOLS = Column(role="tools", names=("tools",), is_optional=True)
_SYSTEM = Column(
    role="system", is_optional=True,
    names=("system", "system_prompt", "system_message", "systemInstruction.parts"),
)  # fmt: skip
_CONTENTS = replace(_MESSAGES, names=("contents",), kind=CellKind.TURNS, is_content=False)
"""Gemini's messages. Columns of texts may be called so, too."""
_PROMPT = Column(
    role="prompt",
    names=PROMPT_NAMES,
    kind=CellKind.TEXT,
    setting="prompt_column",
    words=column_words.QUESTIONS | column_words.TEXTS,
)
_COMPLETION = Column(
    role="completion",
    names=COMPLETION_NAMES,
    kind=CellKind.TEXT,
    setting="completion_column",
    words=column_words.ANSWERS,
    is_target=True,
)
_TURNS = (
    *(("user", second) for second in ("assistant", "bot", "model")),
    *(("human", second) for second in ("assistant", "ai", "bot", "gpt")),
    *(("context", second) for second in ("response", "reply", "completion")),
    *(("input", second) for second in ("gt", "label_text")),
    *(("input_text", second) for second in ("output_text", "target_text")),
    ("user_message", "assistant_message"),
    ("question_text", "answer_text"),
    ("q", "a"),
    ("questions", "answers"),
    ("customer", "agent"),
    ("user_message", "bot_response"),
    *(("question", second) for second in ("query", "sql")),
    ("src", "tgt"),
    ("source", "target"),
    *SUMMARY_PAIRS,
)
"""Names of prompts and completions that count together."""
_TOPICS = (
    *("category", "topic", "intent", "original_question", "class", "subtopic", "tag", "tags"),
    *("task_name", "difficulty", "domain", "subject", "level"),
)
"""Names of columns that describe samples and are not learned (MetaMath has the last one)."""
_DOCUMENTED = (
    *DESCRIPTIONS,
    *("language_score", "token_count", "dump", "file_path", "size", "repo_name", "meta"),
)
"""Names of columns that describe a document of a corpus."""
ALPACA = Form((
    replace(_PROMPT, names=("instruction",), setting="", words=frozenset()),
    Column(role="input", names=("input", "context"), kind=CellKind.TEXT),  # Dolly's context
    replace(_COMPLETION, names=("output", "response"), setting="", words=frozenset()),
    _SYSTEM,
), extras=(*_TOPICS, "text", "prompt"))  # fmt: skip
"""Stanford Alpaca's columns, of which its template makes prompts, unless the user names columns.
`text` or `prompt` is what a template makes of them."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    train_on_prompt: bool = option(
        False,
        "Learn prompts and all messages, too.",
        "train_on_inputs",
        effect=Effect.SAMPLES,
    )
    router_aux_loss_coef: float | None = option(
        None,
        "Factor of the router loss of a mixture of experts. Default: the model's, if its "
        "output_router_logits is true.",
        valid=NOT_BELOW_0,
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        'Variables of the chat template, such as {"enable_thinking": false}; saved with it.',
        effect=Effect.SAMPLES,
    )
    do_generate: bool = option(
        False,
        "Answer prompts of the evaluation data at each evaluation, and score the answers.",
        effect=Effect.BEST,
    )
    generated_scores: str = option(
        "exact_match,rougeL",
        "do_generate: exact_match, exact_answer, valid_json, tool_calls, rouge1, rouge2, rougeL, "
        "rougeLsum, or functions of rewards.py in the channel code or in /opt/ml/code.",
        separator=",",
        effect=Effect.BEST,
    )


SPECS = (
    TaskSpec(
        name="causal-lm",
        folder="causal_lm",
        forms=(
            Form((_MESSAGES, _TOOLS, _SYSTEM), extras=(*_TOPICS, "prompt")),
            ALPACA,
            Form((_PROMPT, _COMPLETION, _TOOLS, _SYSTEM), extras=_TOPICS),
            Form((_PROMPT, _COMPLETION, _TOOLS, _SYSTEM), pairs=_TURNS, extras=_TOPICS),
            Form((_CONTENTS, _SYSTEM), extras=("systemInstruction.role",)),
            Form((TOKEN_IDS,)),
            Form((TEXT,), extras=_DOCUMENTED),
        ),
        models=frozenset({Model.DECODER}),
        options=Options,
        shared_options=(
            *("sample_by", "long_texts", "load_in_4bit", "do_predict", "generated_rows"),
            "max_completion_length",
        ),
        learning_rates=(2e-5, 2e-4),
        rank=2,  # XLM's class is masked-lm's, too
        served={
            "text-generation": Served(
                load="tasks.causal_lm.serve:Generator.load",
                architectures=("AutoModelForCausalLM",),
                adapters=("CAUSAL_LM",),
                routes=(CHAT, "/v1/completions", "/generate", "/generate_stream"),
                form="text",
            )
        },
    ),
)
