"""Token ids to batches. The one place that knows how samples share a tensor."""

from __future__ import annotations

from typing import Any

from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase


def collator(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Makes of `{"input_ids", "label"}` rows one batch, padded to its longest row.

    Returns:
        A callable for a DataLoader: input_ids and attention_mask of shape [B, T] with T a
        multiple of 8, and labels [B] where the rows have a label.
    """
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
