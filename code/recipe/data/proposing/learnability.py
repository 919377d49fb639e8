"""Tell which classes can be learned from texts, by a linear model of their letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

LEARNED_ROWS, _FEWEST_ROWS, _CHARS = 600, 18, 400
"""Rows that are learned and judged, at most and at least, and what is read of each text."""
_LETTERS, _FEATURES, _FOLDS = (2, 4), 20_000, 3


def learned_shares(texts: Sequence[str], columns: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return, for each column of classes with enough rows, the share of the mistakes of always
    naming the largest class that a model avoids on rows that it did not see: at most 1.

    Args:
        texts: The text of each row.
        columns: The classes of the rows, by the names of their columns; "" where there is none.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import RidgeClassifier
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    letters = TfidfVectorizer(
        analyzer="char_wb", ngram_range=_LETTERS, sublinear_tf=True, max_features=_FEATURES
    ).fit_transform([f"{text[:_CHARS]} ." for text in texts])
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
    shares = {}
    for name, classes in columns.items():
        counts = Counter(classes)
        rows = [n for n, label in enumerate(classes) if label and counts[label] >= _FOLDS]
        known = np.array([classes[row] for row in rows])
        largest = max((counts[label] for label in {*known.tolist()}), default=0)
        if len(rows) >= _FEWEST_ROWS and largest < len(rows):
            predicted = cross_val_predict(RidgeClassifier(), letters[rows], known, cv=folds)
            right = int((predicted == known).sum())
            shares[name] = (right - largest) / (len(rows) - largest)
    return shares
