"""Token classification: a tag for each word, or labelled spans of a text."""

from __future__ import annotations

from dataclasses import replace

from recipe.spec import INT8_OPTIONS, CellKind, Column, Form, Served, TaskSpec

_WORDS = Column(
    role="tokens",
    names=("tokens", "words", "token", "word"),
    names_of_task=("text", "sentence"),
    setting="text_column",
)
_TAGS = Column(
    role="tags",
    names=(
        *("ner_tags", "tags", "ner", "ner_labels", "iob_tags", "bio_tags", "entity_tags"),
        *("slots", "slot_labels", "ner_tag", "tag", "labels"),
    ),
    names_of_task=("label",),
    setting="label_column",
    is_target=True,
)
_LAYERS = ("upos", "pos_tags", "pos", "chunk_tags", "xpos")
"""Columns of other tags, which may exist in addition to entities."""
_REPEATED = ("text", "raw_text", "full_text", "sentence", "lemmas", "head", "langs")
_SPANS = Column(
    role="tags",
    names=("entities", "spans", "annotations"),
    names_of_task=("label", "labels", "ner", "entity", "tags"),
    kind=CellKind.SPANS,
    setting="label_column",
    is_target=True,
)
_SPANNED = Column(
    role="tokens",
    names=("text", "data.text", "content", "sentence"),
    names_of_task=("data",),
    setting="text_column",
)


SPECS = (
    TaskSpec(
        name="token-classification",
        folder="token_classification",
        forms=(
            Form((_SPANNED, _SPANS)),
            Form((_WORDS, _TAGS), extras=(*_LAYERS, *_REPEATED, "spans")),
            *(Form((_WORDS, replace(_TAGS, names=(layer,), names_of_task=())),
                   extras=(*_LAYERS, *_REPEATED))
              for layer in _LAYERS),
        ),
        shared_options=(
            "class_names",
            "label_smoothing_factor",
            "long_texts",
            "do_predict",
            *INT8_OPTIONS,
        ),
        served={
            "token-classification": Served(
                load="tasks.token_classification.serve:Tagger.load",
                architectures=("AutoModelForTokenClassification",),
                adapters=("TOKEN_CLS",),
                form="text",
            ),
        },
    ),
)  # fmt: skip
