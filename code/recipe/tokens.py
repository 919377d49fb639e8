"""Data sets of texts to data sets of token ids."""

from __future__ import annotations

import datasets
from transformers import PreTrainedTokenizerBase

from recipe.encoding import encode
from recipe.errors import DataError
from recipe.names import TEXT, TOKEN_IDS


def tokenise(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> datasets.Dataset:
    """A data set of `input_ids` (not padded) and `label` from one of `text` and `label`.

    Data that came tokenised is only cut.

    Raises:
        DataError: data that came tokenised was made for another tokenizer.
    """
    if TEXT not in split.column_names:
        return _cut(split, tokenizer, max_length)
    return split.map(
        lambda batch: {TOKEN_IDS: encode(tokenizer, batch[TEXT], max_length)},
        batched=True,
        remove_columns=[TEXT],
        new_fingerprint=f"tokens-{max_length}",
        load_from_cache_file=False,
    )


def _cut(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> datasets.Dataset:
    rows = split[TOKEN_IDS][:]
    largest = max(max(row, default=0) for row in rows)
    if largest >= len(tokenizer):
        raise DataError(
            f"The data came tokenised and has the token id {largest}, but the model's tokenizer "
            f"has {len(tokenizer)} tokens.",
            "Tokenise it with the model's own tokenizer, or give the texts.",
        )
    # The last token is the closing special token, which the model was trained to see.
    cut = [row if len(row) <= max_length else [*row[: max_length - 1], row[-1]] for row in rows]
    return split.remove_columns(TOKEN_IDS).add_column(TOKEN_IDS, cut)
