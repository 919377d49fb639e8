"""The model card: what a model was made of, how, and how good it turned out to be."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import datasets
import torch
import transformers
from huggingface_hub import ModelCardData

from recipe.data.labels import NUMBER, SEVERAL, SINGLE, Labels
from recipe.hyperparameters import Hyperparameters
from recipe.secret_rules import is_secret_name, mask_shapes


@dataclass(frozen=True, kw_only=True)
class About:
    """What a model is for."""

    title: str
    pipeline: str
    """The hub's name of its task."""
    purpose: str
    """What it was fine-tuned to do: goes on after "to"."""
    metrics: str
    """How the metrics are to be read."""
    headline: Sequence[str]
    """The scores that a report shows first, best first, without the split's prefix."""
    library: str = "transformers"
    """The hub's name of what loads it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the card tells of a training run."""

    base_model: str
    base_is_local: bool = True
    """Whether `base_model` is a folder, not a name on the hub."""
    hyperparameters: Hyperparameters
    about: About
    decisions: Sequence[tuple[str, str]]
    """The plan: what was decided, and the decision with its reason."""
    metrics: Mapping[str, float]


def versions() -> dict[str, str]:
    """Versions of what trained the model."""
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "datasets": datasets.__version__,
    }


def write(facts: Facts) -> str:
    """The card as Markdown with the hub's YAML front matter."""
    metrics = {key: f"{value:.6g}" for key, value in facts.metrics.items()}
    front = ModelCardData(
        library_name=facts.about.library,
        pipeline_tag=facts.about.pipeline,
        base_model=None if facts.base_is_local else facts.base_model,
    )
    return "\n\n".join(
        [
            f"---\n{front.to_yaml()}\n---",
            f"# {facts.about.title}",
            f"Fine-tuned from `{facts.base_model}` to {facts.about.purpose}.",
            "## Plan",
            _table("decision", "value", facts.decisions),
            "## Metrics",
            facts.about.metrics,
            _table("metric", "value", metrics.items()),
            "## Hyperparameters",
            _table("hyperparameter", "value", shown(facts.hyperparameters).items()),
            "## Versions",
            _table("software", "version", versions().items()),
            "",
        ]
    )


_MEANS = {
    SINGLE: "Precision and recall are means over the labels.",
    SEVERAL: "A label counts as given from a probability of 0.5; accuracy is of the whole set.",
    NUMBER: "The loss is the mean squared error.",
}


def of_labels(labels: Labels, text_columns: Sequence[str]) -> About:
    """What a classifier of these labels is for, of texts or (from two columns) of pairs."""
    names = ", ".join(f"`{name}`" for name in labels.names)
    purpose = {
        NUMBER: f"predict a number, {names}",
        SEVERAL: f"tell which of {len(labels.names)} labels a text has: {names}",
        SINGLE: f"tell {len(labels.names)} labels apart: {names}",
    }[labels.problem]
    if len(text_columns) == 2:
        first, second = text_columns
        purpose += (
            f", for pairs of texts: `{first}` and `{second}`, in this order. Ask it with both: "
            '`tokenizer(first, second)`, or `{"text": first, "text_pair": second}` in a pipeline'
        )
    return About(
        title="Text classifier" if len(text_columns) == 1 else "Classifier of pairs of texts",
        pipeline="text-classification",
        purpose=purpose,
        metrics=_MEANS[labels.problem],
        headline=("accuracy", "f1_macro", "f1_micro", "pearson", "mse", "loss"),
    )


def shown(hyperparameters: Hyperparameters) -> dict[str, str]:
    """Hyperparameters that have a value, as text; secrets such as hub_token left out."""
    values = dataclasses.asdict(hyperparameters)
    passed = values.pop("passed")
    del values["notes"]
    return {
        key: mask_shapes(value if isinstance(value, str) else json.dumps(value, default=str))
        for key, value in {**values, **passed}.items()
        if value is not None and not is_secret_name(key)
    }


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|"]
    for key, value in rows:
        cell = mask_shapes(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {key} | {cell} |")
    return "\n".join(lines)
