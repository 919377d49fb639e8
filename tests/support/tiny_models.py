"""Tiny random models and their tokenizers, for tests and for the ordeal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.words import WORDS as REVIEW_WORDS

WORDS = ["the", "film", "was", "good", "bad", "in", "paris", "anna", "said", "again", "who", "."]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer(max_length: int = 48, words: Sequence[str] = WORDS, letters: str = LETTERS) -> Any:
    """Return a WordPiece tokenizer that spells unknown words and marks the second text of a pair."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertTokenizerFast

    pieces = [*SPECIAL, *words, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return BertTokenizerFast(
        tokenizer_object=made, vocab=vocabulary, model_max_length=max_length,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


def save(kind: str, folder: Path, seed: int = 0, reader: Any = None, **config: Any) -> Path:
    """Save a random model of the class `kind`, with weights large enough that answers differ.

    Args:
        reader: Its tokenizer, if not `tokenizer()`.
        config: Values of its configuration.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    reader = reader or tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(reader), "pad_token_id": 0}
    if kind.startswith(("Bert", "Roberta")):
        usual = {
            "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
            "num_attention_heads": 2, "max_position_embeddings": 48, "initializer_range": 0.3,
        }  # fmt: skip
        family = transformers.BertConfig if kind.startswith("Bert") else transformers.RobertaConfig
        made: Any = family(**sizes, **{**usual, **config})
    elif kind.startswith("T5"):
        made = transformers.T5Config(
            d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, eos_token_id=3,
            decoder_start_token_id=0, **sizes, **config,
        )  # fmt: skip
    elif kind.startswith(("Bart", "Marian", "M2M100")):
        family = next(name for name in ("Bart", "Marian", "M2M100") if kind.startswith(name))
        made = getattr(transformers, f"{family}Config")(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
            max_position_embeddings=48, bos_token_id=2, eos_token_id=3, decoder_start_token_id=3,
            init_std=0.3, forced_eos_token_id=3, **sizes, **config,
        )  # fmt: skip
    elif kind.startswith("Llama"):
        usual = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
        made = transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=48, bos_token_id=2, eos_token_id=3, **sizes, **{**usual, **config},
        )  # fmt: skip
    else:
        made = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=2, n_positions=48, bos_token_id=2, eos_token_id=3,
            initializer_range=0.3, **sizes, **config,
        )  # fmt: skip
    getattr(transformers, kind)(made).save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def review_tokenizer(*words: str) -> Any:
    """Return a tokenizer of the words of tests/support/words.py, of these and of numbers."""
    return tokenizer(64, [*REVIEW_WORDS, *words], "0123456789")
