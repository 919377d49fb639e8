"""A small Llama with random weights, for the tasks of models that generate text.

    python benchmarks/tasks/small_llama.py ENCODER FOLDER

writes it, with the vocabulary of an encoder's folder, to FOLDER: the model to give to run.py.
"""

from __future__ import annotations

import sys
from typing import Any


def make(encoder: str, folder: str) -> None:
    """Make a Llama of four layers, 128 wide; no text starts or ends with a special token."""
    import torch
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    vocabulary: Any = AutoTokenizer.from_pretrained(encoder)
    backend = vocabulary.backend_tokenizer
    backend.post_processor = None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", eos_token="[SEP]", unk_token="[UNK]",
        model_max_length=256,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=512, max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
