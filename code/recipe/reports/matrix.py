"""A confusion matrix as HTML: a table of few classes, a map of many, and the usual confusions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

Array = npt.NDArray[Any]
_IN_TABLE, _CONFUSIONS, _MOST_CELLS = 20, 15, 5_000
_LONG_PREFIX = 5


def draw(counts: Array, names: Sequence[str]) -> Markup:
    """Return the shares of each true class by colour, with counts if there are few classes.

    Args:
        counts: [classes, classes], rows the true ones.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return _table(counts, shares, names) if len(names) <= _IN_TABLE else _map(counts, shares, names)


def explain(names: Sequence[str]) -> str:
    """Return how to read the matrix of many classes; "" for few, which has names."""
    if len(names) <= _IN_TABLE:
        return ""
    return (
        f"Rows are the {len(names)} true classes and columns the predicted ones, in the order of "
        "their ids; correct answers are on the diagonal. Point at a square to see its classes."
    )


def confusions(counts: Array, names: Sequence[str]) -> list[list[Any]]:
    """Return the most frequent confusions: the true and the predicted class, the count, and its
    share of the true class."""
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_CONFUSIONS]
    cells = [divmod(int(cell), len(names)) for cell in order]
    return [
        [names[true], names[predicted], int(wrong[true, predicted]),
         f"{wrong[true, predicted] / counts[true].sum():.0%}"]
        for true, predicted in cells
        if wrong[true, predicted]
    ]  # fmt: skip


def _table(counts: Array, shares: Array, names: Sequence[str]) -> Markup:
    # Narrow headings show the beginning of a name, which may be the same in all of them.
    common = os.path.commonprefix(list(names)).rpartition(" ")[0]  # noqa: RUF071
    names = [f"...{name[len(common) :]}" if len(common) > _LONG_PREFIX else name for name in names]
    heads = Markup("").join(Markup("<th><span>{}</span></th>").format(name) for name in names)
    rows = []
    for name, row, row_shares in zip(names, counts.tolist(), shares.tolist(), strict=True):
        cells = Markup("").join(
            Markup('<td style="--share:{:.0f}%" class="{}">{}</td>').format(
                100 * share, "full" if share > 0.5 else "", f"{count:,}" if count else ""
            )
            for count, share in zip(row, row_shares, strict=True)
        )
        rows.append(Markup("<tr><th>{}</th>{}</tr>").format(name, cells))
    corner = Markup('<th class="corner">true \\ predicted</th>')
    body = Markup("\n").join(rows)
    return Markup('<table class="matrix"><tr>{}{}</tr>\n{}</table>').format(corner, heads, body)


def _map(counts: Array, shares: Array, names: Sequence[str]) -> Markup:
    """Return an SVG with a square for each pair that occurs; a pointer shows its classes."""
    filled = np.argwhere(counts)
    if len(filled) > _MOST_CELLS:
        filled = filled[np.argsort(-counts[tuple(filled.T)], kind="stable")[:_MOST_CELLS]]
    squares = Markup("\n").join(
        Markup('<rect x="{}" y="{}" width="1" height="1" fill-opacity="{:.2f}">'
               "<title>{} as {}: {:,}</title></rect>").format(
            column, row, 0.15 + 0.85 * shares[row, column], escape(names[row]),
            escape(names[column]), counts[row, column])
        for row, column in filled.tolist()
    )  # fmt: skip
    return Markup(
        '<svg class="map" viewBox="0 0 {0} {0}" role="img" aria-label="confusion matrix">{1}</svg>'
    ).format(len(names), squares)
