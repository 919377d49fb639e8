"""Write the report of a training run: a self-contained HTML page."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from recipe.reports import figures
from recipe.reports.model_card import Facts, package_versions
from recipe.reports.section import Section
from recipe.reports.verdict import Verdict, prefix_of

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Material:
    """The content of a report."""

    facts: Facts
    history: Sequence[Mapping[str, Any]]
    """The Trainer's log."""
    verdict: Verdict
    warnings: Sequence[tuple[str, str]]
    """What a warning is about, and the warning."""
    sections: Sequence[Section]
    """The task's sections about the model's answers."""
    lengths: Array
    """Tokens of each training text, truncated."""
    max_length: int
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
    """Write report.html to `folder`, and return its path."""
    # Importing jinja2 and matplotlib takes a second; only reports need them.
    from jinja2 import Environment, FileSystemLoader

    folder.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    history = material.history
    evaluations = len({entry["step"] for entry in history if "eval_loss" in entry})
    sections = [
        Section(title="Loss", figure=functools.partial(figures.loss, history)),
        # One evaluation is in the tiles.
        *([Section(title="Evaluation", figure=functools.partial(figures.evaluation, history))]
          if evaluations > 1 else []),
        *material.sections,
        Section(title="Time", columns=("phase", "seconds"), rows=[*material.phases.items()]),
    ]  # fmt: skip
    with warnings.catch_warnings(), figures.style():
        warnings.simplefilter("ignore")  # about glyphs that matplotlib's font lacks
        drawn = [_drawn(section) for section in sections]
    page = environment.get_template("report.html.j2").render(
        facts=material.facts,
        base=base_name(material.facts),
        verdict=material.verdict,
        warnings=material.warnings,
        tiles=_tiles(material),
        sections=list(zip(sections, drawn, strict=True)),
        # transformers' speeds include evaluations, and would contradict the tile's.
        metrics={
            name: f"{value:.6g}"
            for name, value in material.facts.metrics.items()
            if not name.startswith("train_") or not name.endswith("_per_second")
        },
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        hyperparameters=material.facts.hyperparameters,
        versions=package_versions(),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def _drawn(section: Section) -> Any:
    """Return the section's figure as HTML."""
    figure = section.figure() if section.figure else ""
    return figure if isinstance(figure, str) else figures.svg(figure)


def base_name(facts: Facts) -> str:
    """Return the base model's name; of a folder, the part of its path that is a name."""
    if not facts.base_is_local:
        return facts.base_model
    # `amphora train` links the channel to the folder that it was given.
    folders = Path(facts.base_model).resolve().parts
    parts = [part for part in folders if part not in _USUAL_FOLDERS]
    cached = [part for part in parts if part.startswith("models--")]
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    return parts[-1] if parts else "a model of the channel"


_USUAL_FOLDERS = {"/", "opt", "ml", "input", "data", "model", "models", "checkpoints", "output"}


def _tiles(material: Material) -> dict[str, str]:
    """Return the figures at the top of the report."""
    metrics, real = material.facts.metrics, int(material.lengths.sum())
    prefix = prefix_of(metrics)
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
