"""Extractive summaries: which sentences of a document summarize it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipe.option_fields import NOT_BELOW_0, Effect, option
from recipe.spec import CellKind, Column, Form, Model, Served, TaskSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    neighbours: int = option(
        1,
        "extractive-summarization: sentences before and after each one that are read with it.",
        valid=NOT_BELOW_0,
        effect=Effect.SAMPLES,
    )


SPECS = (
    TaskSpec(
        name="extractive-summarization",
        folder="extractive_summary",
        forms=(
            Form(
                (
                    Column(role="sentences", names=("sentences",), kind=CellKind.TEXTS),
                    Column(role="in_summary", names=("in_summary",), is_target=True),
                )
            ),
        ),
        models=frozenset({Model.ENCODER, Model.MASKED}),
        options=Options,
        served={
            "extractive-summarization": Served(load="tasks.extractive_summary.serve:Extractor.load")
        },
    ),
)


def pairs_of(sentences: Sequence[str], neighbours: int) -> list[tuple[str, str]]:
    """Return each sentence with the text around it."""
    return [
        (text, " ".join(sentences[max(0, index - neighbours) : index + neighbours + 1]))
        for index, text in enumerate(sentences)
    ]
