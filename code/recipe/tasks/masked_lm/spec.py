"""Masked language modelling: the masked tokens of texts."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.option_fields import Effect, option
from recipe.spec import TEXT, TOKEN_IDS, Form, Model, Served, TaskSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    mlm_probability: float = option(
        0.15,
        "masked-lm: share of tokens to mask.",
        valid=(lambda value: 0 < value < 1, "a number between 0 and 1"),
        effect=Effect.SAMPLES,
    )


SPECS = (
    TaskSpec(
        name="masked-lm",
        folder="masked_lm",
        forms=(Form((TOKEN_IDS,)), Form((TEXT,))),
        models=frozenset({Model.MASKED}),
        options=Options,
        shared_options=("sample_by", "long_texts"),
        served={
            "fill-mask": Served(
                load="tasks.masked_lm.serve:MaskFiller.load",
                architectures=("AutoModelForMaskedLM",),
                form="mask",
            )
        },
        rank=1,  # BART's class is text2text-generation's, too
    ),
)
