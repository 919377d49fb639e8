"""Report how many tokens of the training data the tokenizer does not know."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

from recipe.data.column_names import TOKEN_IDS
from recipe.tasks.base import OK, WARNING, Finding, Task, Tokenizer, strings_within

_ROWS, _CHARACTERS, _BATCH = 500, 2_000, 64
_MANY = 0.03
"""The share of unknown tokens from which the model loses what texts say."""
_SHOWN = 3


def find_unknown_tokens(
    task: Task, tokenizer: Tokenizer, rows: Sequence[int], left_out: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding if texts of the training data have tokens that are unknown to the tokenizer.

    Args:
        rows: Rows of the training data.
        left_out: Columns without texts that the model reads.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    names = [name for name in task.train.column_names if name not in left_out]
    if unknown is None or not tokenizer.is_fast or not rows or not names:
        return
    rows = rows[:: -(-len(rows) // _ROWS)]
    total, words = 0, Counter[str]()
    for first in range(0, len(rows), _BATCH):
        some = task.train.select_columns(names)[rows[first : first + _BATCH]]
        texts = [text[:_CHARACTERS] for text in strings_within(some)]
        if not texts:
            continue
        encoded = tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for text, ids, offsets in zip(
            texts, encoded[TOKEN_IDS], encoded["offset_mapping"], strict=True
        ):
            total += len(ids)
            words.update(
                text[start:end].strip()
                for number, (start, end) in zip(ids, offsets, strict=True)
                if number == unknown
            )
    if not words:
        return
    share = words.total() / total
    scripts = Counter(
        unicodedata.name(character, "").split(" ")[0].split("-")[0].capitalize()
        for word in words.elements()
        for character in word
        if character.isalpha()
    )
    script, count = scripts.most_common(1)[0] if scripts else ("", 0)
    script = {"Cjk": "Chinese"}.get(script, script)
    detail = f"{share:.1%} of the tokens of {len(rows)} rows are {tokenizer.unk_token}"
    if count > scripts.total() / 2:
        detail += f", most of them {script}"
    if share > _MANY:
        detail += (
            ": the model reads all of them alike. Give a model for the language of the texts, or a "
            "multilingual one"
        )
    shown = ", ".join(repr(word[:20]) for word, _ in words.most_common(_SHOWN))
    yield Finding(
        level=WARNING if share > _MANY else OK,
        what="unknown tokens",
        detail=detail,
        example=f"such as {shown}",
    )
