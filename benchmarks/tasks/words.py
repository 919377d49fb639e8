"""Words of generated texts."""

ANIMALS = ["cat", "dog", "horse", "bird", "fish", "cow", "lion", "bear", "wolf", "fox"]
THINGS = ["milk", "wood", "corn", "bread", "salt", "fruit", "stone", "gold", "paper", "wine"]
FILLERS = [
    "very",
    "often",
    "and",
    "today",
    "again",
    "then",
    "they",
    "say",
    "when",
    "it",
    "was",
    "late",
]
