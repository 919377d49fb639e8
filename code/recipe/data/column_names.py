"""Names of columns: those that data comes with, and those that the recipe goes on with."""

from __future__ import annotations

import re

TEXT, LABEL = "text", "label"
TOKEN_IDS = "input_ids"
PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
LEARNED = "learned"
"""Whether each token is learned."""

TEXT_NAMES = (
    "text",
    "texts",
    "sentence",
    "review",
    "content",
    "tweet",
    "comment",
    "comment_text",
    "body",
    "message",
    "review_body",
    "review_text",
    "document",
    "article",
    "description",
    "question",
    "query",
    "utterance",
    "headline",
    "title",
    "input",
    "inputs",
)
"""What the column to read is called, most telling first; lower case, `_` for spaces."""

LABEL_NAMES = (
    "label",
    "labels",
    "target",
    "label_name",
    "class",
    "category",
    "sentiment",
    "emotion",
    "intent",
    "topic",
    "rating",
    "stars",
    "class_index",
    "y",
)
"""What the column to predict is called, most telling first."""


PROMPT_NAMES = ("prompt", "instruction", "question")
COMPLETION_NAMES = ("completion", "response", "answer", "output")
MESSAGES_NAMES = ("messages", "conversation", "conversations", "chat")


def plain(name: str) -> str:
    """A column name as TEXT_NAMES and LABEL_NAMES have it."""
    return name.strip().lower().replace(" ", "_")


SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "eval", "evaluation", "dev", "development"),
    "test": ("test", "testing", "holdout", "heldout"),
}
"""The splits, and the words that name them in channels, folders, files and columns."""

SPLIT_COLUMN = "split"
_WORDS = {word: split for split, words in SPLITS.items() for word in words}
_AMONG_WORDS = re.compile(r"[^a-z]+")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ENDING = re.compile(r"(set|data|file|split)?s?")


def splits_in(name: str) -> set[str]:
    """The splits that the words of a name speak of: `imdb_train-00001` and `trainSet` of train."""
    spaced = _HUMP.sub(" ", name).lower()
    words = _AMONG_WORDS.split(re.sub(r"h(o|e)ld[-_ ]out", "holdout", spaced))
    return {
        split
        for word in words
        for known, split in _WORDS.items()
        if word.startswith(known) and _ENDING.fullmatch(word, len(known))
    }


def split_of(name: str) -> str | None:
    """The one split that a name speaks of."""
    splits = splits_in(name)
    return splits.pop() if len(splits) == 1 else None
