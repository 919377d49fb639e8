"""Masked language modelling: the masked tokens of texts."""

from __future__ import annotations

from recipe.spec import TEXT, TOKEN_IDS, Form, Model, Served, TaskSpec

SPECS = (
    TaskSpec(
        name="masked-lm",
        folder="masked_lm",
        forms=(Form((TOKEN_IDS,)), Form((TEXT,))),
        models=frozenset({Model.MASKED}),
        hyperparameters=("mlm_probability", "whole_word_masking", "sample_by", "long_texts"),
        served={
            "fill-mask": Served(
                load="tasks.masked_lm.serve:MaskFiller.load",
                architectures=("AutoModelForMaskedLM",),
                form="mask",
            ),
        },
        rank=1,  # BART's class is text2text-generation's, too
    ),
)
