"""Text classification: one label, several or a number for each text, or pair of texts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipe import column_words
from recipe.option_fields import Effect, option
from recipe.spec import (
    ANNOTATORS,
    BODY,
    HEADED,
    HEADING,
    INT8_OPTIONS,
    LABEL,
    PAIR_LABEL_NAMES,
    PAIRS,
    TEXT,
    TEXT_PAIR,
    TITLE,
    TOKEN_IDS,
    Form,
    Served,
    TaskSpec,
)

_REPLIES = tuple(sorted(column_words.REPLIES))
RANKING = ("/rerank", "/v1/rerank", "/v2/rerank")
"""The routes of rankings, which need a model of one label."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    tune_thresholds: bool = option(
        False,
        "Several labels for each text: choose the threshold of each label by its best F1 on "
        "the evaluation data, instead of 0.5.",
        effect=Effect.NONE,
    )


SPECS = (
    TaskSpec(
        name="text-classification",
        folder="text_classification",
        forms=(
            Form((TOKEN_IDS, LABEL)),
            Form(
                # What pairs are about is seldom what is learned of them.
                (
                    TEXT,
                    TEXT_PAIR,
                    replace(LABEL, names=PAIR_LABEL_NAMES, words=column_words.OPINIONS),
                ),
                pairs=PAIRS,
                extras=tuple(sorted(ANNOTATORS)),
            ),
            Form((TEXT, LABEL), extras=_REPLIES),
            Form((HEADING, HEADED, LABEL), extras=_REPLIES),
            Form((TITLE, BODY, LABEL), extras=_REPLIES, is_of_reports=True),
        ),
        owns_settings=True,
        options=Options,
        shared_options=(
            "problem_type",
            "label_separator",
            "missing_labels",
            "class_names",
            "class_weight",
            "num_labels",
            "label_smoothing_factor",
            "do_predict",
            *INT8_OPTIONS,
        ),
        served={
            "text-classification": Served(
                load="tasks.text_classification.serve:Classifier.load",
                architectures=("AutoModelForSequenceClassification",),
                adapters=("SEQ_CLS",),
                inputs=(
                    Form((TEXT,)),
                    Form((TEXT, TEXT_PAIR)),
                    *(Form((TEXT, TEXT_PAIR)).with_pair(pair) for pair in PAIRS),
                ),
                routes=("/predict", *RANKING),
                form="pair",
            ),
            "zero-shot-classification": Served(
                load="tasks.zero_shot.serve:ZeroShot.load", form="labels"
            ),
        },
    ),
)
