"""Names of columns: those that data comes with, and those that the recipe goes on with."""

from __future__ import annotations

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
