"""Report how a model ranked the texts of an evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from recipe.reports import figures, section
from recipe.reports.section import Section

_WORST = 12


def sections(
    split: str,
    ranks: Sequence[npt.NDArray[np.int64]],
    right: npt.NDArray[np.float32],
    wrong: npt.NDArray[np.float32],
    show: Callable[[int], tuple[str, str, str]],
) -> list[Section]:
    """Return the histogram of ranks, both sides' scores, and the worst queries.

    Args:
        ranks: The ranks of each query's relevant texts, best first.
        right: The highest score of a relevant text of each query.
        wrong: The highest score of an irrelevant text of each query.
        show: Returns a query (by its number), its best relevant text, and the irrelevant text with
            the highest score.
    """
    if not ranks:
        return []
    firsts = np.asarray([rank[0] for rank in ranks])
    finite = np.isfinite(right) & np.isfinite(wrong)
    missed = np.flatnonzero(firsts > 1)
    worst = missed[np.lexsort((right[missed] - wrong[missed], -firsts[missed]))][:_WORST]
    rows = []
    for query in worst.tolist():
        text, good, other = (section.beginning(shown) for shown in show(query))
        score, highest = f"{right[query]:.3f}", f"{wrong[query]:.3f}"
        rows.append([text, str(firsts[query]), good, score, other, highest])
    draw_ranks = functools.partial(figures.ranks, firsts)
    sections = [Section(title=f"Ranks, {split} data", figure=("ranks", draw_ranks))]
    if finite.any():
        draw = functools.partial(figures.two_scores, right[finite], wrong[finite])
        sections.append(Section(title=f"Scores, {split} data", figure=("scores", draw)))
    headings = (("query", "rank"), ("right text", "score"), ("wrong text", "score"))
    sections.append(
        Section(
            title=f"Worst queries, {split} data",
            note="" if rows else f"None of {len(ranks)}: a relevant text is ranked first for each.",
            columns=section.texts_with_numbers(*headings),
            rows=rows,
        )
    )
    return sections
