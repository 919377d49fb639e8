"""Text classification: one label, several or a number for each text, or pair of texts."""

from __future__ import annotations

from dataclasses import replace

from recipe.backend.requests import routes
from recipe.spec import (
    LABEL,
    PAIR_LABEL_NAMES,
    PAIRS,
    TEXT,
    TEXT_PAIR,
    TOKEN_IDS,
    Form,
    Served,
    TaskSpec,
    pair_forms,
)

SPECS = (
    TaskSpec(
        name="text-classification",
        folder="text_classification",
        forms=(
            Form((TOKEN_IDS, LABEL)),
            *pair_forms(PAIRS, TEXT, TEXT_PAIR, replace(LABEL, names=PAIR_LABEL_NAMES)),
            Form((TEXT, LABEL)),
        ),
        owns_settings=True,
        hyperparameters=(
            *(
                "text_pair_column",
                "label_column",
                "problem_type",
                "label_separator",
                "missing_labels",
            ),
            *("class_names", "class_weight", "tune_thresholds", "num_labels"),
            *("label_smoothing_factor", "do_predict"),
        ),
        served={
            "text-classification": Served(
                load="tasks.text_classification.serve:Classifier.load",
                architectures=("AutoModelForSequenceClassification",),
                adapters=("SEQ_CLS",),
                routes=(routes.PREDICT, *routes.RANKING, routes.TOKENIZE),
                form="pair",
            ),
            "zero-shot-classification": Served(
                load="tasks.zero_shot.serve:ZeroShot.load", form="labels"
            ),
        },
    ),
)
