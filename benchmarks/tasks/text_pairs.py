"""Do two sentences mean the same? MRPC, `msr-para-train.tsv` of github.com/brmson/dataset-sts
(data/para/msr); the reference is run_glue.py's logic.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import film_reviews
from samples import drawn

ARGUMENTS = ["--text_column", "sentence1", "--text_pair_column", "sentence2", "--max_length", "128"]


def data(rows: int, seed: int, source: Path) -> list[dict[str, Any]]:
    """Read Quality, two ids and two strings."""
    with source.open(encoding="utf-8-sig", newline="") as stream:
        listed = list(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    pairs = [
        {"sentence1": row[3], "sentence2": row[4], "label": "yes" if row[0] == "1" else "no"}
        for row in listed
        if len(row) == 5
    ]
    return drawn(pairs, rows, seed)


reference = film_reviews.reference
judge = film_reviews.judge
