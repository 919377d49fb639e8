"""The report's figures, by matplotlib without its global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipe.reports.section import Section

BLUE, ORANGE, GREY = "#2a6fbb", "#d9822b", "#8a8f98"
# A page replaces these by its own, which depend on the reader's colour scheme.
_INK, _LINE = "#1f2328", "#e6e8eb"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be found, and takes little room
    "text.parse_math": False,  # a class may be called $5
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _LINE,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
}
_ANNOTATED, _WORST = 12, 12
Array = npt.NDArray[Any]


def style() -> Any:
    """Return a context in which figures are drawn and saved."""
    from matplotlib import rc_context

    return rc_context(_STYLE)


def save(figure: Any, path: Path) -> str:
    """Write `figure` to `path`.png, and return it as SVG for a page."""
    from markupsafe import Markup

    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.set_layout_engine("none")  # laid out already; it would be drawn twice again
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True)
    svg = text.getvalue().replace(_INK, "currentColor").replace(_LINE, "var(--line)")
    return Markup(svg[svg.index("<svg") :])


def _axes(width: float = 9.4, height: float = 3.2) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _label_steps(axes: Any) -> None:
    """Label the x axis with whole steps, and begin the y axis at 0 rather than below it."""
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    values = [value for line in axes.get_lines() for value in line.get_ydata()]
    if values and min(values) >= 0 > axes.get_ylim()[0]:
        axes.set_ylim(bottom=0)
        for line in axes.get_lines():
            line.set_clip_on(False)


def _points(history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[Any], list[Any]]:
    pairs = [(entry["step"], entry[name]) for entry in history if name in entry]
    return [step for step, _ in pairs], [value for _, value in pairs]


def loss(history: Sequence[Mapping[str, Any]]) -> Any:
    """Plot training and evaluation loss, and the learning rate, by step."""
    figure, axes = _axes()
    axes.plot(*_points(history, "loss"), color=BLUE, label="training loss")
    axes.plot(*_points(history, "eval_loss"), color=ORANGE, marker="o", label="evaluation loss")
    axes.set_ylabel("loss")
    _label_steps(axes)
    rate = axes.twinx()
    rate.grid(False)
    rate.plot(*_points(history, "learning_rate"), color=GREY, linestyle=":", label="learning rate")
    rate.set_ylabel("learning rate")
    rate.spines["right"].set_visible(True)
    lines = [*axes.get_lines(), *rate.get_lines()]
    figure.legend(handles=lines, loc="outside upper center", ncols=3, frameon=False)
    return figure


def evaluation(history: Sequence[Mapping[str, Any]]) -> Any:
    """Plot every score of the evaluations, by step; perplexity has a figure of its own."""
    figure, axes = _axes()
    speed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    excluded = ("eval_loss", "eval_perplexity", *speed)
    # Scores that are equal at each step share a line and a label.
    labels: dict[str, list[str]] = {}
    for name in dict.fromkeys(key for entry in history for key in entry):
        # Log-probabilities of whole answers are of another order.
        if not name.startswith("eval_") or name in excluded or name.endswith("_logp"):
            continue
        points = _points(history, name)
        if repr(points) not in labels:
            axes.plot(*points, marker="o", markersize=4)
        label = name.removeprefix("eval_").replace("_", " ")
        labels.setdefault(repr(points), []).append(label)
    for line, names in zip(axes.get_lines(), labels.values(), strict=True):
        line.set_label("\n= ".join(names))
    axes.set_ylabel("score")
    _label_steps(axes)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def perplexity_sections(history: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Return the curve of the evaluations' perplexity by step, if there were any."""

    def draw() -> Any:
        figure, axes = _axes(height=2.6)
        steps, values = _points(history, "eval_perplexity")
        axes.plot(steps, values, color=ORANGE, marker="o")
        axes.set_ylabel("perplexity")
        _label_steps(axes)
        # Within one power of ten, a logarithmic axis has hardly a label.
        if max(values) > 10 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter("")
        return figure

    if not any("eval_perplexity" in entry for entry in history):
        return []
    return [Section(title="Perplexity, evaluation data", figure=("perplexity", draw))]


def confusion(counts: Array, names: Sequence[str]) -> Any:
    """Return the shares of each true class by colour, counts as text.

    Args:
        counts: [classes, classes], rows the true ones.
    """
    side = min(9.0, 2.2 + 0.45 * len(names))
    figure, axes = _axes(side + 1.5, side)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.grid(False)
    ticks = range(len(names))
    axes.set_xticks(ticks, names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(ticks, names)
    axes.set(xlabel="predicted", ylabel="true")
    if len(names) <= _ANNOTATED:
        for row in ticks:
            for column in ticks:
                color = "white" if shares[row, column] > 0.5 else "black"
                text = f"{counts[row, column]:,}"
                axes.text(column, row, text, ha="center", va="center", color=color)
    figure.colorbar(image, label="share of the true class", shrink=0.8)
    return figure


def scatter(true: Array, predicted: Array) -> Any:
    """Plot predicted against true numbers, with the line where both are equal."""
    figure, axes = _axes(5.0, 4.2)
    axes.scatter(true, predicted, s=12, alpha=0.5, color=BLUE, linewidths=0)
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
    axes.plot(ends, ends, color=GREY, linestyle=":")
    axes.set(xlabel="true", ylabel="predicted")
    return figure


def lengths(tokens: Array, max_length: int) -> Any:
    """Plot how many training texts have how many tokens, up to the longest one."""
    figure, axes = _axes(height=2.6)
    longest = int(tokens.max())
    bins = np.linspace(0, longest, min(64, longest) + 1)
    axes.hist(tokens, bins=bins, color=BLUE)
    mean = float(tokens.mean())
    axes.axvline(mean, color=ORANGE, label=f"mean: {mean:.0f}")
    if longest == max_length:
        axes.axvline(max_length, color=GREY, linestyle="--", label=f"cut at {max_length}")
    axes.set(xlabel="tokens", ylabel="training texts")
    axes.legend(frameon=False)
    return figure


def phases(seconds: Mapping[str, float]) -> Any:
    """Plot the seconds of each phase of the job, first on top."""
    figure, axes = _axes(height=0.7 + 0.34 * len(seconds))
    bars = axes.barh(list(seconds), list(seconds.values()), color=BLUE)
    axes.bar_label(bars, fmt="%.1f s", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(False, axis="y")
    axes.set_xlabel("seconds")
    return figure
