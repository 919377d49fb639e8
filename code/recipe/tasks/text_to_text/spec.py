"""Text to text: summaries, translations and other texts that a model writes for a text."""

from __future__ import annotations

from dataclasses import replace

from recipe.spec import (
    COMPLETION_NAMES,
    PROMPT_NAMES,
    Column,
    Form,
    Kind,
    Model,
    Served,
    TaskSpec,
    pair_forms,
)

SUMMARIES, TRANSLATIONS, TEXTS = "summarization", "translation", "text2text-generation"
SOURCE = Column(role="source", names=("source",), kind=Kind.TEXT, setting="text_column")
TARGET = Column(
    role="target", names=("target",), kind=Kind.TEXT, setting="label_column", is_target=True
)
_SUMMARIES = pair_forms(
    (
        ("document", "summary"), ("article", "highlights"), ("dialogue", "summary"),
        ("article", "summary"), ("text", "summary"), ("article", "abstract"),
        ("description", "abstract"), ("report", "summary"), ("body", "summary"),
        ("content", "summary"), ("news_body", "news_title"), ("extract_text", "summary_text"),
        ("transcript", "summary"), ("documents", "tldr"), ("text", "tldr"), ("text", "headline"),
        ("article", "headline"), ("text", "abstract"), ("email_body", "subject_line"),
    ),
    SOURCE,
    TARGET,
    extras=("title",),
)  # fmt: skip
_TRANSLATIONS = (
    *pair_forms(
        (("translation.{source_lang}", "translation.{target_lang}"),
         ("{source_lang}", "{target_lang}")),
        SOURCE,
        TARGET,
    ),
    *pair_forms((("source", "translation"), ("text", "translation")), SOURCE, TARGET),
)  # fmt: skip
_TEXTS = (
    *pair_forms(
        (
            ("source", "target"), ("src", "tgt"), ("source_text", "target_text"),
            ("input_text", "target_text"), ("text", "target"), ("inputs", "labels"),
            ("question", "long_answer"),
        ),
        SOURCE,
        TARGET,
    ),
    Form((replace(SOURCE, names=PROMPT_NAMES), replace(TARGET, names=COMPLETION_NAMES))),
)  # fmt: skip
_FORMS = {SUMMARIES: _SUMMARIES, TRANSLATIONS: _TRANSLATIONS, TEXTS: _TEXTS}
_SERVED = {
    SUMMARIES: ((), ()),
    TRANSLATIONS: ((), ()),
    TEXTS: (("AutoModelForSeq2SeqLM",), ("SEQ_2_SEQ_LM",)),
}


def _spec(name: str) -> TaskSpec:
    others = [form for task, forms in _FORMS.items() if task != name for form in forms]
    architectures, adapters = _SERVED[name]
    return TaskSpec(
        name=name,
        folder="text_to_text",
        forms=(*_FORMS[name], *(replace(form, needs_task=True) for form in others)),
        models=frozenset({Model.SEQ2SEQ}),
        hyperparameters=(
            *("label_column", "source_prefix", "max_target_length", "predict_with_generate"),
            *("num_beams", "generated_rows", "label_smoothing_factor", "do_predict"),
            *("source_lang", "target_lang"),
        ),
        learning_rates=(1e-4, 3e-4),
        served={
            name: Served(
                load="tasks.text_to_text.serve:TextGenerator.load",
                options={"task": name},
                architectures=architectures,
                adapters=adapters,
                form="text",
            )
        },
    )


SPECS = tuple(map(_spec, _FORMS))
