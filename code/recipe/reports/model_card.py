"""Write the model card: data, metrics, hyperparameters and versions of a trained model."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import datasets
import torch
import transformers
from huggingface_hub import ModelCardData

from recipe.data.labels import NUMBER, SEVERAL, SINGLE, Labels
from recipe.secret_rules import mask_shapes


@dataclass(frozen=True, kw_only=True)
class About:
    """The purpose of a model, for its card and report."""

    title: str
    pipeline: str
    """The hub's name of its task."""
    purpose: str
    """What it was fine-tuned to do: continues the sentence "Fine-tuned to"."""
    metrics: str
    """How to read the metrics."""
    headline: Sequence[str]
    """The scores that a report shows first, best first, without the split's prefix."""
    library: str = "transformers"
    """The hub's name of the library that loads it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a training run that the card lists."""

    base_model: str
    base_is_local: bool = True
    """Whether `base_model` is a folder, not a name on the hub."""
    hyperparameters: Mapping[str, str]
    """The hyperparameters that are set, without secrets."""
    about: About
    decisions: Sequence[tuple[str, str]]
    """The plan: what was decided, and the decision with its reason."""
    metrics: Mapping[str, float]
    adapter: str = ""
    """What the folder has of a LoRA training: MERGED or ALONE; '' for others."""
    start: str = ""
    """The adapter of `base_model` from which training started; '' for others."""
    job_name: str = ""
    """SageMaker's name of the training job; '' elsewhere."""
    partial: Mapping[str, int] = field(default_factory=dict)
    """Of a training that was stopped: `step` of the weights, `stopped_at` and `of_steps`."""


PARTIAL = (
    "A partial model: training stopped after step {stopped_at} of {of_steps}, and the weights are "
    "those of step {step}."
)
"""The sentence about `Facts.partial`."""


MERGED = "The LoRA adapter is merged into the weights."
ALONE = "The folder has a LoRA adapter alone, not merged: load it with the base model, by peft."


def package_versions() -> dict[str, str]:
    """Return the versions of the software that trained the model."""
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "datasets": datasets.__version__,
    }


def write(facts: Facts) -> str:
    """Return the card as Markdown with the hub's YAML front matter."""
    metrics = {key: f"{value:.6g}" for key, value in facts.metrics.items()}
    front = ModelCardData(
        library_name="peft" if facts.adapter == ALONE else facts.about.library,
        pipeline_tag=facts.about.pipeline,
        base_model=None if facts.base_is_local else facts.base_model,
    )
    return "\n\n".join(
        [
            f"---\n{front.to_yaml()}\n---",
            f"# {facts.about.title}",
            f"Fine-tuned from `{facts.base_model}` to {facts.about.purpose}.",
            *([f"Training started from its adapter `{facts.start}`."] if facts.start else []),
            *([facts.adapter] if facts.adapter else []),
            *([PARTIAL.format(**facts.partial)] if facts.partial else []),
            "## Plan",
            _table("decision", "value", facts.decisions),
            "## Metrics",
            facts.about.metrics,
            _table("metric", "value", metrics.items()),
            "## Hyperparameters",
            _table("hyperparameter", "value", facts.hyperparameters.items()),
            "## Versions",
            _table("software", "version", package_versions().items()),
            "",
        ]
    )


_MEANS = {
    SINGLE: "Precision and recall are means over the labels.",
    SEVERAL: "A label is predicted if its probability is at least 0.5. Accuracy counts texts whose "
    "labels are all correct.",
    NUMBER: "The loss is the mean squared error.",
}


def describe_classifier(labels: Labels, text_columns: Sequence[str]) -> About:
    """Describe a classifier of texts or, with two columns, of pairs."""
    names = ", ".join(f"`{name}`" for name in labels.names)
    is_one = len(labels.names) == 1
    purpose = {
        NUMBER: f"predict a number, {names}"
        if is_one
        else f"predict {len(labels.names)} numbers, {names} (in a pipeline by `top_k=None`)",
        SEVERAL: f"assign any of {len(labels.names)} labels to a text: {names}",
        SINGLE: f"classify texts by {len(labels.names)} labels: {names}",
    }[labels.problem]
    if len(text_columns) == 2:
        first, second = text_columns
        purpose += (
            f", for pairs of texts: `{first}` and `{second}`, in this order. Use it with both: "
            '`tokenizer(first, second)`, or `{"text": first, "text_pair": second}` in a pipeline'
        )
    return About(
        title="Text pair classifier" if len(text_columns) == 2 else "Text classifier",
        pipeline="text-classification",
        purpose=purpose,
        metrics=_MEANS[labels.problem]
        + " Scores are means over the numbers." * (labels.problem == NUMBER and not is_one),
        headline=("accuracy", "f1_macro", "f1_micro", "pearson", "mse", "loss"),
    )


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|"]
    for key, value in rows:
        cell = mask_shapes(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {key} | {cell} |")
    return "\n".join(lines)
