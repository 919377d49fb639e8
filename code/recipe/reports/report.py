"""Write the report of a training run: a self-contained HTML page, and its figures as PNG."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipe.reports import figures
from recipe.reports.model_card import Facts, versions
from recipe.reports.section import RULE, Section

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Material:
    """The content of a report."""

    facts: Facts
    history: Sequence[Mapping[str, Any]]
    """The Trainer's log."""
    sections: Sequence[Section]
    """The task's sections about the model's answers."""
    lengths: Array
    """Tokens of each training text, truncated."""
    max_length: int
    batch_size: int
    """The hyperparameter, with which the report compares."""
    computed_tokens: int
    """Tokens computed in one pass over the training texts, padding included."""
    phases: Mapping[str, float]
    """Seconds of each phase of the job."""
    price_per_hour: float | None
    """Price of one host."""
    hosts: int
    epochs: float
    """Passes over the training texts since this start of the job."""


def write(material: Material, folder: Path) -> Path:
    """Write report.html and its figures as PNG to `folder`, and return the page's path."""
    # Importing jinja2 and matplotlib takes a second; only reports need them.
    from jinja2 import Environment, FileSystemLoader

    folder.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    with warnings.catch_warnings(), figures.style():
        warnings.simplefilter("ignore")  # about glyphs that matplotlib's font lacks
        shown = {
            "loss": figures.loss(material.history),
            "evaluation": figures.evaluation(material.history),
        }
        if material.max_length:  # images have no lengths
            shown["lengths"] = figures.lengths(material.lengths, material.max_length)
        shown["time"] = figures.phases(material.phases)
        of_task = [section.figure for section in material.sections if section.figure is not None]
        shown |= {name: draw() for name, draw in of_task}
        drawn = {name: figures.save(figure, folder / name) for name, figure in shown.items()}
    page = environment.get_template("report.html.j2").render(
        facts=material.facts,
        tiles=_tiles(material),
        padding=padding(material),
        figures=drawn,
        sections=material.sections,
        rule=RULE,
        # transformers' speeds include evaluations, and would contradict the tile's.
        metrics={
            name: f"{value:.6g}"
            for name, value in material.facts.metrics.items()
            if not name.startswith("train_") or not name.endswith("_per_second")
        },
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        hyperparameters=material.facts.hyperparameters,
        versions=versions(),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def _tiles(material: Material) -> dict[str, str]:
    """Return the figures at the top of the report."""
    metrics, real = material.facts.metrics, int(material.lengths.sum())
    prefix = "test" if any(name.startswith("test_") for name in metrics) else "eval"
    tile_values = [
        (name, metrics[f"{prefix}_{name}"])
        for name in material.facts.about.headline
        if f"{prefix}_{name}" in metrics
    ]
    tiles = {
        f"{prefix} {name.replace('_', ' ')}": f"{value:.4g}" for name, value in tile_values[:3]
    }
    # Of training without evaluations, and of tokens without padding.
    per_second = material.epochs / material.phases["training"]
    if per_second and not material.max_length:
        tiles["images per second"] = f"{per_second * len(material.lengths):,.1f}"
    elif per_second:
        tiles["texts per second"] = f"{per_second * len(material.lengths):,.1f}"
        tiles["tokens per second"] = f"{per_second * real:,.0f}"
    if material.max_length:
        tiles["padding"] = f"{1 - real / material.computed_tokens:.0%}"
    seconds = sum(material.phases.values())
    tiles["time"] = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    if material.price_per_hour is not None:
        cost = material.price_per_hour * material.hosts * seconds / 3600
        tiles[f"cost ({material.hosts} x {material.price_per_hour:g} an hour)"] = f"{cost:.2g}"
    return tiles


def padding(material: Material) -> str:
    """Compare the share of padding with that of other layouts, in a sentence."""
    lengths, most = material.lengths, material.max_length
    if not most:
        return ""
    real, size = int(lengths.sum()), material.batch_size
    computed = f"{1 - real / material.computed_tokens:.1%} of the computed tokens were padding."
    if lengths.max(initial=0) > most:  # texts in windows: other layouts would truncate them
        return computed
    shuffled = np.random.default_rng(0).permutation(lengths)
    batches = [shuffled[index : index + size] for index in range(0, len(shuffled), size)]
    to_longest = sum(len(batch) * int(batch.max()) for batch in batches)
    return (
        f"{computed} It would have been {1 - real / (len(lengths) * most):.1%} with "
        f"all texts padded to {most} tokens, and {1 - real / to_longest:.1%} with random batches "
        f"of {size}, padded to their longest text."
    )
