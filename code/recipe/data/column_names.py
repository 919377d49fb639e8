"""Names of columns: those in files, and those that the recipe uses."""

from __future__ import annotations

import re
from collections.abc import Sequence

TEXT, PAIR, LABEL = "text", "text_pair", "label"
TOKEN_IDS, TYPE_IDS = "input_ids", "token_type_ids"
PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
TOKENS, TAGS, SPANS = "tokens", "tags", "spans"
SOURCE, TARGET = "source", "target"
LEARNED = "learned"
"""Whether each token is learned."""

ADDRESS = "address"
"""The column of `Part.addresses`, which `recipe.data.held_out` takes off."""
TOOLS = "tools"
"""The column of the tools that a conversation may call."""
SYSTEM = "system"
"""The column of the system prompt of a conversation, instruction or prompt."""


def plain_name(name: str) -> str:
    """Return a column name in the form of TEXT_NAMES and LABEL_NAMES."""
    return name.strip().lower().replace(" ", "_")


WORD_NAMES = ("word", "words", "token", "tokens")
_SENTENCE = re.compile(r"sent(ence)?(_?(id|idx|no|number|#))?")


def word_columns(names: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the column of sentences and that of words, if there is one of each."""
    sentences = [name for name in names if _SENTENCE.fullmatch(plain_name(name))]
    words = [name for name in names if plain_name(name) in WORD_NAMES]
    return (sentences[0], words[0]) if len(sentences) == len(words) == 1 else (None, None)


SPLITS = {
    "train": ("train", "training", "trn"),
    "validation": (
        *("validation", "valid", "val", "eval", "evaluation", "dev", "development"),
        *("devel", "validate"),
    ),
    "test": ("test", "testing", "holdout", "heldout", "tst"),
}
"""The splits, and the words that name them in channels, folders, files and columns."""

SPLIT_COLUMNS = (
    *("split", "splits", "set", "subset", "partition", "dataset", "dataset_split", "data_split"),
    *("data_type", "datatype", "ml_use", "usage", "phase", "fold", "group", "part", "mode"),
)
"""Names of columns, and of folders such as `split=train`, that hold the split of a row."""
_WORDS = {word: split for split, words in SPLITS.items() for word in words}
_AMONG_WORDS = re.compile(r"[^a-z]+")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_METHOD = re.compile(r"(?<![A-Za-z])[A-Z]+[a-z]+(Eval|Testing)(?![a-z])")
_ENDING = re.compile(r"(set|data|file|split)?s?")
_LETTERED = {"testa": "test", "testb": "test"}
"""The words of CoNLL-2003's files that hold no training data."""


def splits_in(name: str) -> set[str]:
    """Return the splits that a name mentions: train for `imdb_train-00001` and `trainSet`.

    Words within a word count if none stands between separators, except those that end the names of
    competitions and methods: `SemEval2016`, `UserTesting`.
    """
    return _splits_in(name) or _splits_in(_HUMP.sub(" ", _METHOD.sub("", name)))


def _splits_in(name: str) -> set[str]:
    words = _AMONG_WORDS.split(re.sub(r"h(o|e)ld[-_ ]out", "holdout", name.lower()))
    return {_LETTERED[word] for word in words if word in _LETTERED} | {
        split
        for word in words
        for known, split in _WORDS.items()
        if word.startswith(known) and _ENDING.fullmatch(word, len(known))
    }


def split_of(name: str) -> str | None:
    """Return the split that a name mentions, or None if there are none or several."""
    splits = splits_in(name)
    return splits.pop() if len(splits) == 1 else None
