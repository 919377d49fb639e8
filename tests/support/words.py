"""The words that the tiny model of tests/conftest.py knows, and reviews of them."""

import csv
from pathlib import Path

WORDS = ["the", "film", "was", "good", "great", "bad", "awful", "truly", "number", ","]


def reviews(count: int) -> list[tuple[str, str]]:
    """Return (text, label) rows that a tiny model can learn to tell apart."""
    kinds = [("good", "great", "pos"), ("bad", "awful", "neg")]
    rows = []
    for number in range(count):
        first, second, label = kinds[number % 2]
        rows.append((f"the film number {number} was {first} , truly {second}", label))
    return rows


def triplets(count: int) -> list[dict[str, str]]:
    """Return triplets: the positive text has the number of the query, the negative the next."""
    positive = [f"the great film was number {index} , truly" for index in range(count + 1)]
    return [
        {
            "query": f"film number {index}",
            "positive": positive[index],
            "negative": positive[index + 1],
        }
        for index in range(count)
    ]


def write_reviews(path: Path, count: int) -> Path:
    """Write so many reviews as a CSV file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("review", "sentiment"), *reviews(count)])
    return path
