"""Queries and passages of known truth, for the tasks that rank.

A concept has one word in queries and another in passages, and which of these go together is to be
learned; queries of the test are combinations that no training row has.
"""

from __future__ import annotations

import random
from typing import Any

CONCEPTS, IN_A_QUERY, NEGATIVES = 60, 3, 3
LENGTH = 64
FILLERS = ["please", "find", "the", "document", "that", "was", "written", "about", "in", "these"]


def words(drawn: random.Random) -> list[str]:
    """Invented words that tell nothing of each other."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    invented: dict[str, None] = {}
    while len(invented) < 2 * CONCEPTS:
        invented["".join(drawn.choices(syllables, k=3))] = None
    return list(invented)


def sentence(drawn: random.Random, chosen: list[str]) -> str:
    """The chosen words in any order among fillers, of which there are 3 to 20."""
    mixed = [*chosen, *drawn.choices(FILLERS, k=drawn.randrange(3, 21))]
    drawn.shuffle(mixed)
    return " ".join(mixed)


def is_for_tests(concepts: tuple[int, ...]) -> bool:
    """One combination in five is kept from training, whatever the seed."""
    return sum(concepts) % 5 == 0


def queries(rows: int, seed: int, for_tests: bool) -> list[dict[str, Any]]:
    """Queries with a passage of the same concepts, and passages that share some of them."""
    drawn = random.Random(seed)
    vocabulary = words(random.Random(0))
    combinations: dict[tuple[int, ...], None] = {}
    while len(combinations) < rows:
        concepts = tuple(sorted(drawn.sample(range(CONCEPTS), IN_A_QUERY)))
        if is_for_tests(concepts) == for_tests:
            combinations[concepts] = None
    made = []
    for concepts in combinations:
        others = []
        for _ in range(NEGATIVES):
            other = drawn.choice([each for each in range(CONCEPTS) if each not in concepts])
            others.append((other, *concepts[1:]))
        passages = [
            sentence(drawn, [vocabulary[2 * each + 1] for each in one])
            for one in (concepts, *others)
        ]
        query = sentence(drawn, [vocabulary[2 * each] for each in concepts])
        made.append({"query": query, "documents": passages})
    return made
