"""The report's figures as SVG, by matplotlib without its global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

_BLUE, _GREY = "#2a6fbb", "#8a8f98"
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
    "axes.edgecolor": _GREY,
}
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


def _axes(width: float = 5.8, height: float = 3.4) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def curves(history: Sequence[Mapping[str, Any]], names: Mapping[str, str], ylabel: str) -> Any:
    """Plot values of the Trainer's log by step; `names` are their labels by key."""
    figure, axes = _axes()
    for name, label in names.items():
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        marker = "o" if name.startswith("eval_") else None
        axes.plot(
            *zip(*points, strict=True), marker=marker, markersize=4, label=label, clip_on=False
        )
    axes.set(xlabel="step", ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.dataLim.ymin >= 0 > axes.get_ylim()[0]:
        axes.set_ylim(bottom=0)
    for highest in (1, 100):  # no score lies above it, and a tenth of it is a visible change
        if ylabel == "score" and axes.dataLim.ymax <= highest:
            bottom, top = axes.get_ylim()
            missing = max(0, 0.1 * highest - (top - bottom)) / 2
            axes.set_ylim(bottom - missing, min(highest, top + missing))
            break
    figure.legend(loc="outside lower center", frameon=False, ncols=min(3, len(names)))
    return figure


def loss(history: Sequence[Mapping[str, Any]]) -> Any:
    """Plot training and evaluation loss by step."""
    labels = {"loss": "training loss", "eval_loss": "evaluation loss"}
    return curves(history, labels, "loss")


def evaluation(history: Sequence[Mapping[str, Any]]) -> Any:
    """Plot the scores of the evaluations by step, except perplexity, which is of another order."""
    speed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    excluded = ("eval_loss", "eval_perplexity", *speed)
    names = dict.fromkeys(key for entry in history for key in entry)
    labels = {
        name: name.removeprefix("eval_").replace("_", " ")
        for name in names
        if name.startswith("eval_") and name not in excluded
    }
    return curves(history, labels, "score")


def scatter(true: Array, predicted: Array) -> Any:
    """Plot predicted against true numbers, with the line where both are equal."""
    figure, axes = _axes(5.0, 4.2)
    axes.scatter(true, predicted, s=12, alpha=0.5, color=_BLUE, linewidths=0)
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
    axes.plot(ends, ends, color=_GREY, linestyle=":")
    axes.set(xlabel="true", ylabel="predicted")
    return figure
