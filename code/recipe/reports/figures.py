"""The report's figures as SVG, by matplotlib without its global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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


def svg(figure: Any) -> str:
    """Return `figure` as SVG for a page."""
    from markupsafe import Markup

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
    """Plot the scores of the evaluations by step, except perplexity, which is of another order."""
    figure, axes = _axes()
    speed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    for name in dict.fromkeys(key for entry in history for key in entry):
        if name.startswith("eval_") and name not in ("eval_loss", "eval_perplexity", *speed):
            label = name.removeprefix("eval_").replace("_", " ")
            axes.plot(*_points(history, name), marker="o", markersize=4, label=label)
    axes.set_ylabel("score")
    _label_steps(axes)
    figure.legend(loc="outside right center", frameon=False)
    return figure


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
