"""Text to text: summaries, translations and other text generated for a text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipe import column_words
from recipe.option_fields import AT_LEAST_1, Effect, option
from recipe.spec import (
    COMPLETION_NAMES,
    PROMPT_NAMES,
    SUMMARY_PAIRS,
    CellKind,
    Column,
    Form,
    Model,
    Served,
    TaskSpec,
)

SUMMARIES, TRANSLATIONS, TEXTS = "summarization", "translation", "text2text-generation"
SOURCE = Column(role="source", names=("source",), kind=CellKind.TEXT, setting="text_column")
TARGET = Column(
    role="target", names=("target",), kind=CellKind.TEXT, setting="label_column", is_target=True
)
_ASIDE = ("title", "topic", "topics")
"""Names of columns that describe a text, which a summary may leave unread."""
_SUMMARIES = Form(
    (SOURCE, TARGET),
    pairs=SUMMARY_PAIRS,
    extras=_ASIDE,
)  # fmt: skip
_SUMMED_UP = Form((
    replace(SOURCE, names=("document",), words=column_words.TEXTS),
    replace(TARGET, names=("summary",), words=column_words.SUMMARIES),
), extras=_ASIDE)  # fmt: skip
_TRANSLATIONS = Form(
    (SOURCE, TARGET),
    pairs=(
        ("translation.{source_lang}", "translation.{target_lang}"),
        ("{source_lang}", "{target_lang}"),
        ("source", "translation"),
        ("text", "translation"),
    ),
)
_TEXTS = Form(
    (SOURCE, TARGET),
    pairs=(
        ("source", "target"), ("src", "tgt"), ("src", "trg"), ("src_text", "tgt_text"),
        ("source_text", "target_text"), ("input_text", "target_text"), ("text", "target"),
        ("inputs", "labels"), ("question", "long_answer"), ("title", "answer"),
    ),
)  # fmt: skip
_PROMPTS = Form((replace(SOURCE, names=PROMPT_NAMES), replace(TARGET, names=COMPLETION_NAMES)))
_FORMS = {
    SUMMARIES: [_SUMMARIES, _SUMMED_UP],
    TRANSLATIONS: [_TRANSLATIONS],
    TEXTS: [_TEXTS, _PROMPTS],
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    source_prefix: str | None = option(
        None,
        "summarization, translation, text2text-generation: prefix of each source text in "
        "training and serving, such as 'summarize: '.",
        "prefix",
        effect=Effect.SAMPLES,
    )
    max_target_length: int | None = option(
        None,
        "Maximum length of a target text in tokens, in training and serving. Default: 128, or "
        "the model's limit.",
        valid=AT_LEAST_1,
        effect=Effect.SAMPLES,
    )
    predict_with_generate: bool = option(
        True, "Generate text in evaluations, and score it (ROUGE, BLEU, chrF).", effect=Effect.BEST
    )
    num_beams: int | None = option(
        None,
        "Number of beams in generation. Default: the model's.",
        "generation_num_beams",
        valid=AT_LEAST_1,
        effect=Effect.BEST,
    )


SPECS = tuple(
    TaskSpec(
        name=name,
        folder="text_to_text",
        forms=(
            *_FORMS[name],
            *(
                replace(form, needs_task=True)
                for task, forms in _FORMS.items()
                if task != name
                for form in forms
            ),
        ),
        models=frozenset({Model.SEQ2SEQ}),
        options=Options,
        shared_options=(
            *("source_lang", "target_lang", "label_smoothing_factor", "do_predict"),
            "generated_rows",
        ),
        learning_rates=(1e-4, 3e-4),
        served={
            name: Served(
                load="tasks.text_to_text.serve:TextGenerator.load",
                options={"task": name},
                architectures=("AutoModelForSeq2SeqLM",) if name == TEXTS else (),
                adapters=("SEQ_2_SEQ_LM",) if name == TEXTS else (),
                form="text",
            )
        },
    )
    for name in _FORMS
)
