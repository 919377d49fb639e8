"""Names of columns: those in files, and those that the recipe uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

TEXT, PAIR, LABEL = "text", "text_pair", "label"
TOKEN_IDS, TYPE_IDS = "input_ids", "token_type_ids"
PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
TOKENS, TAGS, SPANS = "tokens", "tags", "spans"
LEARNED = "learned"
"""Whether each token is learned."""

TEXT_NAMES = (
    *("text", "texts", "sentence", "review", "content", "tweet", "comment", "comment_text", "body"),
    *("message", "review_body", "review_text", "document", "article", "description", "question"),
    *("query", "utterance", "headline", "title", "input", "inputs"),
)
"""What the column to read is called, most telling first; lower case, `_` for spaces."""

SURE_LABELS = ("label", "labels", "class", "label_name", "class_index", "y")
LABEL_NAMES = (
    *SURE_LABELS,
    *("target", "category", "sentiment", "emotion", "intent", "topic", "rating", "stars"),
    "choice",  # Label Studio's
)
"""What the column to predict is called, most telling first. Those that are not sure may stand
beside the one that is meant."""

GRADE_NAMES = ("score", "similarity", "similarity_score", "relatedness_score", "relevance")
"""What says how well two texts belong together: for a classifier, vectors or a reranker."""

LABEL_NAMES_OF_PAIRS = (
    *("gold_label", "is_duplicate", "duplicate", "is_paraphrase", "quality", *GRADE_NAMES),
    *("entailment_judgment", "entailment"),
)
"""What else the column to predict is called beside two texts; two of these are none."""

_SECONDS = {
    "premise": ("hypothesis",),
    "text": ("hypothesis", "text_pair", "pair", "aspect"),
    "sentence": ("hypothesis", "sentence_pair", "aspect"),
    "question": ("sentence", "passage", "context", "paragraph", "document", "answer"),
    "query": ("passage", "document", "doc", "text", "title", "product_title", "answer", "response"),
    "claim": ("evidence", "sentence"),
    "context": ("response",),
    "prompt": ("response", "completion"),
    "anchor": ("target", "positive", "candidate"),
}
TWINS = [
    (f"{name}{between}{one}", f"{name}{between}{other}")
    for name in ("sentence", "text", "question", "s", "string", "title", "sent", "input")
    for between in ("", "_")
    for one, other in ("12", "ab")
]
PAIR_NAMES = [
    *((first, second) for first, seconds in _SECONDS.items() for second in seconds),
    *TWINS,
    ("#1_string", "#2_string"),  # MRPC's own files
]
"""What the two columns of a pair are called, in the order in which they are read."""
THIRDS = {second: second[:-1] + {"2": "3", "b": "c"}[second[-1]] for _, second in TWINS}
"""What a third text is called, beside which two are not a pair."""

METADATA = (
    *("id", "ids", "idx", "index", "guid", "uid", "uuid", "asin", "isbn", "doi", "hash", "md5"),
    *("url", "urls", "uri", "link", "links", "href", "permalink", "domain", "site", "host"),
    *("date", "time", "timestamp", "datetime", "created", "updated", "published", "at", "year"),
    *("author", "authors", "user", "username", "handle", "email", "worker", "annotator"),
    *("lang", "language", "locale", "country", "city", "location", "timezone", "geo", "coord"),
    *("source", "publisher", "split", "fold", "subset", "dataset", "file", "filename", "path"),
    *("user_name", "screen_name", "author_name", "reviewer_name", "file_name", "name"),
    *("label_text", "label_name", "label_str"),
)
"""Columns that are about a text, if they hold a few words: whole names, or their last words."""
DERIVED = (
    *("parse", "tree", "tokens", "lemmas", "explanation", "explanations", "rationale", "reason"),
)
"""Columns that are made of the other texts, or explain the label."""


PROMPT_NAMES = ("prompt", "instruction", "question")
COMPLETION_NAMES = ("completion", "response", "answer", "output")
MESSAGES_NAMES = ("messages", "conversation", "conversations", "chat")

IMAGES = ("image", "images", "video", "videos", "audio", "audios")
ANSWERS_COMPARED = ("chosen", "rejected")
PROMPT_PARTS = (
    *IMAGES,
    *("input", "inputs", "context", "system", "system_prompt", "history", "choices", "options"),
    *("passage", "paragraph", "document", "article", "story"),
)
"""What columns are called that belong to a prompt as well."""
_COMPLETION_PARTS = (
    *("reasoning", "reasoning_content", "thinking", "thoughts", "cot", "complex_cot"),
    *("chain_of_thought", "rationale"),
)
TOOLS = "tools"
"""The column of the tools that a conversation may call."""
TEMPLATE_PARTS = (TOOLS, "functions", "chat_template_kwargs", *IMAGES)
"""Columns beside conversations that TRL hands to their chat template."""
DOCUMENT_PARTS: Mapping[str, Sequence[str]] = {
    PROMPT: (*PROMPT_PARTS, *_COMPLETION_PARTS, *SURE_LABELS, TEXT, *ANSWERS_COMPARED),
    MESSAGES: ("system", "system_prompt", "system_message"),
    TEXT: ANSWERS_COMPARED,
}
"""What columns are called that belong to a document of each kind."""
SPAN_PARTS = ("word", "target_word", "span", "span_text", "span_index", "start", "end")
"""Columns beside a label that is about a word or a span of the text."""


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
SPLIT_COLUMNS = (
    *("split", "splits", "set", "subset", "partition", "dataset", "dataset_split", "data_split"),
    *("data_type", "datatype", "ml_use", "usage", "phase", "fold", "group", "part", "mode"),
)
"""What a column, or a folder `split=train`, is called that says which split a row is of."""
_WORDS = {word: split for split, words in SPLITS.items() for word in words}
_AMONG_WORDS = re.compile(r"[^a-z]+")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ENDING = re.compile(r"(set|data|file|split)?s?")


def splits_in(name: str) -> set[str]:
    """Return the splits that a name mentions: train for `imdb_train-00001` and `trainSet`."""
    spaced = _HUMP.sub(" ", name).lower()
    words = _AMONG_WORDS.split(re.sub(r"h(o|e)ld[-_ ]out", "holdout", spaced))
    return {
        split
        for word in words
        for known, split in _WORDS.items()
        if word.startswith(known) and _ENDING.fullmatch(word, len(known))
    }


def split_of(name: str) -> str | None:
    """Return the split that a name mentions, or None if there are none or several."""
    splits = splits_in(name)
    return splits.pop() if len(splits) == 1 else None
